"""Ways in which the data of a bucket gets from rank to rank other than through the process group. Torch-free at import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from intarsia.comm import Communicator, Prepared, PreparedReduce


@runtime_checkable
class Transport(Protocol):
    """Built by `target(config)`; handed to `Communicator.duplicate`. Stability: provisional.

    Its prepared calls derive from `intarsia.comm.Prepared` and `PreparedReduce`, so that they are named, counted and checked as others are, and give the
    same bits. What it returns None for goes through the process group; every rank returns None, or no rank does.
    """

    name: str
    bytes_allocated: int
    """Bytes of device memory that `empty` has handed out: allocator statistics may not see them."""

    def check(self, comm: Communicator) -> None:
        """Raise UsageError, naming what is lacking, unless the devices of `comm`'s ranks can do it. A collective."""

    def empty(self, comm: Communicator, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor on `comm.device` that the other ranks can read. A collective; `numel` may differ by rank."""

    def prepare_gather(self, comm: Communicator, local: Tensor, full: Tensor, counts: Sequence[int], what: str) -> Prepared | None:
        """See `Communicator.prepare_gather`; None where `local` does not come from `empty`."""

    def prepare_reduce_scatter(
        self,
        comm: Communicator,
        full: Tensor,
        counts: Sequence[int],
        what: str,
        combine: Callable[[Sequence[Tensor], Tensor], None],
        scratch: Tensor | None,
    ) -> PreparedReduce | None:
        """See `Communicator.prepare_reduce_scatter`."""

    def fence(self, comm: Communicator) -> None:
        """See `Communicator.fence`: enqueued on the current stream, may be captured. A collective."""
