"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) and Adam (Kingma and Ba, arXiv:1412.6980).

Adam is AdamW with other defaults and, where `l2` is set, the penalty's gradient added to the loss's instead of decoupled weight decay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from intarsia.contracts import OptimizerGroup
from intarsia.errors import UsageError
from torch import Tensor, nn

from intarsia_optimizers.config import AdamConfig, AdamWConfig
from intarsia_optimizers.elementwise import Elementwise, ElementwiseOptimizer, Rule
from intarsia_optimizers.fused import check_fused
from intarsia_optimizers.kernels import choose_kernel, takes_sums
from intarsia_optimizers.settings import by_decay, check_state_dtype, group_settings
from intarsia_optimizers.updates import Box, Gradient, Scalar, Tensors, adam_lists, adamw_update, summed
from intarsia_optimizers.wires import Wire, nothing_quantised

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.parameters import ParameterTable

WHOLE = ("implementation", "state_dtype")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """What carries out updates: torch's fused kernel (`fused`) or torch's list functions where dtypes are equal, `kernel` for the rest and, where it was asked for by
    name (`everywhere`), for all; `quantising` what a sharder sends as float8, where it can."""

    fused: bool
    kernel: Callable[..., None]
    everywhere: bool = False
    quantising: Callable[..., bool] = nothing_quantised


@dataclasses.dataclass(frozen=True)
class AdamRule(Rule):
    """See `intarsia_optimizers.updates.adamw_update`."""

    betas: tuple[float, float]
    eps: float
    l2: float
    implementation: Implementation
    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counted: ClassVar[bool] = True

    @property
    def takes_sums(self) -> bool:
        """See `Rule.takes_sums`."""
        return not self.l2 and takes_sums(self.implementation.kernel)

    def plain(self, values: Tensors, gradients: Tensors, states: Sequence[Tensors], steps: Tensors, lr: Scalar) -> None:
        """See `Rule.plain`."""
        means, squares = states
        if self.implementation.fused:
            # Decoupled and not: torch has a kernel for each, and each calls its own weight_decay.
            options = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps, "weight_decay": self.l2 or self.weight_decay}
            if self.l2:
                torch._fused_adam_(values, gradients, means, squares, [], steps, lr=lr, amsgrad=False, maximize=False, **options)  # type: ignore[call-overload]
            else:
                torch._fused_adamw_(values, gradients, means, squares, [], steps, lr=lr, amsgrad=False, maximize=False, **options)  # type: ignore[call-overload]
        elif self.implementation.everywhere:
            for value, gradient, mean, square, step in zip(values, gradients, means, squares, steps, strict=True):
                self.implementation.kernel(value, None, mean, square, gradient, step, lr, self.betas, self.eps, self.weight_decay)
        else:
            adam_lists(values, gradients, means, squares, steps, lr, self.betas, self.eps, self.weight_decay, self.l2)

    def special(
        self, value: Tensor, low: Tensor | None, states: Sequence[Tensor], gradient: Gradient, step: Tensor | None, lr: Scalar
    ) -> None:
        """See `Rule.special`."""
        if self.l2 or self.implementation.kernel is adamw_update:
            super().special(value, low, states, summed(gradient), step, lr)
        else:
            self.implementation.kernel(value, low, *states, gradient, step, lr, self.betas, self.eps, self.weight_decay)

    def quantising(
        self,
        value: Tensor,
        low: Tensor | None,
        states: Sequence[Tensor],
        gradient: Gradient,
        step: Tensor | None,
        lr: Scalar,
        boxes: tuple[Box, ...],
        wire: Wire,
    ) -> bool:
        """See `Rule.quantising`."""
        kernel = self.implementation.quantising
        if self.l2 or kernel is nothing_quantised:
            return False
        how = (wire.wire, boxes, wire.tile, wire.power_of_two, wire.dtype)
        given = gradient if takes_sums(kernel) else summed(gradient)
        return bool(kernel(value, low, *states, given, step, lr, self.betas, self.eps, self.weight_decay, *how))


def _fused(values: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor]) -> None:
    """torch's fused kernel, on a step that changes nothing."""
    options: dict[str, Any] = {"lr": 0.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1.0}
    steps = [torch.ones((), device=values[0].device)]
    torch._fused_adamw_(values, gradients, averages, squares, [], steps, amsgrad=False, maximize=False, **options)  # type: ignore[call-overload]


def choose_implementation(wanted: str, parameters: Sequence[Tensor]) -> Implementation:
    """For `optimizer.implementation`: `auto`, `fused` or `foreach` (torch's), or a kernel's name. Raises UsageError where it was asked for and there is none."""
    held = [parameter for parameter in parameters if parameter.numel()] or [torch.zeros(1)]
    if wanted in ("foreach", "reference"):
        return Implementation(False, adamw_update)
    quantising = choose_kernel("adamw_quantised", "implementation", "auto", nothing_quantised, held[0].device, held[0].dtype)
    if wanted in ("auto", "fused"):
        fused = check_fused("AdamW", _fused, 4, wanted, held)
        kernel = choose_kernel("adamw_update", "implementation", "auto", adamw_update, held[0].device, held[0].dtype)
        return Implementation(fused, kernel, quantising=nothing_quantised if wanted == "fused" else quantising)
    words = ("auto", "fused", "foreach")
    return Implementation(
        False, choose_kernel("adamw_update", "implementation", wanted, adamw_update, held[0].device, held[0].dtype, words), True, quantising
    )


def adam_parts(
    config: AdamWConfig | AdamConfig, groups: Sequence[OptimizerGroup], table: ParameterTable
) -> tuple[dict[str, float], list[tuple[Rule, Mapping[str, nn.Parameter]]]]:
    """Base learning rates by group, and the rules with their parameters."""
    everything = [parameter for group in groups for parameter in group.parameters.values()]
    implementation = choose_implementation(config.implementation, everything)
    rates: dict[str, float] = {}
    parts: list[tuple[Rule, Mapping[str, nn.Parameter]]] = []
    for group in groups:
        settings = group_settings(config, group, fixed=WHOLE)
        rates[group.name] = settings.lr
        l2 = settings.l2 if isinstance(settings, AdamConfig) else 0.0
        if l2 and settings.weight_decay:
            raise UsageError(
                f"optimizer.l2 is {l2} and optimizer.weight_decay is {settings.weight_decay} for group {group.name!r}: decay either by the penalty's gradient "
                "(l2) or decoupled (weight_decay), not both. Set one of them to 0."
            )
        for decayed, chosen in by_decay(group, table, settings.decay_vectors):
            rule = AdamRule(settings.lr, settings.weight_decay * decayed, settings.betas, settings.eps, l2 * decayed, implementation)
            parts.append((rule, chosen))
    return rates, parts


def build(
    config: AdamWConfig | AdamConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator
) -> ElementwiseOptimizer:
    """The target of the entries `adamw` and `adam`. Slots of every parameter: exp_avg, exp_avg_sq, step."""
    rates, parts = adam_parts(config, groups, table)
    return ElementwiseOptimizer(rates, Elementwise(parts, table, check_state_dtype(config)))
