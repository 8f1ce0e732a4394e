"""`top_experts`, `expert_weights` and `expert_counts` in Triton. N tokens, E experts, K chosen, G groups of experts, P programs.

Each is a handful of numbers for a token: what counts is how often the host launches something before rows can set out, and that no sort is needed for the best few of a row held in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.direct import cdiv, direct_op, power_of_two, wrap_triton

ELEMENTS = 2048
"""Scores that a program holds at once."""
MOST_EXPERTS = 4096
ROWS_PER_PROGRAM = 32
"""Tokens over which one program sums entropies: fixed, so that the order of the sum does not depend on the machine."""


@triton.jit
def _ranked(values, columns):
    """int64 numbers in the order of float32 values, NaN above all, of equal ones the first column above the others; no two of a row are equal, and none is the least int64."""
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def _top(
    scores_pointer,
    experts_pointer,
    tokens,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The K best of each row, one after the other. Columns are laid out as [GROUP_BLOCK, BLOCK], powers of two from GROUPS and the size of a group on."""
    LEAST: tl.constexpr = -0x7FFFFFFFFFFFFFFF - 1
    SIZE: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group, member = tl.arange(0, GROUP_BLOCK), tl.arange(0, BLOCK)
    column = group[:, None] * SIZE + member[None, :]
    exists = ((group < GROUPS)[:, None] & (member < SIZE)[None, :])[None, :, :]
    at = row.to(tl.int64)[:, None, None] * EXPERTS + column[None, :, :]
    values = tl.load(scores_pointer + at, mask=exists & (row < tokens)[:, None, None], other=float("-inf")).to(tl.float32)
    ranked = tl.where(exists, _ranked(values, column[None, :, :]), LEAST)
    if TOP_GROUPS < GROUPS:
        values = tl.where(values != values, float("inf"), values)
        worth = tl.max(values, axis=2)
        if BY_TWO:
            best = tl.max(ranked, axis=2)
            worth += tl.max(tl.where(ranked == best[:, :, None], float("-inf"), values), axis=2)
        groups = tl.where((group < GROUPS)[None, :], _ranked(worth, group[None, :]), LEAST)
        inside = tl.zeros([ROWS, GROUP_BLOCK], dtype=tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            chosen = groups == tl.max(groups, axis=1)[:, None]
            inside = tl.where(chosen, 1, inside)
            groups = tl.where(chosen, LEAST, groups)
        ranked = tl.where((inside > 0)[:, :, None], ranked, LEAST)
    for k in tl.static_range(K):
        best = tl.max(tl.max(ranked, axis=2), axis=1)
        expert = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        tl.store(experts_pointer + row.to(tl.int64) * K + k, expert, mask=row < tokens)
        ranked = tl.where(ranked == best[:, None, None], LEAST, ranked)


@triton.jit
def _weigh(
    scores_pointer, experts_pointer, weights_pointer, tokens, scale,
    EXPERTS: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """w[n, k] = scores[n, experts[n, k]], over their sum. An expert that does not exist gives NaN: PyTorch's gather would stop there."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    number = tl.arange(0, WIDTH)
    mask = (row < tokens)[:, None] & (number < K)[None, :]
    at = row[:, None] * K + number[None, :]
    expert = tl.load(experts_pointer + at, mask=mask, other=0)
    known = (expert >= 0) & (expert < EXPERTS)
    weight = tl.load(scores_pointer + row[:, None] * EXPERTS + expert, mask=mask & known, other=0.0).to(tl.float32)
    weight = tl.where(known, weight, float("nan"))
    if NORMALISE:
        weight = tl.math.div_rn(weight, tl.broadcast_to((tl.sum(weight, axis=1) + 1e-20)[:, None], [ROWS, WIDTH]))
    tl.store(weights_pointer + at, (weight * tl.cast(scale, tl.float32)).to(weights_pointer.dtype.element_ty), mask=mask)


@triton.jit
def _weigh_backward(
    grad_pointer, scores_pointer, experts_pointer, grad_scores_pointer, tokens, scale,
    EXPERTS: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ds[n, e] = the sum over the k that chose e of scale g[n, k], or with t = the sum of the chosen scores scale (g[n, k] - (g . s) / t) / t."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    within = row < tokens
    total = tl.full([ROWS], 1e-20, dtype=tl.float32)
    dot = tl.zeros([ROWS], dtype=tl.float32)
    if NORMALISE:
        for k in tl.static_range(K):
            expert = tl.load(experts_pointer + row * K + k, mask=within, other=0)
            known = within & (expert >= 0) & (expert < EXPERTS)
            score = tl.load(scores_pointer + row * EXPERTS + expert, mask=known, other=0.0).to(tl.float32)
            total += score
            dot += score * tl.load(grad_pointer + row * K + k, mask=within, other=0.0).to(tl.float32)
    grad_scores = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(experts_pointer + row * K + k, mask=within, other=-1)
        grad = tl.load(grad_pointer + row * K + k, mask=within, other=0.0).to(tl.float32) * tl.cast(scale, tl.float32)
        if NORMALISE:
            grad = (grad - dot * tl.cast(scale, tl.float32) / total) / total
        grad_scores += tl.where(column[None, :] == expert[:, None], grad[:, None], 0.0)
    at = row[:, None] * EXPERTS + column[None, :]
    tl.store(
        grad_scores_pointer + at, grad_scores.to(grad_scores_pointer.dtype.element_ty), mask=within[:, None] & (column < EXPERTS)[None, :]
    )


@triton.jit
def _entropies(scores_pointer, parts_pointer, tokens, EXPERTS: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over PER tokens of -p log p with p = s / the sum of s."""
    column, total = tl.arange(0, BLOCK), tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, PER, ROWS):
        row = (tl.program_id(0) * PER + start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < tokens)[:, None] & (column < EXPERTS)[None, :]
        scores = tl.load(scores_pointer + row[:, None] * EXPERTS + column[None, :], mask=mask, other=0.0).to(tl.float32)
        shares = scores / tl.maximum(tl.sum(scores, axis=1), 1e-20)[:, None]
        # Of what is no number the entropy is none, as in PyTorch.
        total -= tl.sum(shares * tl.log(tl.where(shares == 0, 1.0, shares)), axis=1)
    tl.store(parts_pointer + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["tokens"])
def _collect(
    counts_pointer, parts_pointer, dropped_pointer, found_pointer, tokens, parts,
    EXPERTS: tl.constexpr, HAS_DROPPED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: counts, tokens, the sum of parts, dropped pairs."""
    column = tl.arange(0, BLOCK)
    counts = tl.load(counts_pointer + column, mask=column < EXPERTS, other=0)
    tl.store(found_pointer + column, counts.to(tl.float64), mask=column < EXPERTS)
    total = tl.zeros([PARTS], dtype=tl.float64)
    start = 0
    while start < parts:
        number = start + tl.arange(0, PARTS)
        total += tl.load(parts_pointer + number, mask=number < parts, other=0.0).to(tl.float64)
        start += PARTS
    tl.store(found_pointer + EXPERTS, tokens.to(tl.float64))
    tl.store(found_pointer + EXPERTS + 1, tl.sum(total, axis=0))
    # Without, the pointer is that of counts.
    dropped = tl.load(dropped_pointer).to(tl.float64)
    tl.store(found_pointer + EXPERTS + 2, dropped if HAS_DROPPED else dropped * 0.0)


def _rows(block: int) -> int:
    return max(1, ELEMENTS // block)


@direct_op("intarsia::top_experts")
def _top_experts(scores_NE: Tensor, top_k: int, groups: int, top_groups: int, by_two: bool) -> Tensor:
    tokens, experts = scores_NE.shape
    experts_NK = torch.empty(tokens, top_k, dtype=torch.int64, device=scores_NE.device)
    group_block, block = power_of_two(groups), power_of_two(experts // groups)
    rows = _rows(group_block * block)
    wrap_triton(_top)[(cdiv(tokens, rows),)](
        scores_NE, experts_NK, tokens,
        EXPERTS=experts, K=top_k, GROUPS=groups, TOP_GROUPS=top_groups, BY_TWO=by_two, ROWS=rows, GROUP_BLOCK=group_block, BLOCK=block,
    )  # fmt: skip
    return experts_NK


@direct_op("intarsia::expert_weights")
def _expert_weights(scores_NE: Tensor, experts_NK: Tensor, normalise: bool, scale: float) -> Tensor:
    (tokens, k), width = experts_NK.shape, power_of_two(experts_NK.shape[1])
    weights_NK = scores_NE.new_empty(tokens, k)
    rows = max(1, 512 // width)
    wrap_triton(_weigh)[(cdiv(tokens, rows),)](
        scores_NE, experts_NK, weights_NK, tokens, scale, EXPERTS=scores_NE.shape[1], K=k, NORMALISE=normalise, ROWS=rows, WIDTH=width
    )
    return weights_NK


@direct_op("intarsia::expert_weights_backward")
def _expert_weights_backward(grad_NK: Tensor, scores_NE: Tensor, experts_NK: Tensor, normalise: bool, scale: float) -> Tensor:
    grad_scores_NE, (tokens, experts) = torch.empty_like(scores_NE), scores_NE.shape
    block = power_of_two(experts)
    rows = _rows(block)
    wrap_triton(_weigh_backward)[(cdiv(tokens, rows),)](
        grad_NK, scores_NE, experts_NK, grad_scores_NE, tokens, scale,
        EXPERTS=experts, K=experts_NK.shape[1], NORMALISE=normalise, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return grad_scores_NE


@direct_op("intarsia::expert_counts")
def _expert_counts(counts_E: Tensor, scores_NE: Tensor, dropped: Tensor | None) -> Tensor:
    tokens, experts = scores_NE.shape
    block, programs = power_of_two(experts), cdiv(tokens, ROWS_PER_PROGRAM)
    parts_P = torch.empty(programs, dtype=torch.float32, device=scores_NE.device)
    found = torch.empty(experts + 3, dtype=torch.float64, device=scores_NE.device)
    wrap_triton(_entropies)[(programs,)](
        scores_NE, parts_P, tokens, EXPERTS=experts, PER=ROWS_PER_PROGRAM, ROWS=min(ROWS_PER_PROGRAM, _rows(block)), BLOCK=block
    )
    wrap_triton(_collect)[(1,)](
        counts_E, parts_P, counts_E if dropped is None else dropped, found, tokens, programs,
        EXPERTS=experts, HAS_DROPPED=dropped is not None, BLOCK=block, PARTS=512,
    )  # fmt: skip
    return found


class _ExpertWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_NE: Tensor, experts_NK: Tensor, normalise: bool, scale: float) -> Tensor:
        scores_NE, experts_NK = scores_NE.contiguous(), experts_NK.contiguous()
        ctx.save_for_backward(scores_NE, experts_NK)
        ctx.settings = normalise, scale
        return _expert_weights(scores_NE, experts_NK, normalise, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _expert_weights_backward(grads[0].contiguous(), *ctx.saved_tensors, *ctx.settings), None, None, None


def top_experts(scores_NE: Tensor, top_k: int, groups: int = 1, top_groups: int = 1, group_score: str = "max") -> Tensor:
    """As the operator `top_experts`; of equal scores the first expert's comes first, and NaN comes before all."""
    return _top_experts(scores_NE.detach().contiguous(), top_k, groups, top_groups, group_score == "top2")


def expert_weights(scores_NE: Tensor, experts_NK: Tensor, normalise: bool = False, scale: float = 1.0) -> Tensor:
    """As the operator `expert_weights`; an expert that does not exist makes its token's weights NaN."""
    return _ExpertWeights.apply(scores_NE, experts_NK, normalise, float(scale))


def expert_counts(counts_E: Tensor, scores_NE: Tensor, dropped: Tensor | None = None) -> Tensor:
    """As the operator `expert_counts`."""
    return _expert_counts(counts_E.contiguous(), scores_NE.detach().contiguous(), dropped)


def _obstacle(scores_NE: Tensor) -> str | None:
    if scores_NE.dtype == torch.float64:
        return "it computes in float32"
    if scores_NE.shape[1] > MOST_EXPERTS:
        return f"{scores_NE.shape[1]} experts"
    return "no tokens" if not scores_NE.numel() else None


def _supports_top(scores_NE: Tensor, top_k: int, groups: int = 1, top_groups: int = 1, group_score: str = "max") -> str | None:
    experts = scores_NE.shape[1]
    # Of these the reference says what is wrong, or chooses experts of other groups as well.
    if (
        experts % groups
        or not 1 <= top_groups <= groups
        or top_k > top_groups * (experts // groups)
        or (groups > 1 and group_score == "top2" and experts < 2 * groups)
    ):
        return f"{top_k} of {experts} experts, of {top_groups} of {groups} groups"
    return _obstacle(scores_NE)


def _supports_weights(scores_NE: Tensor, experts_NK: Tensor, normalise: bool = False, scale: float = 1.0) -> str | None:
    return _obstacle(scores_NE) or ("no experts are chosen" if not experts_NK.numel() else None)


def _supports_counts(counts_E: Tensor, scores_NE: Tensor, dropped: Tensor | None = None) -> str | None:
    return _obstacle(scores_NE)


top_experts.supports = _supports_top  # type: ignore[attr-defined]
expert_weights.supports = _supports_weights  # type: ignore[attr-defined]
expert_counts.supports = _supports_counts  # type: ignore[attr-defined]
