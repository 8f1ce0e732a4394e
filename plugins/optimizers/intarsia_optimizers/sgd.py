"""Stochastic gradient descent, with momentum (Polyak's or Nesterov's) or without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from intarsia.contracts import OptimizerGroup
from intarsia.errors import UsageError

from intarsia_optimizers.config import SGDConfig
from intarsia_optimizers.elementwise import Elementwise, ElementwiseOptimizer, Rule
from intarsia_optimizers.settings import by_decay, check_state_dtype, group_settings
from intarsia_optimizers.updates import Scalar, Tensors, sgd_lists

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.parameters import ParameterTable


@dataclasses.dataclass(frozen=True)
class SGDRule(Rule):
    """See `intarsia_optimizers.updates.sgd_lists`."""

    momentum: float
    nesterov: bool
    l2: float

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        """No momentum, no state."""
        return ("momentum",) if self.momentum else ()

    def plain(self, values: Tensors, gradients: Tensors, states: Sequence[Tensors], steps: Tensors, lr: Scalar) -> None:
        """See `Rule.plain`."""
        momenta = states[0] if states else None
        sgd_lists(values, gradients, momenta, lr, self.momentum, self.nesterov, self.weight_decay, self.l2)


def build(config: SGDConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator) -> ElementwiseOptimizer:
    """The entry's target. Slot of every parameter: momentum, where there is some."""
    rates, parts = {}, []
    for group in groups:
        settings = group_settings(config, group, fixed=("state_dtype",))
        rates[group.name] = settings.lr
        if settings.nesterov and not settings.momentum:
            raise UsageError(f"optimizer.nesterov needs momentum, and group {group.name!r} has none: set optimizer.momentum (0.9, say).")
        for decayed, chosen in by_decay(group, table, settings.decay_vectors):
            rule = SGDRule(settings.lr, settings.weight_decay * decayed, settings.momentum, settings.nesterov, settings.l2 * decayed)
            parts.append((rule, chosen))
    return ElementwiseOptimizer(rates, Elementwise(parts, table, check_state_dtype(config)))
