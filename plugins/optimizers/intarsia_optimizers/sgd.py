"""Stochastic gradient descent, with momentum (Polyak's or Nesterov's) or without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from intarsia.contracts import OptimizerGroup
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_optimizers.config import SGDConfig
from intarsia_optimizers.elementwise import Elementwise, ElementwiseOptimizer, Rule
from intarsia_optimizers.fused import check_fused
from intarsia_optimizers.settings import by_decay, check_choice, check_state_dtype, group_settings
from intarsia_optimizers.updates import Scalar, Tensors, decay, sgd_lists

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.parameters import ParameterTable


@dataclasses.dataclass(frozen=True)
class SGDRule(Rule):
    """See `intarsia_optimizers.updates.sgd_lists`."""

    momentum: float
    nesterov: bool
    l2: float
    fused: bool

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        """No momentum, no state."""
        return ("momentum",) if self.momentum else ()

    def plain(self, values: Tensors, gradients: Tensors, states: Sequence[Tensors], steps: Tensors, lr: Scalar) -> None:
        """See `Rule.plain`."""
        momenta = states[0] if states else None
        if self.fused:
            decay(values, lr, self.weight_decay)
            # Momentum begins as zeros, which no step has to be the first for.
            options = {"weight_decay": self.l2, "momentum": self.momentum, "dampening": 0.0, "nesterov": self.nesterov}
            torch._fused_sgd_(values, gradients, momenta or [], lr=lr, maximize=False, is_first_step=False, **options)  # type: ignore[call-overload]
        else:
            sgd_lists(values, gradients, momenta, lr, self.momentum, self.nesterov, self.weight_decay, self.l2)


def _fused(values: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> None:
    """torch's fused kernel, on a step that changes nothing."""
    options: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
    torch._fused_sgd_(values, gradients, momenta, maximize=False, is_first_step=False, **options)  # type: ignore[call-overload]


def choose_fused(wanted: str, parameters: Sequence[Tensor]) -> bool:
    """For `optimizer.implementation`: whether updates are torch's fused kernel. Raises UsageError where it was asked for and there is none."""
    check_choice("implementation", wanted, ("auto", "fused", "foreach"))
    if wanted == "foreach" or any(parameter.is_meta for parameter in parameters):  # A plan carries nothing out.
        return False
    return check_fused("SGD", _fused, 3, wanted, parameters)


def build(config: SGDConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator) -> ElementwiseOptimizer:
    """The entry's target. Slot of every parameter: momentum, where there is some."""
    rates, parts = {}, []
    fused = choose_fused(config.implementation, [each for group in groups for each in group.parameters.values() if each.numel()])
    for group in groups:
        settings = group_settings(config, group, fixed=("state_dtype", "implementation"))
        rates[group.name] = settings.lr
        if settings.nesterov and not settings.momentum:
            raise UsageError(f"optimizer.nesterov needs momentum, and group {group.name!r} has none: set optimizer.momentum (0.9, say).")
        for decayed, chosen in by_decay(group, table, settings.decay_vectors):
            rule = SGDRule(settings.lr, settings.weight_decay * decayed, settings.momentum, settings.nesterov, settings.l2 * decayed, fused)
            parts.append((rule, chosen))
    return ElementwiseOptimizer(rates, Elementwise(parts, table, check_state_dtype(config)))
