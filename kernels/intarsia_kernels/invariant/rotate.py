"""`rope` in Triton: one pass over a token's heads forward, and one backward, by the angles turned round. N tokens in a line, H heads, D head dim, d = D / 2 rotated pairs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.direct import direct_op, wrap_triton

PAIRS = 1024
"""About so many pairs of a token are in a program."""


@triton.jit
def _rotate(
    x_pointer,
    cos_pointer,
    sin_pointer,
    y_pointer,
    heads,
    token_stride,
    head_stride,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (pair < WIDTH)[None, :]
    cos = tl.load(cos_pointer + token * WIDTH + pair, mask=pair < WIDTH, other=0.0)[None, :]
    sin = tl.load(sin_pointer + token * WIDTH + pair, mask=pair < WIDTH, other=0.0)[None, :]
    if BACK:
        sin = -sin
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + WIDTH
    x_pointers = x_pointer + token * token_stride + head[:, None] * head_stride
    a = tl.load(x_pointers + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_pointers + second[None, :], mask=inside, other=0.0).to(tl.float32)
    y_pointers = y_pointer + (token * heads + head[:, None]) * (2 * WIDTH)
    tl.store(y_pointers + first[None, :], (a * cos - b * sin).to(y_pointer.dtype.element_ty), mask=inside)
    tl.store(y_pointers + second[None, :], (b * cos + a * sin).to(y_pointer.dtype.element_ty), mask=inside)


@direct_op("intarsia::rotate")
def rotate(x_NHD: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Every head turned by the token's angles, or turned `back`. Contiguous; x needs only its last dimension dense."""
    tokens, heads, width = x_NHD.shape
    y_NHD = torch.empty((tokens, heads, width), dtype=x_NHD.dtype, device=x_NHD.device)
    if y_NHD.numel():
        block = triton.next_power_of_2(width // 2)
        together = min(triton.next_power_of_2(heads), max(1, PAIRS // block))
        wrap_triton(_rotate)[(tokens, triton.cdiv(heads, together))](
            x_NHD,
            cos_Nd,
            sin_Nd,
            y_NHD,
            heads,
            x_NHD.stride(0),
            x_NHD.stride(1),
            WIDTH=width // 2,
            HEADS=together,
            BLOCK=block,
            INTERLEAVED=interleaved,
            BACK=back,
            num_warps=4,
        )
    return y_NHD


def _dense(x_NHD: Tensor) -> Tensor:
    return x_NHD if x_NHD.stride(-1) == 1 else x_NHD.contiguous()


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_Nd, sin_Nd)
        ctx.interleaved = interleaved
        return rotate(_dense(x_NHD), cos_Nd, sin_Nd, interleaved, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return rotate(_dense(grads[0]), *ctx.saved_tensors, ctx.interleaved, True), None, None, None


def rope(x_BSHD: Tensor, cos_BSd: Tensor, sin_BSd: Tensor, interleaved: bool = False) -> Tensor:
    """As `intarsia.ops.rope`, for heads that are rotated whole."""
    tables = [table.expand(*x_BSHD.shape[:2], -1).reshape(-1, table.shape[-1]).contiguous() for table in (cos_BSd, sin_BSd)]
    y_NHD: Tensor = _Rope.apply(x_BSHD.flatten(0, 1), *tables, interleaved)
    return y_NHD.unflatten(0, x_BSHD.shape[:2])


def supports(x_BSHD: Tensor, cos_BSd: Tensor, sin_BSd: Tensor, interleaved: bool = False) -> str | None:
    """Why a call cannot be taken."""
    if x_BSHD.dtype == torch.float64 or cos_BSd.dtype != torch.float32 or sin_BSd.dtype != torch.float32:
        return "it computes in float32, from tables in float32"
    if x_BSHD.dim() != 4 or x_BSHD.shape[-1] != 2 * cos_BSd.shape[-1]:
        return "it rotates all dimensions of a head"
    return "angles have no gradient here" if cos_BSd.requires_grad or sin_BSd.requires_grad else None


rope.supports = supports  # type: ignore[attr-defined]
