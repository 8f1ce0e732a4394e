"""Matrices of a batch divided by their norms, in Triton. B matrices of N elements each, P parts of each whose squares are summed apart.

    out = scale G / p,  f = p / max(norm(G), eps),  p the power of two above max(norm(G), eps): exact in fewer bits, where a division would fill all

Norms in float32: sums of squares by parts, then those of the parts in one order. Both passes read the matrices once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8
"""Elements that a program has in hand at a time."""

PARTS = 512
"""The most parts of a matrix."""


@triton.jit
def _squares(matrices, sums_BP, size, parts, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    part, batch = tl.program_id(0), tl.program_id(1)
    matrices += batch.to(tl.int64) * size
    first = part.to(tl.int64) * (STEPS * BLOCK)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(STEPS):
        start = first + step * BLOCK
        value = tl.load(matrices + start + offsets, mask=offsets < size - start, other=0.0).to(tl.float32)
        total += value * value
    tl.store(sums_BP + batch * parts + part, tl.sum(total, axis=0))


@triton.jit
def _scaled(
    matrices, sums_BP, out, factors_B, size, parts, scale, eps, STEPS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    part, batch = tl.program_id(0), tl.program_id(1)
    of_parts = tl.arange(0, PARTS)
    sums = tl.load(sums_BP + batch * parts + of_parts, mask=of_parts < parts, other=0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(sums, axis=0)), eps)
    # 2^(e + 1) and its inverse, where norm lies between 2^e and that.
    exponent = tl.minimum((norm.to(tl.int32, bitcast=True) >> 23) & 0xFF, 252)
    if part == 0:
        tl.store(factors_B + batch, ((exponent + 1) << 23).to(tl.float32, bitcast=True) / norm)
    factor = scale * ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    matrices += batch.to(tl.int64) * size
    out += batch.to(tl.int64) * size
    first = part.to(tl.int64) * (STEPS * BLOCK)
    offsets = tl.arange(0, BLOCK)
    for step in range(STEPS):
        start = first + step * BLOCK
        inside = offsets < size - start
        value = tl.load(matrices + start + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + start + offsets, (value * factor).to(out.dtype.element_ty), mask=inside)


def normalised(batch_BMN: Tensor, out_BMN: Tensor, factors_B: Tensor, scale: float, eps: float, squares_B: Tensor | None = None) -> None:
    """`out = scale G / p` and `factors = p / max(norm(G), eps)` for each matrix of a batch, contiguous and of at most 32 bits; float32 factors, and norms' squares where known."""
    batch, size = batch_BMN.shape[0], batch_BMN[0].numel()
    steps = -(-size // (PARTS * BLOCK))
    parts = -(-size // (steps * BLOCK))
    grid, sizes = (parts, batch), {"STEPS": steps, "BLOCK": BLOCK, "num_warps": WARPS}
    if squares_B is None:
        sums_BP = torch.empty(batch, parts, dtype=torch.float32, device=batch_BMN.device)
        _squares[grid](batch_BMN, sums_BP, size, parts, **sizes)
    else:
        sums_BP = squares_B.view(batch, 1)
    _scaled[grid](batch_BMN, sums_BP, out_BMN, factors_B, size, sums_BP.shape[1], scale, eps, PARTS=PARTS, **sizes)
