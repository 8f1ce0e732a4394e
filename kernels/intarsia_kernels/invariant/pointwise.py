"""Functions of single elements that are the same wherever an element lies. N rows, F features.

torch computes the float32 sigmoid of a vector's worth of elements by another approximation than that of what is left at an array's end, so that an element's bits depend on how many
there are. The exponential has one approximation for both; sums, products and quotients are exact roundings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _logistic(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), in x's dtype: 0 where the exponential overflows."""
    return x.neg().exp_().add_(1.0).reciprocal_()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        gate = _wide(gate_NF)
        return (gate * _logistic(gate)).to(gate_NF.dtype) * up_NF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_NF, up_NF = ctx.saved_tensors
        grad, gate = _wide(grads[0]), _wide(gate_NF)
        share = _logistic(gate)
        grad_gate = grad * up_NF * share * (1 + gate * (1 - share)) if ctx.needs_input_grad[0] else None
        grad_up = (grad * (gate * share)).to(up_NF.dtype) if ctx.needs_input_grad[1] else None
        return None if grad_gate is None else grad_gate.to(gate_NF.dtype), grad_up


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """As `intarsia.ops.swiglu`."""
    return _Swiglu.apply(gate_NF, up_NF)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _logistic(_wide(x))
        ctx.save_for_backward(y)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return (grads[0] * (1 - y) * y).to(grads[0].dtype)


def router_sigmoid(logits_NE: Tensor) -> Tensor:
    """As the operator `router_sigmoid`."""
    return _Sigmoid.apply(logits_NE)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gate_ND: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, gate_ND)
        return x_ND * _logistic(_wide(gate_ND)).to(gate_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_ND, gate_ND = ctx.saved_tensors
        grad, share = _wide(grads[0]), _logistic(_wide(gate_ND))
        return (grad * share).to(x_ND.dtype), (grad * x_ND * (1 - share) * share).to(gate_ND.dtype)


def sigmoid_gate(x_ND: Tensor, gate_ND: Tensor) -> Tensor:
    """As the operator `sigmoid_gate`."""
    return _Gate.apply(x_ND, gate_ND)
