"""Symmetric products by tiles in Triton, and the mirror that vendor products need. B matrices, M rows and columns, K summed.

    C = f (alpha X Y^T + beta S + delta T + gamma I),  C known to be symmetric, f a matrix's own number;  L = LOST (C - rounded(C))

A program computes one tile that touches the lower triangle and stores it twice, the second time transposed: column block j (of `columns`) pairs with row
block i (of 128) where j <= i // (columns / 128). Blocks of 128 on the diagonal hold both of their halves themselves. Of the two wide tiles (of 256) that meet it in one column block,
the upper is computed in its left half alone, and the right half is the lower one's left half, transposed.
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
def _sums(
    x, y, batch, row, column, rows, alpha,
    SUMMED: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """alpha X Y^T of one tile, or alpha X^T Y."""
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for k in range(0, SUMMED, BLOCK_DEPTH):
        if TRANSPOSED:
            sums = tl.dot(x.load([batch * SUMMED + k, row]).T, y.load([batch * SUMMED + k, column]), sums)
        else:
            sums = tl.dot(x.load([batch * rows + row, k]), y.load([batch * rows + column, k]).T, sums)
    return sums * alpha


@triton.jit
def _finished(
    sums, factors, batch, row, column, gamma, IDENTITY: tl.constexpr, FACTORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """With the identity and the factor."""
    if IDENTITY:
        at_row = row + tl.arange(0, BLOCK_ROWS)
        at_column = column + tl.arange(0, BLOCK_COLUMNS)
        sums += tl.where(at_row[:, None] == at_column[None, :], gamma, 0.0)
    if FACTORED:
        sums *= tl.load(factors + batch)
    return sums


@triton.jit
def _stored(sums, dtype: tl.constexpr, DROPPED: tl.constexpr):
    """As float16, to nearest even with `DROPPED` bits fewer."""
    if DROPPED > 0:
        bits = sums.to(tl.int32, bitcast=True)
        bits = ((bits + (1 << (12 + DROPPED)) - 1 + ((bits >> (13 + DROPPED)) & 1)) >> (13 + DROPPED)) << (13 + DROPPED)
        out = tl.where(sums == sums, bits.to(tl.float32, bitcast=True), sums).to(dtype)
    else:
        out = sums.to(dtype)
    return out


@triton.jit
def _rest(sums, out, LOST: tl.constexpr):
    """What rounding took off `out`."""
    return ((sums - out.to(tl.float32)) * LOST).to(out.dtype)


@triton.jit
def _whole_tile(
    x, y, s, t, c, c_mirrored, lost, lost_mirrored, c_plain, lost_plain, factors, batch, row, column, below, rows, alpha, beta, delta, gamma,
    SUMMED: tl.constexpr, TRANSPOSED: tl.constexpr, ADDENDS: tl.constexpr, IDENTITY: tl.constexpr, LOSES: tl.constexpr, LOST: tl.constexpr,
    FACTORED: tl.constexpr, DROPPED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """`below`: it does not touch the diagonal. A wide one that does is the lower of two, whose left half is below."""
    sums = _sums(x, y, batch, row, column, rows, alpha, SUMMED, TRANSPOSED, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH)
    at = batch * rows + row
    if ADDENDS > 0:
        sums += beta * s.load([at, column]).to(tl.float32)
    if ADDENDS > 1:
        sums += delta * t.load([at, column]).to(tl.float32)
    sums = _finished(sums, factors, batch, row, column, gamma, IDENTITY, FACTORED, BLOCK_ROWS, BLOCK_COLUMNS)
    out = _stored(sums, c.dtype, DROPPED)
    c.store([at, column], out)
    if LOSES:
        lost.store([at, column], _rest(sums, out, LOST))
    if below:
        c_mirrored.store([batch * rows + column, row], out.T)
        if LOSES:
            lost_mirrored.store([batch * rows + column, row], _rest(sums, out, LOST).T)
    elif BLOCK_COLUMNS > BLOCK_ROWS:
        of_row, of_column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
        mirrored = batch.to(tl.int64) * rows * rows + (column + of_column)[:, None] * rows + (row + of_row)[None, :]
        tl.store(c_plain + mirrored, out.T, mask=(of_column < BLOCK_ROWS)[:, None])
        if LOSES:
            tl.store(lost_plain + mirrored, _rest(sums, out, LOST).T, mask=(of_column < BLOCK_ROWS)[:, None])


@triton.jit
def _half_tile(
    x, y, s_plain, t_plain, c_plain, lost_plain, factors, batch, row, column, rows, alpha, beta, delta, gamma,
    SUMMED: tl.constexpr, TRANSPOSED: tl.constexpr, ADDENDS: tl.constexpr, IDENTITY: tl.constexpr, LOSES: tl.constexpr, LOST: tl.constexpr,
    FACTORED: tl.constexpr, DROPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """A square block on the diagonal."""
    sums = _sums(x, y, batch, row, column, rows, alpha, SUMMED, TRANSPOSED, BLOCK, BLOCK, BLOCK_DEPTH)
    along = tl.arange(0, BLOCK)
    at = batch.to(tl.int64) * rows * rows + (row + along)[:, None] * rows + (column + along)[None, :]
    if ADDENDS > 0:
        sums += beta * tl.load(s_plain + at).to(tl.float32)
    if ADDENDS > 1:
        sums += delta * tl.load(t_plain + at).to(tl.float32)
    sums = _finished(sums, factors, batch, row, column, gamma, IDENTITY, FACTORED, BLOCK, BLOCK)
    out = _stored(sums, c_plain.dtype.element_ty, DROPPED)
    tl.store(c_plain + at, out)
    if LOSES:
        tl.store(lost_plain + at, _rest(sums, out, LOST))


@triton.jit
def _product(
    x,
    y,
    y_narrow,
    s,
    t,
    c,
    c_mirrored,
    lost,
    lost_mirrored,
    s_plain,
    t_plain,
    c_plain,
    lost_plain,
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
    if RATIO == 2 and row == column:
        _half_tile(
            x, y_narrow, s_plain, t_plain, c_plain, lost_plain, factors, batch, row, column, rows, alpha, beta, delta, gamma,
            SUMMED, TRANSPOSED, ADDENDS, IDENTITY, LOSES, LOST, FACTORED, DROPPED, BLOCK_ROWS, BLOCK_DEPTH,
        )  # fmt: skip
    else:
        _whole_tile(
            x, y, s, t, c, c_mirrored, lost, lost_mirrored, c_plain, lost_plain, factors, batch, row, column, j < r, rows,
            alpha, beta, delta, gamma,
            SUMMED, TRANSPOSED, ADDENDS, IDENTITY, LOSES, LOST, FACTORED, DROPPED, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH,
        )  # fmt: skip


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
    plain = [addend_BMM for addend_BMM, _ in addends] + [out_BMM, out_BMM]
    _product[(tiles * batch,)](
        _descriptor(x, operand),
        _descriptor(y, other),
        _descriptor(y, operand),
        *added[:2],
        out,
        out_mirrored,
        *rest,
        *plain[:2],
        out_BMM,
        out_BMM if lost_BMM is None else lost_BMM,
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
