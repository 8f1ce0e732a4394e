"""Operators that eager code calls without the dispatcher, and what launching a kernel asks of the host.

A `triton_op` is there for whoever traces: compilers, fake tensors, modes that watch operators. Where nobody does, its way through the dispatcher costs the host several times what launching the kernel does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import triton_op
from torch.library import wrap_triton as _traceable

_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_PLAIN = (Tensor, nn.Parameter)


def is_watched(*arguments: Any) -> bool:
    """Whether something traces or watches operators, or a tensor is not a plain one."""
    if torch.compiler.is_compiling() or _modes is None or _modes():
        return True
    for each in arguments:  # noqa: SIM110 (every launch asks, and `any` takes twice as long)
        if type(each) not in _PLAIN and isinstance(each, Tensor):
            return True
    return False


# The name by which torch finds an operator's kernels in its source.
def wrap_triton(kernel: Any) -> Any:
    """The kernel for a launch: as torch's for whoever traces, and itself where nobody does, which takes no time."""
    return _traceable(kernel) if is_watched() else kernel


def cdiv(number: int, by: int) -> int:
    """How many parts of `by` it takes: as Triton's, which is many times slower outside of kernels."""
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The least from `number` on, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def direct_op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A `triton_op` of this name that mutates nothing. Autograd does not see into it either way: call it within an `autograd.Function`. It launches by this module's `wrap_triton`."""

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = triton_op(name, mutates_args={})(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return operator(*arguments) if is_watched(*arguments) else function(*arguments)

        return call

    return made
