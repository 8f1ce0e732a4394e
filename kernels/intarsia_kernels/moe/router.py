"""`router_linear` by bfloat16 tensor cores, as exact as float32. N tokens, D model width, E experts.

A float32 number is the sum of three bfloat16 ones, and x is bfloat16 already: x W^T = x W1^T + x W2^T + x W3^T, products exact and sums in float32. One product of 3 E columns reads x once,
where a float32 product would first write x twice as wide.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.direct import cdiv, direct_op, is_watched, wrap_triton

HALF = torch.bfloat16
HAS_WIDE_PRODUCT = "dtype" in torch.ops.aten.mm.overloads()
"""Whether this torch multiplies bfloat16 matrices into float32."""
BLOCK = 1024


@triton.jit
def _parts(x):
    """Three bfloat16 numbers that add up to a float32 one, the largest first: 8 more bits each."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split_weight(x_pointer, y_pointer, numel, IS_BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """[3 E, D] of a matrix [E, D]: first, second, third part; for backward first, first, second."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    first, second, third = _parts(tl.load(x_pointer + offsets, mask=mask, other=0.0))
    tl.store(y_pointer + offsets, first, mask=mask)
    tl.store(y_pointer + numel + offsets, first if IS_BACKWARD else second, mask=mask)
    tl.store(y_pointer + 2 * numel + offsets, second if IS_BACKWARD else third, mask=mask)


@triton.jit
def _split_gradient(x_pointer, twice_pointer, all_pointer, numel, columns, BLOCK: tl.constexpr):
    """[N, 3 E] of a matrix [N, E], twice: first, second, first part, and first, second, third."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    first, second, third = _parts(tl.load(x_pointer + offsets, mask=mask, other=0.0))
    at = offsets // columns * (3 * columns) + offsets % columns
    tl.store(twice_pointer + at, first, mask=mask)
    tl.store(twice_pointer + at + columns, second, mask=mask)
    tl.store(twice_pointer + at + 2 * columns, first, mask=mask)
    tl.store(all_pointer + at, first, mask=mask)
    tl.store(all_pointer + at + columns, second, mask=mask)
    tl.store(all_pointer + at + 2 * columns, third, mask=mask)


@direct_op("intarsia::split_router_weight")
def split_weight(weight_ED: Tensor, is_backward: bool) -> Tensor:
    """bfloat16 [3 E, D] of a contiguous float32 matrix: its parts one below the other, or what the input's gradient is made by."""
    parts = weight_ED.new_empty(3 * weight_ED.shape[0], weight_ED.shape[1], dtype=HALF)
    numel = weight_ED.numel()
    wrap_triton(_split_weight)[(cdiv(numel, BLOCK),)](weight_ED, parts, numel, IS_BACKWARD=is_backward, BLOCK=BLOCK)
    return parts


@direct_op("intarsia::split_router_gradient")
def split_gradient(grad_NE: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 [N, 3 E], twice, of a contiguous float32 matrix: its parts side by side, in the order that the input's gradient and that the weight's asks for."""
    (rows, columns), numel = grad_NE.shape, grad_NE.numel()
    twice, every = (grad_NE.new_empty(rows, 3 * columns, dtype=HALF) for _ in range(2))
    wrap_triton(_split_gradient)[(cdiv(numel, BLOCK),)](grad_NE, twice, every, numel, columns, BLOCK=BLOCK)
    return twice, every


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32 of bfloat16 matrices."""
    if a.is_cuda and HAS_WIDE_PRODUCT:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


# Opaque to who traces: not every compiler that traces `mm` knows of its other result dtype.
_opaque = torch.library.custom_op("intarsia::wide_product", mutates_args=())(_multiply)


@_opaque.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _opaque(a, b) if is_watched(a, b) else _multiply(a, b)


class _RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        logits_N3E = _product(x_ND, split_weight(weight_ED.float().contiguous(), False).t())
        return logits_N3E.view(x_ND.shape[0], 3, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_ED = ctx.saved_tensors
        twice, every = split_gradient(grads[0].contiguous())
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # Two parts each are 16 bits, twice what the result holds: all their products but the smallest.
            grad_x = torch.mm(twice, split_weight(weight_ED.float().contiguous(), True))
        if ctx.needs_input_grad[1]:
            grad_weight = _product(every.t(), x_ND).view(3, *weight_ED.shape).sum(0).to(weight_ED.dtype)
        return grad_x, grad_weight


def router_linear(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """As the operator `router_linear`."""
    return _RouterLinear.apply(x_ND, weight_ED)


def supports(x_ND: Tensor, weight_ED: Tensor) -> str | None:
    """Why a call cannot be taken."""
    if x_ND.dtype != HALF:
        return f"values in {x_ND.dtype}"
    return "no rows" if not x_ND.numel() else None


router_linear.supports = supports  # type: ignore[attr-defined]
