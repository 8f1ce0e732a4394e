"""`router_linear` by bfloat16 tensor cores, as exact as float32. N tokens, D model width, E experts.

A float32 number is the sum of three bfloat16 ones, and x is bfloat16 already: x W^T = x W1^T + x W2^T + x W3^T, products exact and sums in float32. One product of 3 E columns reads x once,
where a float32 product would first write x twice as wide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALF = torch.bfloat16
HAS_WIDE_PRODUCT = "dtype" in torch.ops.aten.mm.overloads()
"""Whether this torch multiplies bfloat16 matrices into float32."""


def parts(tensor: Tensor, count: int) -> list[Tensor]:
    """`count` bfloat16 tensors that add up to a float32 one, the largest first: 8 more bits each."""
    found, rest = [], tensor
    for _ in range(count):
        found.append(rest.to(HALF))
        rest = rest - found[-1].float()
    return found


# Opaque: not every compiler that traces `mm` knows of its other result dtype.
@torch.library.custom_op("intarsia::wide_product", mutates_args=())
def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32 of bfloat16 matrices."""
    if a.is_cuda and HAS_WIDE_PRODUCT:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


@_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


class _RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        logits_N3E = _product(x_ND, torch.cat(parts(weight_ED.float(), 3)).t())
        return logits_N3E.view(x_ND.shape[0], 3, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_ED = ctx.saved_tensors
        first, second, third = parts(grads[0], 3)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # Two parts each are 16 bits, twice what the result holds.
            high, low = parts(weight_ED.float(), 2)
            grad_x = torch.mm(torch.cat((first, second, first), 1), torch.cat((high, high, low)))
        if ctx.needs_input_grad[1]:
            grad_3ED = _product(torch.cat((first, second, third), 1).t(), x_ND)
            grad_weight = grad_3ED.view(3, *weight_ED.shape).sum(0).to(weight_ED.dtype)
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
