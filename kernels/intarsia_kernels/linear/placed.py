"""A linear layer whose weight's gradient is written where a sharder wants it. Bit for bit torch's own. N rows (any leading dimensions), I input and O output features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from intarsia.ops import gradients
from torch import Tensor

from intarsia_kernels.linear.weights import weight_gradient


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_NI, weight_OI, bias_O)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        grad_NO, needs = grads[0], ctx.needs_input_grad
        rows_NO = grad_NO.flatten(0, -2)
        grad_x = (rows_NO @ weight_OI).view_as(x_NI) if needs[0] else None
        grad_weight = weight_gradient(rows_NO, x_NI.flatten(0, -2), weight_OI) if needs[1] else None
        return grad_x, grad_weight, rows_NO.sum(0) if needs[2] else None


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`, as `intarsia.ops.linear`."""
    wanted = gradients.is_marked(weight_OI) and weight_OI.requires_grad and torch.is_grad_enabled()
    # Under autocast torch multiplies in another dtype than what is saved here has.
    if wanted and x_NI.dim() > 1 and x_NI.dtype == weight_OI.dtype and not torch.is_autocast_enabled(x_NI.device.type):
        y_NO: Tensor = _Placed.apply(x_NI, weight_OI, bias_O)
        return y_NO
    return F.linear(x_NI, weight_OI, bias_O)
