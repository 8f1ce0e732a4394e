"""What the runtime's hooks need to know of modules' calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_backward() -> bool:
    """Whether autograd is running on this thread: a forward call then is a recomputation by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, left out where torch.compile traces around it. The usual decorator would cost every call more than the hook does."""
    disabled = torch.compiler.disable(hook)

    def run(*arguments: Any) -> None:
        (disabled if torch.compiler.is_compiling() else hook)(*arguments)

    return run


def differentiable(*values: Any) -> list[Tensor]:
    """The tensors that require gradients in nested tuples, lists, dicts and dataclasses, each once."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad and not any(value is other for other in found):
            found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), found)
