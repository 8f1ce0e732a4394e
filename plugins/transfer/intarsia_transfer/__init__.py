"""Moving tensors from one layout to another. `run_transfers` (in `intarsia_transfer.run`, which imports torch) carries out what `transfer` plans."""

from intarsia_transfer.plan import Move, MoveOp, Transfer, transfer

__version__ = "0.1.0.dev0"

__all__ = ["Move", "MoveOp", "Transfer", "__version__", "transfer"]
