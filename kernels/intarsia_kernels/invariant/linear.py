"""`linear` whose rows do not depend on how many rows there are. N rows (any leading dimensions), I input and O output features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from intarsia_kernels.invariant.products import product


def differentiable(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`linear` from `product(x, W)`, `x @ W^T` of two matrices. Kernels of a GPU are made by it too."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
            ctx.save_for_backward(x_NI, weight_OI)
            y_NO = product(x_NI.reshape(-1, x_NI.shape[-1]), weight_OI)
            y_NO = y_NO if bias_O is None else y_NO + bias_O
            return y_NO.reshape(*x_NI.shape[:-1], weight_OI.shape[0])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            x_NI, weight_OI = ctx.saved_tensors
            grad_NO = grads[0].reshape(-1, weight_OI.shape[0])
            # Log-probabilities need the forward pass alone to be invariant; these repeat exactly, which is all that training needs.
            grad_x = torch.mm(grad_NO, weight_OI).view(x_NI.shape) if ctx.needs_input_grad[0] else None
            grad_weight = torch.mm(grad_NO.t(), x_NI.reshape(-1, x_NI.shape[-1])) if ctx.needs_input_grad[1] else None
            grad_bias = (
                grad_NO.sum(0, dtype=torch.promote_types(grad_NO.dtype, torch.float32)).to(grad_NO.dtype)
                if ctx.needs_input_grad[2]
                else None
            )
            return grad_x, grad_weight, grad_bias

    return Linear.apply


_differentiable = differentiable(product)


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `intarsia.ops.linear`."""
    return _differentiable(x_NI, weight_OI, bias_O)
