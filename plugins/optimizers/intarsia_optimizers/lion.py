"""Lion (Chen et al., arXiv:2302.06675): the sign of an interpolation of momentum and gradient. One slot: half of Adam's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from intarsia.contracts import OptimizerGroup

from intarsia_optimizers.config import LionConfig
from intarsia_optimizers.elementwise import Elementwise, ElementwiseOptimizer, Rule
from intarsia_optimizers.settings import by_decay, check_state_dtype, group_settings
from intarsia_optimizers.updates import Scalar, Tensors, lion_lists

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.parameters import ParameterTable


@dataclasses.dataclass(frozen=True)
class LionRule(Rule):
    """See `intarsia_optimizers.updates.lion_lists`."""

    betas: tuple[float, float]
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def plain(self, values: Tensors, gradients: Tensors, states: Sequence[Tensors], steps: Tensors, lr: Scalar) -> None:
        """See `Rule.plain`."""
        lion_lists(values, gradients, states[0], lr, self.betas, self.weight_decay)


def build(config: LionConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator) -> ElementwiseOptimizer:
    """The entry's target. Slot of every parameter: momentum."""
    rates, parts = {}, []
    for group in groups:
        settings = group_settings(config, group, fixed=("state_dtype",))
        rates[group.name] = settings.lr
        for decayed, chosen in by_decay(group, table, settings.decay_vectors):
            parts.append((LionRule(settings.lr, settings.weight_decay * decayed, settings.betas), chosen))
    return ElementwiseOptimizer(rates, Elementwise(parts, table, check_state_dtype(config)))
