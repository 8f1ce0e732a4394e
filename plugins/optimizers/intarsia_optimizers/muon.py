"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024) for matrices, AdamW for the rest.

    momentum   M <- mu M + (1 - mu) G
    direction  D = (1 - mu) G + mu M (Nesterov), else M
    update     W <- (1 - lr wd) W - lr s(W) NS(D)

NS is the quintic Newton-Schulz iteration towards the nearest orthogonal matrix and needs the whole matrix: applied to the shards of
one it gives another result, which is why a cut matrix is refused here.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from intarsia.contracts import Box, OptimizerGroup
from intarsia.errors import UsageError
from torch import Tensor, nn

from intarsia_optimizers.config import MuonConfig
from intarsia_optimizers.settings import adamw_slots, apply_adamw, check_choice, check_range, group_settings, has_fused

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.parameters import ParameterTable

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the published quintic: slope at zero as large as possible, singular values end between about 0.5 and 1.5."""

BOUNDS = {
    "lr": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
    "momentum": (0.0, 1.0),
    "newton_schulz_steps": (1, 100),
    "adamw_lr": (0.0, math.inf),
    "adamw_weight_decay": (0.0, math.inf),
    "adamw_betas": (0.0, 1.0),
    "adamw_eps": (0.0, math.inf),
}


def newton_schulz(matrix_MN: Tensor, steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    """An approximately orthogonal [M, N] matrix with the singular vectors of `matrix_MN`, computed and returned in `dtype`."""
    a, b, c = COEFFICIENTS
    wide = matrix_MN.to(dtype)
    tall = wide.size(0) > wide.size(1)
    if tall:  # The Gram matrix is made on the shorter side.
        wide = wide.T
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide.T if tall else wide


def shape_factor(adjust: str, shape: Sequence[int]) -> float:
    """What the learning rate of a matrix of `shape` is multiplied by."""
    rows, columns = shape
    if adjust == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def is_matrix(name: str, shape: Sequence[int], not_matrices: Sequence[str]) -> bool:
    """Whether Muon updates the parameter: two dimensions, and no part of its dotted name matches one of the globs."""
    parts = name.split(".")
    return len(shape) == 2 and not any(fnmatch.fnmatchcase(part, glob) for glob in not_matrices for part in [*parts, name])


def check_whole(name: str, parameter: Tensor, table: ParameterTable, comm: Communicator) -> None:
    """The parameter is whole on this rank, or not here at all. Raises UsageError naming it."""
    shape, layout = tuple(table[name].shape), table[name].layout
    held = (Box.whole(shape),) if layout is None else tuple(layout.local(table.rank_in(layout)))
    if parameter.numel() and held != (Box.whole(shape),):
        raise UsageError(
            f"Muon cannot update {name!r} (shape {list(shape)}): rank {comm.rank} holds a part of it, {parameter.numel()} of {math.prod(shape)} elements, "
            "and the Newton-Schulz iteration needs the whole matrix. Distributed Muon needs a placement that keeps every matrix whole on one rank "
            "(`owned`). Until then use one process, mesh.dp_replicate instead of mesh.dp_shard, or optimizer=adamw."
        )


class Muon:
    """The `muon` entry: an `intarsia.contracts.Optimizer`. Slots: momentum of matrices; exp_avg, exp_avg_sq, step of the rest."""

    def __init__(self, config: MuonConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator):
        self._groups: list[tuple[str, MuonConfig, list[str], list[str]]] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for group in groups:
            settings = group_settings(config, group)
            check_range(settings, BOUNDS)
            check_choice("adjust", settings.adjust, ("original", "match_rms_adamw"))
            check_choice("newton_schulz_dtype", settings.newton_schulz_dtype, ("bfloat16", "float32", "float64"))
            matrices: list[str] = []
            rest: list[str] = []
            for name, parameter in group.parameters.items():
                self._parameters[name], self._shapes[name] = parameter, tuple(table[name].shape)
                if is_matrix(name, self._shapes[name], settings.not_matrices):
                    check_whole(name, parameter, table, comm)
                    matrices.append(name)
                else:
                    rest.append(name)
            self._groups.append((group.name, settings, matrices, rest))
        others = [self._parameters[name] for _, _, _, rest in self._groups for name in rest]
        self._fused = has_fused(others)
        self._slots: dict[str, dict[str, Tensor]] = {}
        for _, _, matrices, rest in self._groups:
            self._slots |= {name: {"momentum": torch.zeros_like(self._parameters[name], requires_grad=False)} for name in matrices}
            self._slots |= {name: adamw_slots(self._parameters[name], self._fused) for name in rest}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update; see `intarsia.contracts.Optimizer`."""
        for _, settings, matrices, rest in self._groups:
            for name in matrices:
                self._update_matrix(name, settings, settings.lr * factor)
            apply_adamw(
                [(self._parameters[name], self._slots[name]) for name in rest],
                lr=settings.adamw_lr * factor,
                betas=settings.adamw_betas,
                eps=settings.adamw_eps,
                weight_decay=settings.adamw_weight_decay,
                fused=self._fused,
            )

    def _update_matrix(self, name: str, settings: MuonConfig, lr: float) -> None:
        parameter, momentum, shape = self._parameters[name], self._slots[name]["momentum"], self._shapes[name]
        gradient = parameter.grad
        if gradient is None or not parameter.numel():
            return
        momentum.lerp_(gradient, 1 - settings.momentum)
        direction = gradient.lerp(momentum, settings.momentum) if settings.nesterov else momentum
        dtype = getattr(torch, settings.newton_schulz_dtype)
        update = newton_schulz(direction.view(shape), settings.newton_schulz_steps, settings.eps, dtype)
        parameter.mul_(1 - lr * settings.weight_decay)
        parameter.view(shape).add_(update.to(parameter.dtype), alpha=-lr * shape_factor(settings.adjust, shape))

    def learning_rates(self) -> Mapping[str, float]:
        """Base learning rate of each group: of its matrices under the group's name, of the rest under `NAME.adamw`."""
        rates: dict[str, float] = {}
        for name, settings, _, rest in self._groups:
            rates[name] = settings.lr
            if rest:
                rates[f"{name}.adamw"] = settings.adamw_lr
        return rates

    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        """State by parameter name and slot name."""
        return self._slots


def build(config: MuonConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator) -> Muon:
    """The entry's target."""
    return Muon(config, groups, table, comm)
