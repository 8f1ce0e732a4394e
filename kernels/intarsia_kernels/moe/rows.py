"""`permute` and `combine` in Triton. N tokens, K experts of a token, M rows for experts, D model width.

Every row is read and written once, and a token once: permute reads N D and writes M D, its gradient and combine read M D and write N D, combine's gradient reads the rows for the weights' gradients while
it writes theirs. All go from token to token, since rows in the order of experts would read each token K times from afar.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.direct import cdiv, direct_op, power_of_two, wrap_triton

MAX_BLOCK = 4096
"""Columns that a program holds at once."""
MOST_ELEMENTS = 16384
"""Elements of a token's rows that a program reads at once."""
TAIL = 64
"""Rows among which a program looks for the tail's."""


@triton.jit(do_not_specialize=["tokens", "rows"])
def _spread(
    x_pointer,
    rows_pointer,
    pairs_pointer,
    places_pointer,
    weights_pointer,
    y_pointer,
    dots_pointer,
    tokens,
    rows,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """rows[places[n, k]] = x[n]; as combine's gradient times the pair's weight, with x[n] . y[place] for that weight. A program for each token, which reads x once; then some that look for
    rows of the tail and clear them. WIDTH is a power of two from K on."""
    program = tl.program_id(0).to(tl.int64)
    if program < tokens:
        number = tl.arange(0, WIDTH)
        place = tl.load(places_pointer + program * K + number, mask=number < K, other=-1)
        dots = tl.zeros([WIDTH], dtype=tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < COLUMNS
            at, kept = place[:, None] * COLUMNS + offsets[None, :], (place >= 0)[:, None] & mask[None, :]
            part = tl.broadcast_to(tl.load(x_pointer + program * COLUMNS + offsets, mask=mask, other=0.0)[None, :], [WIDTH, BLOCK])
            if IS_GRADIENT:
                wide = part.to(tl.float32)
                dots += tl.sum(wide * tl.load(y_pointer + at, mask=kept, other=0.0).to(tl.float32), axis=1)
                weight = tl.load(weights_pointer + program * K + number, mask=number < K, other=0.0).to(tl.float32)
                part = (wide * weight[:, None]).to(rows_pointer.dtype.element_ty)
            tl.store(rows_pointer + at, part, mask=kept)
        if IS_GRADIENT:
            tl.store(dots_pointer + program * K + number, dots, mask=number < K)
    else:
        first = (program - tokens) * TAIL
        row = first + tl.arange(0, TAIL)
        if tl.min(tl.load(pairs_pointer + row, mask=row < rows, other=0), axis=0) < 0:
            for i in range(TAIL):
                absent = tl.load(pairs_pointer + first + i, mask=first + i < rows, other=0) < 0
                for start in range(0, COLUMNS, BLOCK):
                    offsets = start + tl.arange(0, BLOCK)
                    zeros = tl.zeros([BLOCK], dtype=rows_pointer.dtype.element_ty)
                    tl.store(rows_pointer + (first + i) * COLUMNS + offsets, zeros, mask=(offsets < COLUMNS) & absent)


@triton.jit
def _gather(
    rows_pointer,
    places_pointer,
    weights_pointer,
    y_pointer,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[n] = the sum over k of rows[places[n, k]], times the weight, in the order of k; a negative place adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, COLUMNS, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < COLUMNS
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for k in tl.static_range(K):
            place = tl.load(places_pointer + token * K + k)
            part = tl.load(rows_pointer + place * COLUMNS + offsets, mask=mask & (place >= 0), other=0.0).to(tl.float32)
            if IS_WEIGHTED:
                part *= tl.load(weights_pointer + token * K + k).to(tl.float32)
            total += part
        tl.store(y_pointer + token * COLUMNS + offsets, total.to(y_pointer.dtype.element_ty), mask=mask)


def _launch(columns: int) -> dict[str, int]:
    block = min(MAX_BLOCK, power_of_two(max(columns, 1)))
    return {"BLOCK": block, "num_warps": 8 if block >= 4096 else 4 if block >= 512 else 1}


def _spread_grid(places_NK: Tensor, pairs_M: Tensor) -> tuple[int]:
    return (places_NK.shape[0] + cdiv(pairs_M.shape[0], TAIL),)


def _spread_launch(columns: int, k: int) -> dict[str, int]:
    width = power_of_two(k)
    block = min(max(MOST_ELEMENTS // width, 16), power_of_two(max(columns, 1)))
    return {"WIDTH": width, "BLOCK": block, "TAIL": TAIL, "num_warps": 8 if width * block >= MOST_ELEMENTS else 4}


@direct_op("intarsia::moe_permute")
def spread(x_ND: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
    """[M, D]: x of each row's token, of contiguous x."""
    rows_MD = x_ND.new_empty(pairs_M.shape[0], x_ND.shape[1])
    k = places_NK.shape[1]
    if rows_MD.numel():
        wrap_triton(_spread)[_spread_grid(places_NK, pairs_M)](
            x_ND, rows_MD, pairs_M, places_NK, x_ND, x_ND, x_ND, x_ND.shape[0], pairs_M.shape[0],
            COLUMNS=x_ND.shape[1], K=k, IS_GRADIENT=False, **_spread_launch(x_ND.shape[1], k),
        )  # fmt: skip
    return rows_MD


@direct_op("intarsia::moe_combine_gradient")
def spread_weighted(grad_ND: Tensor, y_MD: Tensor, weights_NK: Tensor, pairs_M: Tensor, places_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows [M, D] and, in float32, of the weights [N, K], from the combined rows' gradient."""
    grad_y_MD, (tokens, k) = torch.empty_like(y_MD), weights_NK.shape
    if not y_MD.numel():
        return grad_y_MD, torch.zeros_like(weights_NK, dtype=torch.float32)
    grad_weights_NK = torch.empty_like(weights_NK, dtype=torch.float32)
    wrap_triton(_spread)[_spread_grid(places_NK, pairs_M)](
        grad_ND, grad_y_MD, pairs_M, places_NK, weights_NK, y_MD, grad_weights_NK, tokens, pairs_M.shape[0],
        COLUMNS=y_MD.shape[1], K=k, IS_GRADIENT=True, **_spread_launch(y_MD.shape[1], k),
    )  # fmt: skip
    return grad_y_MD, grad_weights_NK


@direct_op("intarsia::moe_gather")
def gather(rows_MD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """[N, D]: the (weighted) sum of each token's rows."""
    tokens, k = places_NK.shape
    y_ND = rows_MD.new_empty(tokens, rows_MD.shape[1])
    if y_ND.numel():
        weights = rows_MD if weights_NK is None else weights_NK
        wrap_triton(_gather)[(tokens,)](
            rows_MD,
            places_NK,
            weights,
            y_ND,
            COLUMNS=rows_MD.shape[1],
            K=k,
            IS_WEIGHTED=weights_NK is not None,
            **_launch(rows_MD.shape[1]),
        )
    return y_ND


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(places_NK)
        return spread(x_ND.contiguous(), pairs_M, places_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather(grads[0].contiguous(), ctx.saved_tensors[0], None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, weights_NK: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
        y_MD, weights_NK = y_MD.contiguous(), weights_NK.contiguous()
        ctx.save_for_backward(y_MD, weights_NK, pairs_M, places_NK)
        return gather(y_MD, places_NK, weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_MD, weights_NK, pairs_M, places_NK = ctx.saved_tensors
        grad_y_MD, grad_weights_NK = spread_weighted(grads[0].contiguous(), y_MD, weights_NK, pairs_M, places_NK)
        return grad_y_MD, grad_weights_NK.to(weights_NK.dtype), None, None


def permute(x_ND: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
    """As the operator `permute`."""
    return _Permute.apply(x_ND, pairs_M.contiguous(), places_NK.contiguous())


def combine(y_MD: Tensor, weights_NK: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
    """As the operator `combine`."""
    return _Combine.apply(y_MD, weights_NK, pairs_M.contiguous(), places_NK.contiguous())


def _supports_permute(x_ND: Tensor, pairs_M: Tensor, places_NK: Tensor) -> str | None:
    return "it sums in float32" if x_ND.dtype == torch.float64 else None


def _supports_combine(y_MD: Tensor, weights_NK: Tensor, pairs_M: Tensor, places_NK: Tensor) -> str | None:
    return "it sums in float32" if y_MD.dtype == torch.float64 else None


permute.supports = _supports_permute  # type: ignore[attr-defined]
combine.supports = _supports_combine  # type: ignore[attr-defined]
