"""A linear layer by oneDNN. N rows (any leading dimensions), I input and O output features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intarsia_kernels.linear.weights import weight_gradient


def _product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x @ weight^T by oneDNN; strides of the weight are free."""
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, None, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        y_NO = _product(x_NI, weight_OI)
        return y_NO if bias_O is None else y_NO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        grad_NO = grads[0].contiguous()
        grad_x = _product(grad_NO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        rows_NO = grad_NO.flatten(0, -2)
        # The weight's gradient is a product over rows, for which torch's own routine is as quick.
        grad_weight = weight_gradient(rows_NO, x_NI.flatten(0, -2), weight_OI) if ctx.needs_input_grad[1] else None
        grad_bias = rows_NO.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`, float32 on the CPU."""
    return _Linear.apply(x_NI, weight_OI, bias_O)


def supports(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> str | None:
    """oneDNN takes dense float32 on the CPU, with at least one row."""
    if x_NI.device.type != "cpu" or x_NI.dtype != torch.float32 or weight_OI.dtype != torch.float32:
        return f"a {x_NI.dtype} tensor on {x_NI.device.type}"
    if x_NI.dim() < 2 or x_NI.numel() == 0 or weight_OI.numel() == 0:
        return "a vector or an empty tensor"
    return None


linear.supports = supports  # type: ignore[attr-defined]
