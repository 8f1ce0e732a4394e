"""`scaled_linear` on Hopper: the gathered float8 bytes are what the tensor cores read.

Forward: activations are quantised by pieces of 128 columns, then y = x W^T in float8. Input gradient: the output's gradient likewise, and dx = dy W with W's bytes transposed,
since float8 operands must be adjacent along what is summed. Weight gradient: dy^T x in the compute dtype, from the activations as they were.

Shape suffixes: N rows (any leading dimensions), I input and O output features, o and i their tiles, k pieces of 128.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from intarsia_kernels.fp8 import products
from intarsia_kernels.fp8.tiles import PIECE, quantise_rows, transpose
from intarsia_kernels.linear.weights import weight_gradient

TILE = (128, 128)
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


class _Shared:
    """The activation quantised last, for other layers that read it: queries, keys and values, or a gate and what it gates. Kept while the activation itself lives.

    A compiler finds common work itself; within a CUDA graph everything that a replay needs is recorded anew.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._facts: tuple[Any, ...] = ()
        self._found: tuple[Tensor, Tensor] | None = None

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`quantise_rows` of x [..., I]."""
        if torch.compiler.is_compiling() or x.is_inference() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return quantise_rows(x.detach().reshape(-1, x.shape[-1]))
        facts = (x._version, x.data_ptr(), torch.cuda.current_stream(x.device) if x.is_cuda else None)
        if self._found is None or self._of is None or self._of() is not x or self._facts != facts:
            self._found, self._facts = quantise_rows(x.detach().reshape(-1, x.shape[-1])), facts
            self._of = weakref.ref(x, self._forget)
        return self._found

    def _forget(self, dead: Any) -> None:
        if self._of is dead:
            self._found = self._of = None


_shared = _Shared()


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        payload_OI: Tensor,
        scales_oi: Tensor,
        bias_O: Tensor | None,
        x_scaled: Tensor,
        x_scales: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_NI, payload_OI, scales_oi)
        y_NO = product(x_scaled, x_scales, payload_OI, scales_oi, x_NI.dtype, x_NI.shape[0])
        return y_NO if bias_O is None else y_NO + bias_O

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, payload_OI, scales_oi = ctx.saved_tensors
        grad_NO, needs = grads[0], ctx.needs_input_grad
        grad_x = None
        if needs[0]:
            grad_scaled, grad_scales = quantise_rows(grad_NO)
            grad_x = product(grad_scaled, grad_scales, *transpose(payload_OI, scales_oi), x_NI.dtype, grad_NO.shape[0])
        grad_weight = weight_gradient(grad_NO, x_NI, payload_OI) if needs[1] else None
        return grad_x, grad_weight, None, None, grad_NO.sum(0) if needs[4] else None, None, None


def scaled_linear(
    x_NI: Tensor, weight_OI: Tensor, payload_OI: Tensor, scales_oi: Tensor, bias_O: Tensor | None = None, tile: tuple[int, int] = (128, 128)
) -> Tensor:
    """As `intarsia_models_common.scaled_linear`, with activations and their gradients in float8 too."""
    x_scaled, x_scales = _shared.rows(x_NI)
    y_NO = _ScaledLinear.apply(x_NI.reshape(-1, x_NI.shape[-1]), weight_OI, payload_OI, scales_oi, bias_O, x_scaled, x_scales)
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
