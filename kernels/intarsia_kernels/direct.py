"""Operators that eager code calls without the dispatcher.

A `triton_op` is there for whoever traces: compilers, fake tensors, modes that watch operators. Where nobody does, its way through the dispatcher costs the host several times what launching the kernel does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import triton_op

try:  # What torch itself runs a `triton_op` under where nothing traces.
    from torch._library.triton import set_wrap_triton_enabled as _wrapping
except ImportError:  # The dispatcher it is, then.
    _wrapping = None  # type: ignore[assignment]
_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)


def is_watched(*arguments: Any) -> bool:
    """Whether something traces or watches operators, or a tensor is not a plain one."""
    if torch.compiler.is_compiling() or _wrapping is None or _modes is None or _modes():
        return True
    return any(isinstance(each, Tensor) and type(each) not in (Tensor, nn.Parameter) for each in arguments)


def direct_op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A `triton_op` of this name that mutates nothing. Autograd does not see into it either way: call it within an `autograd.Function`."""

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = triton_op(name, mutates_args={})(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if is_watched(*arguments):
                return operator(*arguments)
            with _wrapping(False):
                return function(*arguments)

        return call

    return made
