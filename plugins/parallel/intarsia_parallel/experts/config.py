"""Settings of the role `expert` and of the dispatchers. Torch-free."""

from __future__ import annotations

import math

import chz
from intarsia.config import RoleConfig
from intarsia.errors import UsageError, did_you_mean
from intarsia_models_common.config import check_between
from intarsia_models_common.moe.config import DispatcherConfig

OVERFLOWS = ("error", "drop")


@chz.chz(typecheck=True)
class AllToAllConfig(DispatcherConfig):
    """All-to-all of exact counts: nothing is padded or dropped, and the host waits for the counts."""

    overlap: bool = chz.field(
        default=True, doc="Let rows travel while the shared expert runs: on a CUDA stream of their own, on a CPU by a thread."
    )


@chz.chz(typecheck=True)
class FixedCapacityConfig(DispatcherConfig):
    """All-to-all of as many rows to every rank, whatever the routing: the host never waits, shapes are static, and a CUDA graph can hold it."""

    factor: float = chz.field(
        default=2.0,
        doc="Rows that a rank sends to another at most, over those that balanced routing would send. The number of ranks is always enough.",
    )
    overflow: str = chz.field(
        default="error",
        doc="What pairs beyond that are: error, raised at the end of the step, whose update is not applied; or drop, counted in the event `moe`.",
    )
    tokens: int | None = chz.field(
        default=None, doc="Tokens of one rank in a forward pass at most; none: from the recipe's micro-batch, or the first pass."
    )
    overlap: bool = chz.field(
        default=True, doc="Let rows travel while the shared expert runs: on a CUDA stream of their own, on a CPU by a thread."
    )

    @chz.validate
    def _numbers_fit(self) -> None:
        if not 0 < self.factor < math.inf:
            raise UsageError(
                f"fixed_capacity.factor = {self.factor}: it must be finite and greater than 0; 1 is what balanced routing fills."
            )
        if self.overflow not in OVERFLOWS:
            raise UsageError(f"fixed_capacity.overflow is {self.overflow!r}. {did_you_mean(self.overflow, OVERFLOWS)}")
        if self.tokens is not None:
            check_between("fixed_capacity.tokens", self.tokens, 1)


@chz.chz(typecheck=True)
class ExpertConfig(RoleConfig):
    """Stacks of experts cut over `ep`, and the dispatcher that brings them their tokens."""

    dispatcher: DispatcherConfig | None = chz.field(
        default=None, doc="Of these experts; none: parallel.dispatcher, and all_to_all where that is none too."
    )
    uneven: bool = chz.field(default=False, doc="Allow an ep that does not divide the experts: some ranks have one more than others.")
