"""Symmetric products by tiles in Triton, and the mirror that vendor products need. B matrices, M rows and columns, K summed.

    C = f (alpha X Y^T + beta S + delta T + gamma I),  C known to be symmetric, f a matrix's own number;  L = LOST (C - rounded(C))

A program computes one tile that touches the lower triangle and stores it twice, the second time transposed: column block j (of `columns`) pairs with row
block i (of 128) where j <= i // (columns / 128); the blocks on the diagonal hold both of their halves themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from intarsia_kernels.optimizer.reference import LOST

ROWS, DEPTH = 128, 64
MIRRORED = 64
"""Rows and columns of a program of the mirror."""


@triton.jit
def _product(
    x,
    y,
    s,
    t,
    c,
    c_mirrored,
    lost,
    lost_mirrored,
    factors,
    rows,
    tiles,
    alpha,
    beta,
    delta,
    gamma,
    SUMMED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ADDENDS: tl.constexpr,
    IDENTITY: tl.constexpr,
    LOSES: tl.constexpr,
    LOST: tl.constexpr,
    FACTORED: tl.constexpr,
    DROPPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    RATIO: tl.constexpr = BLOCK_COLUMNS // BLOCK_ROWS
    batch = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    pair = tile // RATIO
    r = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    r = tl.where((r + 1) * (r + 2) // 2 <= pair, r + 1, r)  # The root is a float32.
    r = tl.where(r * (r + 1) // 2 > pair, r - 1, r)
    j = pair - r * (r + 1) // 2
    row = (RATIO * r + tile % RATIO) * BLOCK_ROWS
    column = j * BLOCK_COLUMNS
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for k in range(0, SUMMED, BLOCK_DEPTH):
        if TRANSPOSED:
            sums = tl.dot(x.load([batch * SUMMED + k, row]).T, y.load([batch * SUMMED + k, column]), sums)
        else:
            sums = tl.dot(x.load([batch * rows + row, k]), y.load([batch * rows + column, k]).T, sums)
    sums = sums * alpha
    if ADDENDS > 0:
        sums += beta * s.load([batch * rows + row, column]).to(tl.float32)
    if ADDENDS > 1:
        sums += delta * t.load([batch * rows + row, column]).to(tl.float32)
    if IDENTITY:
        at_row = row + tl.arange(0, BLOCK_ROWS)
        at_column = column + tl.arange(0, BLOCK_COLUMNS)
        sums += tl.where(at_row[:, None] == at_column[None, :], gamma, 0.0)
    if FACTORED:
        sums *= tl.load(factors + batch)
    if DROPPED > 0:
        # To nearest even with fewer bits than float16 has, on the bits of the float32.
        bits = sums.to(tl.int32, bitcast=True)
        bits = ((bits + (1 << (12 + DROPPED)) - 1 + ((bits >> (13 + DROPPED)) & 1)) >> (13 + DROPPED)) << (13 + DROPPED)
        out = tl.where(sums == sums, bits.to(tl.float32, bitcast=True), sums).to(c.dtype)
    else:
        out = sums.to(c.dtype)
    c.store([batch * rows + row, column], out)
    if j < r:
        c_mirrored.store([batch * rows + column, row], out.T)
    if LOSES:
        rest = ((sums - out.to(tl.float32)) * LOST).to(c.dtype)
        lost.store([batch * rows + row, column], rest)
        if j < r:
            lost_mirrored.store([batch * rows + column, row], rest.T)


@triton.jit
def _mirror(c, rows, BAND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    column = tl.program_id(1) * BLOCK
    if column // BAND < row // BAND:
        c += tl.program_id(2).to(tl.int64) * rows * rows
        along = tl.arange(0, BLOCK)
        block = tl.load(c + (row + along)[:, None] * rows + (column + along)[None, :])
        tl.store(c + (column + along)[:, None] * rows + (row + along)[None, :], block.T)


def product(
    x: Tensor,
    y: Tensor,
    out_BMM: Tensor,
    transposed: bool,
    alpha: float,
    addends: Sequence[tuple[Tensor, float]],
    gamma: float,
    lost_BMM: Tensor | None,
    factors_B: Tensor | None = None,
    dropped: int = 0,
    *,
    columns: int,
    stages: int,
    warps: int,
) -> None:
    """As `reference.symmetric_product`, for contiguous float16 or bfloat16 tensors with M a multiple of `columns` and K of 64, and two addends at most."""
    batch, rows = out_BMM.shape[0], out_BMM.shape[-1]
    depth = x.shape[1] if transposed else x.shape[2]
    blocks = rows // columns
    tiles = blocks * (blocks + 1) // 2 * (columns // ROWS)
    operand = [DEPTH, ROWS] if transposed else [ROWS, DEPTH]
    other = [DEPTH, columns] if transposed else [columns, DEPTH]
    straight, mirrored = [ROWS, columns], [columns, ROWS]
    out, out_mirrored = _descriptor(out_BMM, straight), _descriptor(out_BMM, mirrored)
    added = [_descriptor(addend_BMM, straight) for addend_BMM, _ in addends] + [out, out]
    weights = [weight for _, weight in addends] + [0.0, 0.0]
    rest = [out, out_mirrored] if lost_BMM is None else [_descriptor(lost_BMM, straight), _descriptor(lost_BMM, mirrored)]
    _product[(tiles * batch,)](
        _descriptor(x, operand),
        _descriptor(y, other),
        *added[:2],
        out,
        out_mirrored,
        *rest,
        out_BMM if factors_B is None else factors_B,
        rows,
        tiles,
        alpha,
        *weights[:2],
        gamma,
        SUMMED=depth,
        TRANSPOSED=transposed,
        ADDENDS=len(addends),
        IDENTITY=gamma != 0.0,
        LOSES=lost_BMM is not None,
        LOST=LOST,
        FACTORED=factors_B is not None,
        DROPPED=dropped,
        BLOCK_ROWS=ROWS,
        BLOCK_COLUMNS=columns,
        BLOCK_DEPTH=DEPTH,
        num_stages=stages,
        num_warps=warps,
    )


def mirror(matrices_BMM: Tensor, band: int) -> None:
    """Copy what lies left of each diagonal block of `band` rows above the diagonal, transposed, in place. M and `band` are multiples of 64."""
    batch, rows = matrices_BMM.shape[0], matrices_BMM.shape[-1]
    _mirror[(rows // MIRRORED, rows // MIRRORED, batch)](matrices_BMM, rows, BAND=band, BLOCK=MIRRORED, num_warps=4)


def _descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """A view of [B, rows, columns] as one matrix, read or written in blocks."""
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), block)
