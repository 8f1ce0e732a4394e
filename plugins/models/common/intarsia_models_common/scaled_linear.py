"""The operator `scaled_linear`: a linear layer that reads its weight as float8 with one scale for each tile (`intarsia_float8.format`).

Shape suffixes: N tokens of any arrangement, I input and O output features, i and o their tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from intarsia import ops
from intarsia_float8.format import dequantise
from torch import Tensor


class _ScaledLinear(torch.autograd.Function):
    """Keeps the payload for the backward pass and not what it stands for."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, payload_OI: Tensor, scales_oi: Tensor, bias_O: Tensor | None, tile: Any
    ) -> Tensor:
        ctx.save_for_backward(x_NI, payload_OI, scales_oi)
        ctx.tile = tile
        # By what is in force for `linear`, so that a run whose products are invariant has this one too.
        return ops.linear(x_NI, dequantise(payload_OI, scales_oi, tile, x_NI.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, payload_OI, scales_oi = ctx.saved_tensors
        grad_NO, needs = grads[0], ctx.needs_input_grad
        rows_NO = grad_NO.reshape(-1, grad_NO.shape[-1])
        grad_x = grad_NO @ dequantise(payload_OI, scales_oi, ctx.tile, x_NI.dtype) if needs[0] else None
        grad_weight = rows_NO.t() @ x_NI.reshape(-1, x_NI.shape[-1]) if needs[1] else None
        return grad_x, grad_weight, None, None, rows_NO.sum(0) if needs[4] else None, None


def reference(
    x_NI: Tensor, weight_OI: Tensor, payload_OI: Tensor, scales_oi: Tensor, bias_O: Tensor | None = None, tile: tuple[int, int] = (128, 128)
) -> Tensor:
    """`linear` of x, W and bias for the weight W that `payload_OI` (float8_e4m3fn) and `scales_oi` (float32) stand for, rounded to x's dtype.

    `weight_OI` is never read: it has W's shape and x's dtype, and the gradient by W goes to it. Gradients are those of `linear` at W.
    """
    return _ScaledLinear.apply(x_NI, weight_OI, payload_OI, scales_oi, bias_O, tile)


# As invariant as what is in force for `linear`, which invariant mode sees to: the reference runs that.
scaled_linear = ops.Operator("scaled_linear", reference, "other", invariant=True)
