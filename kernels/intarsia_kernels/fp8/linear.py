"""`scaled_linear` on Hopper: the gathered float8 bytes are what the tensor cores read.

Forward: activations are quantised by pieces of 128 columns, then y = x W^T in float8. Input gradient: the output's gradient likewise, and dx = dy W with W's bytes transposed,
since float8 operands must be adjacent along what is summed. Weight gradient: dy^T x in the compute dtype, from the activations as they were.

Shape suffixes: N rows (any leading dimensions), I input and O output features, o and i their tiles, k pieces of 128.
"""

from __future__ import annotations

from typing import Any

import torch
from intarsia.ops.scaled_reference import FORMAT, LARGEST, SMALLEST
from torch import Tensor

from intarsia_kernels.fp8 import products, tiles
from intarsia_kernels.fp8.tiles import PIECE, quantise_rows

TILE = (128, 128)
TRACED_ROWS = False
"""Whether a compiler sees how activations are quantised, and so does it in the kernels that compute them."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("intarsia::fp8_product", mutates_args=())
def product(x_NK: Tensor, x_scales_kN: Tensor, weight_OK: Tensor, weight_scales_ok: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The first `rows` rows of x W^T in `dtype`; x as `quantise_rows` gives it."""
    if dtype == torch.bfloat16 and products.has_torch_product(x_NK.device):
        return products.torch_product(x_NK, x_scales_kN, weight_OK, weight_scales_ok, dtype, rows)
    config = products.config_for(rows, weight_OK.shape[0])
    return products.triton_product(x_NK, x_scales_kN, weight_OK, weight_scales_ok, dtype, rows, config)


@product.register_fake
def _(x_NK: Tensor, x_scales_kN: Tensor, weight_OK: Tensor, weight_scales_ok: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    return x_NK.new_empty(rows, weight_OK.shape[0], dtype=dtype)


def traced_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantise_rows`, of a multiple of 4 rows and of 128 columns, in torch's own operations."""
    pieces_MkC = x_MK.unflatten(1, (-1, PIECE)).float()
    scales_Mk = pieces_MkC.abs().amax(-1).clamp_min(SMALLEST) / LARGEST
    payload_MkC = (pieces_MkC * scales_Mk.reciprocal().unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(FORMAT)
    return payload_MkC.flatten(1), scales_Mk.t().contiguous()


def _rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    if TRACED_ROWS and torch.compiler.is_compiling() and x_MK.shape[0] % 4 == 0 and x_MK.shape[1] % PIECE == 0:
        return traced_rows(x_MK)
    return quantise_rows(x_MK)


@torch.library.custom_op("intarsia::fp8_transpose", mutates_args=())
def transpose(payload_OI: Tensor) -> Tensor:
    """The payload [I, O], contiguous."""
    return tiles.transpose(payload_OI)


@transpose.register_fake
def _(payload_OI: Tensor) -> Tensor:
    return payload_OI.new_empty(payload_OI.shape[1], payload_OI.shape[0])


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, payload_OI: Tensor, scales_oi: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, payload_OI, scales_oi)
        x_scaled, x_scales = _rows(x_NI)
        y_NO = product(x_scaled, x_scales, payload_OI, scales_oi, x_NI.dtype, x_NI.shape[0])
        return y_NO if bias_O is None else y_NO + bias_O

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, payload_OI, scales_oi = ctx.saved_tensors
        grad_NO, needs = grads[0], ctx.needs_input_grad
        grad_x = None
        if needs[0]:
            grad_scaled, grad_scales = _rows(grad_NO)
            grad_x = product(grad_scaled, grad_scales, transpose(payload_OI), scales_oi.t().contiguous(), x_NI.dtype, grad_NO.shape[0])
        grad_weight = grad_NO.t() @ x_NI if needs[1] else None
        return grad_x, grad_weight, None, None, grad_NO.sum(0) if needs[4] else None


def scaled_linear(
    x_NI: Tensor, weight_OI: Tensor, payload_OI: Tensor, scales_oi: Tensor, bias_O: Tensor | None = None, tile: tuple[int, int] = (128, 128)
) -> Tensor:
    """As `intarsia.ops.scaled_linear`, with activations and their gradients in float8 too."""
    y_NO = _ScaledLinear.apply(x_NI.reshape(-1, x_NI.shape[-1]), weight_OI, payload_OI, scales_oi, bias_O)
    return y_NO.view(*x_NI.shape[:-1], y_NO.shape[-1])


def supports(
    x_NI: Tensor, weight_OI: Tensor, payload_OI: Tensor, scales_oi: Tensor, bias_O: Tensor | None = None, tile: tuple[int, int] = (128, 128)
) -> str | None:
    """Why a call cannot be taken."""
    if tuple(tile) != TILE:
        return f"tiles of {tile[0]} x {tile[1]}: it multiplies 128 x 128"
    if payload_OI.shape[0] % PIECE or payload_OI.shape[1] % PIECE:
        return f"a weight of {payload_OI.shape[0]} x {payload_OI.shape[1]}: its sizes are no multiples of 128"
    if x_NI.dtype not in DTYPES:
        return f"values in {x_NI.dtype}"
    if x_NI.numel() == 0:
        return "no rows"
    return None


scaled_linear.supports = supports  # type: ignore[attr-defined]
