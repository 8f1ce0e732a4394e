"""Products of rows in groups, one matrix for each group: the references. M rows, E groups, I input and O output features.

Rows of group e are the `counts_E[e]` rows after those of the groups before it; rows after the last group are a tail that nobody has written: it is never read, and
what comes out in its place, forward and backward, is 0. The opaque operators have a meta version, so that planning and compilers know shapes without numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from intarsia import ops
from intarsia_float8.format import dequantise
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def _parts(counts_E: Tensor, rows: int) -> list[tuple[int, int]]:
    """(first row, row after the last) of each group; PyTorch's own message for counts that exceed the rows helps nobody."""
    found, start = [], 0
    for count in counts_E.tolist():
        found.append((start, start + count))
        start += count
    if start > rows:
        raise ValueError(f"grouped_linear: the groups hold {start} rows, and there are {rows}")
    return found


@torch.library.custom_op("intarsia::grouped_product", mutates_args=())
def product(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """[M, O]: row m of group e is W_e x_m. The weight's strides are free."""
    y_MO = x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])
    stop = 0
    for e, (start, stop) in enumerate(_parts(counts_E, x_MI.shape[0])):
        if stop > start:
            torch.mm(x_MI[start:stop], weight_EOI[e].t(), out=y_MO[start:stop])
    y_MO[stop:] = 0
    return y_MO


@product.register_fake
def _(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    return x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("intarsia::grouped_weight_gradient", mutates_args=())
def weight_gradient(grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor) -> Tensor:
    """[E, O, I]: the sum over the group's rows of grad_m x_m^T; 0 for a group without rows."""
    grad_EOI = x_MI.new_empty(counts_E.shape[0], grad_MO.shape[1], x_MI.shape[1])
    for e, (start, stop) in enumerate(_parts(counts_E, x_MI.shape[0])):
        if stop > start:
            torch.mm(grad_MO[start:stop].t(), x_MI[start:stop], out=grad_EOI[e])
        else:
            grad_EOI[e] = 0
    return grad_EOI


@weight_gradient.register_fake
def _(grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor) -> Tensor:
    return x_MI.new_empty(counts_E.shape[0], grad_MO.shape[1], x_MI.shape[1])


@register_flop_formula([torch.ops.intarsia.grouped_product, torch.ops.intarsia.grouped_weight_gradient])
def _flops(one: Sequence[int], other: Sequence[int], counts_E: Sequence[int], *, out_shape: Sequence[int], **_: Any) -> int:
    """As if every row were in a group: counting has shapes alone."""
    return 2 * one[0] * one[1] * other[1]


def grouped(
    product: Product, weight_gradient: Product, groups_of: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A differentiable `grouped_linear` from its two products: `product(x, W, counts)` and `weight_gradient(grad, x, counts)`. Kernels are made by it too.

    Products that want the groups told otherwise get `groups_of(counts)`, made once for forward and backward.
    """

    class GroupedLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
            groups_E = counts_E if groups_of is None else groups_of(counts_E)
            ctx.save_for_backward(x_MI, weight_EOI, groups_E)
            return product(x_MI, weight_EOI, groups_E)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            x_MI, weight_EOI, groups_E = ctx.saved_tensors
            grad_MO = grads[0].contiguous()  # an expanded gradient has no strides that a product could use
            grad_x = product(grad_MO, weight_EOI.transpose(1, 2), groups_E) if ctx.needs_input_grad[0] else None
            grad_weight = weight_gradient(grad_MO, x_MI, groups_E) if ctx.needs_input_grad[1] else None
            return grad_x, grad_weight, None

    return GroupedLinear.apply


_grouped = grouped(product, weight_gradient)


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """[M, O]: the first `counts_E[0]` rows of x times W_0^T, the next `counts_E[1]` times W_1^T, and so on; `counts_E` is int64, on x's device, and may hold zeros.

    Rows after the last group are a tail: never read, 0 in the result, with gradient 0. A group without rows has the weight gradient 0.
    """
    return _grouped(x_MI, weight_EOI, counts_E)


# For who computes it at another time than the input's gradient. A kernel's function has one too.
grouped_linear.weight_gradient = weight_gradient  # type: ignore[attr-defined]


def grouped_swiglu(x_MI: Tensor, gate_EOI: Tensor, up_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """[M, O]: `swiglu(grouped_linear(x, gate, counts), grouped_linear(x, up, counts))`, by what is in force for both. Rows of the tail are as there."""
    from intarsia_models_common.moe.operators import GROUPED_LINEAR

    return ops.swiglu(GROUPED_LINEAR(x_MI, gate_EOI, counts_E), GROUPED_LINEAR(x_MI, up_EOI, counts_E))


class _ScaledGroupedLinear(torch.autograd.Function):
    """Keeps the payload for the backward pass and not what it stands for. Products are those in force for `grouped_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x_MI: Tensor, weight_EOI: Tensor, payload_EOI: Tensor, scales_Eoi: Tensor, counts_E: Tensor, tile: Any, expand: Any
    ) -> Tensor:
        ctx.save_for_backward(x_MI, payload_EOI, scales_Eoi, counts_E)
        ctx.tile, ctx.expand = tile, expand
        return _in_force()(x_MI, expand(payload_EOI, scales_Eoi, tile, x_MI.dtype), counts_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, payload_EOI, scales_Eoi, counts_E = ctx.saved_tensors
        grad_MO, needs = grads[0].contiguous(), ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs[0]:
            weight_EOI = ctx.expand(payload_EOI, scales_Eoi, ctx.tile, x_MI.dtype)
            grad_x = _in_force()(grad_MO, weight_EOI.transpose(1, 2), counts_E)
        if needs[1]:
            grad_weight = getattr(_in_force(), "weight_gradient", weight_gradient)(grad_MO, x_MI, counts_E)
        return grad_x, grad_weight, *(None,) * 5


def _in_force() -> Any:
    from intarsia_models_common.moe.operators import GROUPED_LINEAR

    return GROUPED_LINEAR.choice.function or grouped_linear


def scaled(expand: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A differentiable `scaled_grouped_linear` whose weights are made by `expand(payload, scales, tile, dtype)`. Kernels are made by it too."""

    def run(
        x_MI: Tensor, weight_EOI: Tensor, payload_EOI: Tensor, scales_Eoi: Tensor, counts_E: Tensor, tile: tuple[int, int] = (128, 128)
    ) -> Tensor:
        return _ScaledGroupedLinear.apply(x_MI, weight_EOI, payload_EOI, scales_Eoi, counts_E, tile, expand)

    return run


_scaled = scaled(dequantise)


def scaled_grouped_linear(
    x_MI: Tensor, weight_EOI: Tensor, payload_EOI: Tensor, scales_Eoi: Tensor, counts_E: Tensor, tile: tuple[int, int] = (128, 128)
) -> Tensor:
    """`grouped_linear` for the weights that `payload_EOI` (float8_e4m3fn) and `scales_Eoi` (float32, one for each tile of each matrix) stand for, rounded to x's dtype.

    `weight_EOI` is never read: it has the weights' shape and x's dtype, and their gradient goes to it.
    """
    return _scaled(x_MI, weight_EOI, payload_EOI, scales_Eoi, counts_E, tile)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def routing(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A differentiable `router_linear` from `product(x, W)`, `x @ W^T` of float32 (or float64) matrices. Kernels are made by it too."""

    class RouterLinear(torch.autograd.Function):
        """Keeps the input as it is and not its float32 copy."""

        @staticmethod
        def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
            ctx.save_for_backward(x_ND, weight_ED)
            return product(_wide(x_ND), _wide(weight_ED))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            x_ND, weight_ED = ctx.saved_tensors
            grad_x = torch.mm(grads[0], _wide(weight_ED)).to(x_ND.dtype) if ctx.needs_input_grad[0] else None
            grad_weight = torch.mm(grads[0].t(), _wide(x_ND)).to(weight_ED.dtype) if ctx.needs_input_grad[1] else None
            return grad_x, grad_weight

    return RouterLinear.apply


_routing = routing(lambda x_ND, weight_ED: torch.mm(x_ND, weight_ED.t()))


def router_linear(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """`x @ weight^T` in float32 (float64 for that dtype) whatever the dtypes are: [N, E]."""
    return _routing(x_ND, weight_ED)


def router_sigmoid(logits_NE: Tensor) -> Tensor:
    """Each expert's score by itself, `1 / (1 + exp(-logit))`: [N, E]."""
    return torch.sigmoid(logits_NE)
