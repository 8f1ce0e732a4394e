"""What the optimizers share: a group's own settings, and the AdamW update on tensors kept by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import chz
import torch
from intarsia.config import OptimizerConfig
from intarsia.contracts import OptimizerGroup
from intarsia.errors import UsageError, did_you_mean
from torch import Tensor
from torch.optim.adamw import adamw

OptimizerSettings = TypeVar("OptimizerSettings", bound=OptimizerConfig)


def group_settings(config: OptimizerSettings, group: OptimizerGroup) -> OptimizerSettings:
    """`config` with the group's options in place of its own fields. Raises UsageError naming the group and the field."""
    known = chz.chz_fields(config)
    for name in group.options:
        if name not in known:
            raise UsageError(
                f"Parameter group {group.name!r} sets {name!r}, which is no field of {type(config).__name__}. {did_you_mean(name, known)}"
            )
    try:
        return chz.replace(config, **dict(group.options))
    except TypeError as error:
        raise UsageError(f"Parameter group {group.name!r}: {error}") from error


def check_range(config: OptimizerConfig, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Every named field lies in its half-open interval [low, high); tuples are checked element by element. Raises UsageError."""
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not low <= number < high:
                raise UsageError(f"optimizer.{name} is {number}; it must be at least {low:g} and below {high:g}.")


def check_choice(field: str, value: str, known: Sequence[str]) -> None:
    """`optimizer.FIELD` is one of the known values. Raises UsageError with the nearest."""
    if value not in known:
        raise UsageError(f"optimizer.{field} {value!r} is unknown. {did_you_mean(value, known)}")


def has_fused(parameters: Sequence[Tensor]) -> bool:
    """Whether torch has a fused AdamW kernel for these tensors' devices and dtypes; found by running it on one element of each."""
    for device, dtype in {(parameter.device, parameter.dtype) for parameter in parameters}:
        probe = [torch.zeros(1, device=device, dtype=dtype) for _ in range(4)]
        steps = [torch.zeros((), device=device)]
        try:
            update_adamw(
                [probe[0]], [probe[1]], [probe[2]], [probe[3]], steps, lr=0.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.0, fused=True
            )
        except (RuntimeError, NotImplementedError):
            return False
    return True


def adamw_slots(parameter: Tensor, fused: bool) -> dict[str, Tensor]:
    """Fresh state of one parameter: two means of its shape, and the count of its updates (where the kernel reads it)."""
    return {
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
    }


@torch.no_grad()
def update_adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool,
) -> None:
    """One AdamW update in place. torch's functional form: its Optimizer class would import torch._dynamo, which takes seconds."""
    options: dict[str, Any] = {"fused": True, "foreach": False} if fused else {"fused": False, "foreach": True}
    adamw(
        parameters,
        gradients,
        means,
        squares,
        [],
        steps,
        amsgrad=False,
        maximize=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        **options,
    )


def apply_adamw(
    named: Sequence[tuple[Tensor, dict[str, Tensor]]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool,
) -> None:
    """Update those of the (parameter, slots) pairs that have a gradient."""
    active = [(parameter, slots) for parameter, slots in named if parameter.grad is not None]
    if not active:
        return
    update_adamw(
        [parameter for parameter, _ in active],
        [parameter.grad for parameter, _ in active if parameter.grad is not None],
        [slots["exp_avg"] for _, slots in active],
        [slots["exp_avg_sq"] for _, slots in active],
        [slots["step"] for _, slots in active],
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        fused=fused,
    )
