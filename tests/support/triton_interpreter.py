"""Triton's interpreter, put right where the numbers of tests depend on it: call `repair()` before any kernel runs.

Bounds of loops that are tensors are numbers again (NumPy no longer makes a number of an array with one element), and bfloat16 is rounded and multiplied as bfloat16, not as its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def _float32(data: Any) -> Any:
    """bfloat16 as its bits to float32."""
    return torch.from_numpy(np.ascontiguousarray(data).view(np.int16)).view(torch.bfloat16).float().numpy()


def _bfloat16(data: Any) -> Any:
    """float32 to bfloat16 as its bits, to the nearest."""
    return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def repair() -> None:
    """In this process."""
    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        wide = [interpreter.TensorHandle(_float32(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, d, *rest)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_bfloat16(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, lambda self, src, dst_type: self.cast_impl(src, dst_type))
