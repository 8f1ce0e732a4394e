"""Gradients of weights by matrix products, where a sharder wants them. N rows, I input and O output features."""

from __future__ import annotations

import torch
from intarsia.ops import gradients
from torch import Tensor

from intarsia_kernels.direct import is_watched


def weight_gradient(grad_NO: Tensor, x_NI: Tensor, weight: Tensor) -> Tensor:
    """grad^T x [O, I], in the place that was offered for it if one was; `weight` as in `intarsia.ops.gradients.offer`."""
    if is_watched(grad_NO, x_NI, weight):
        found: Tensor = torch.ops.intarsia.weight_gradient(grad_NO, x_NI, weight)
        return found
    return _product(grad_NO, x_NI, weight)


def scaled_gradient(sum_OI: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """sum * scale in the weight's dtype, multiplied as the sum is, in one pass over memory; where it goes as above."""
    if is_watched(sum_OI, scale, weight):
        found: Tensor = torch.ops.intarsia.scaled_gradient(sum_OI, scale, weight)
        return found
    return _scaled(sum_OI, scale, weight)


def _product(grad_NO: Tensor, x_NI: Tensor, weight: Tensor) -> Tensor:
    place = _place(weight, grad_NO.dtype)
    return grad_NO.t() @ x_NI if place is None else torch.mm(grad_NO.t(), x_NI, out=place)


def _scaled(sum_OI: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    place = _place(weight, weight.dtype)
    return torch.mul(sum_OI, scale, out=torch.empty_like(sum_OI, dtype=weight.dtype) if place is None else place)


def _place(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """None also where the result is itself to be differentiated: autograd would not know of it."""
    return None if torch.is_grad_enabled() else gradients.take(weight, dtype)


# To a compiler they make tensors of their own, in memory that it has not planned. Defined this way they cost a call from compiled code less than a `custom_op` does.
_library = torch.library.Library("intarsia", "FRAGMENT")
for _definition, _run, _like in (
    (
        "weight_gradient(Tensor grad, Tensor x, Tensor weight) -> Tensor",
        _product,
        lambda grad_NO, x_NI, weight: grad_NO.new_empty(grad_NO.shape[1], x_NI.shape[1]),
    ),
    (
        "scaled_gradient(Tensor sum, Tensor scale, Tensor weight) -> Tensor",
        _scaled,
        lambda sum_OI, scale, weight: sum_OI.new_empty(sum_OI.shape, dtype=weight.dtype),
    ),
):
    _name = _definition.partition("(")[0]
    _library.define(_definition)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"intarsia::{_name}", _like, lib=_library)
