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


def _product(grad_NO: Tensor, x_NI: Tensor, weight: Tensor) -> Tensor:
    # Of what is itself to be differentiated autograd has to know.
    place = None if torch.is_grad_enabled() else gradients.take(weight, (grad_NO.shape[1], x_NI.shape[1]), grad_NO.dtype)
    return grad_NO.t() @ x_NI if place is None else torch.mm(grad_NO.t(), x_NI, out=place)


# To a compiler it makes a tensor of its own, in memory that it has not planned. Defined this way it costs a call from compiled code less than a `custom_op` does.
_library = torch.library.Library("intarsia", "FRAGMENT")
_library.define("weight_gradient(Tensor grad, Tensor x, Tensor weight) -> Tensor")
_library.impl("weight_gradient", _product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "intarsia::weight_gradient", lambda grad_NO, x_NI, weight: grad_NO.new_empty(grad_NO.shape[1], x_NI.shape[1]), lib=_library
)
