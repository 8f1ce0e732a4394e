"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) on whatever part of each parameter this rank holds: the update is elementwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from intarsia.contracts import OptimizerGroup
from intarsia.errors import UsageError
from torch import Tensor, nn

from intarsia_optimizers.config import AdamWConfig
from intarsia_optimizers.settings import adamw_slots, apply_adamw, check_choice, check_range, group_settings, has_fused

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.parameters import ParameterTable

BOUNDS = {"lr": (0.0, math.inf), "weight_decay": (0.0, math.inf), "eps": (0.0, math.inf), "betas": (0.0, 1.0)}


def choose_fused(implementation: str, parameters: Sequence[Tensor]) -> bool:
    """Whether the fused kernel is used. Raises UsageError where it was asked for and there is none."""
    check_choice("implementation", implementation, ("auto", "fused", "foreach"))
    if implementation == "foreach":
        return False
    fused = has_fused(parameters)
    if implementation == "fused" and not fused:
        kinds = sorted({f"{parameter.dtype} on {parameter.device}" for parameter in parameters})
        raise UsageError(f"torch has no fused AdamW for {', '.join(kinds)}. Set optimizer.implementation=auto.")
    return fused


class AdamW:
    """The `adamw` entry: an `intarsia.contracts.Optimizer`. Slots of every parameter: exp_avg, exp_avg_sq, step."""

    def __init__(self, config: AdamWConfig, groups: Sequence[OptimizerGroup], table: ParameterTable):
        self._groups: list[tuple[str, AdamWConfig, dict[bool, list[str]]]] = []
        self._parameters: dict[str, nn.Parameter] = {}
        for group in groups:
            settings = group_settings(config, group)
            check_range(settings, BOUNDS)
            decayed: dict[bool, list[str]] = {True: [], False: []}
            for name, parameter in group.parameters.items():
                self._parameters[name] = parameter
                # The table's shape, not the parameter's: the local part of a matrix may be flat.
                decayed[settings.decay_vectors or len(table[name].shape) >= 2].append(name)
            self._groups.append((group.name, settings, decayed))
        self._fused = choose_fused(config.implementation, list(self._parameters.values()))
        self._slots = {name: adamw_slots(parameter, self._fused) for name, parameter in self._parameters.items()}

    def step(self, factor: float) -> None:
        """One update; see `intarsia.contracts.Optimizer`."""
        for _, settings, decayed in self._groups:
            for decay, names in decayed.items():
                apply_adamw(
                    [(self._parameters[name], self._slots[name]) for name in names],
                    lr=settings.lr * factor,
                    betas=settings.betas,
                    eps=settings.eps,
                    weight_decay=settings.weight_decay if decay else 0.0,
                    fused=self._fused,
                )

    def learning_rates(self) -> Mapping[str, float]:
        """Base learning rate of each group."""
        return {name: settings.lr for name, settings, _ in self._groups}

    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        """State by parameter name and slot name."""
        return self._slots


def build(config: AdamWConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator) -> AdamW:
    """The entry's target."""
    return AdamW(config, groups, table)
