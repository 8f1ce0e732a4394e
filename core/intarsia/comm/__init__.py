"""The only place that calls collectives.

A `Communicator` is a group of ranks. Every call is named by `what` (messages and statistics use it), timed, counted in bytes, and in check mode
compared across ranks before it starts, so that ranks that have diverged get an error with both sides instead of a hang. Sizes are the true
ones: counts may differ by rank and may be zero. Data travels as the dtype it has; gaps of a backend (gloo has no uneven all-gather, no list
all-to-all, no reduction in float8, slow or missing ones in half precision) are closed here and nowhere else.

Process rules: every rank of a group makes the same collective calls in the same order; `send` and `receive` concern two ranks only. A rank without data joins with zero counts.
"""

from intarsia.comm.base import Communicator, FakeCommunicator, ReduceOp, SelfCommunicator, Statistic, Work
from intarsia.comm.group import ProcessGroupCommunicator, init_world
from intarsia.comm.prepared import Combine, Prepared, PreparedReduce, add_parts
from intarsia.contracts.transport import Transport

__all__ = [
    "Combine",
    "Communicator",
    "FakeCommunicator",
    "Prepared",
    "PreparedReduce",
    "ProcessGroupCommunicator",
    "ReduceOp",
    "SelfCommunicator",
    "Statistic",
    "Transport",
    "Work",
    "add_parts",
    "init_world",
]
