"""Whether torch has a fused kernel for a rule: asked of torch, as it depends on its build, the device and the dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from intarsia.errors import UsageError
from torch import Tensor


def has_fused(run: Callable[..., Any], lists: int, parameters: Sequence[Tensor]) -> bool:
    """Whether `run` takes `lists` lists of one element on each device and in each dtype of these tensors."""
    for device, dtype in {(parameter.device, parameter.dtype) for parameter in parameters}:
        try:
            run(*([torch.zeros(1, device=device, dtype=dtype)] for _ in range(lists)))
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
    return True


def check_fused(rule: str, run: Callable[..., Any], lists: int, wanted: str, parameters: Sequence[Tensor]) -> bool:
    """See `has_fused`. Raises UsageError where the fused kernel was asked for (`wanted`: `optimizer.implementation`) and there is none."""
    fused = has_fused(run, lists, parameters)
    if wanted == "fused" and not fused:
        kinds = sorted({f"{parameter.dtype} on {parameter.device}" for parameter in parameters})
        raise UsageError(f"torch has no fused {rule} for {', '.join(kinds)}. Set optimizer.implementation=auto.")
    return fused
