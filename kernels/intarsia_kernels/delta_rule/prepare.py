"""What the gated delta rule needs of each chunk before any state is known, in Triton.

Rows are cut into chunks of C tokens wherever documents begin; what would cross a document's border is masked. For each chunk and head, D_ij the sum of the decays of j < l <= i, a and b one over
the lengths of q and k:

    P_ij = scale a_i b_j (q_i . k_j) e^D_ij, j <= i;      T = (I + A)^-1,  A_ij = beta_i b_i b_j (k_i . k_j) e^D_ij, j < i

T in float32, from blocks of 1 token to blocks of 16, each twice as wide as those before it (X <- X - X A' X, A' what joins two blocks), then by substitution over blocks of 16: as stable as solving
row by row, which powers of A are not. Queries and keys are not rescaled: their lengths are factors of rows, which products leave to float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-110.0)
"""A decay below it leaves nothing in float32, and a sum with such a number in it would lose the others."""
FACTORS: tl.constexpr = tl.constexpr(9)
"""Rows of C factors that are kept of each chunk and head: the decays summed from its start; what multiplies queries that read the state before it (`scale` too), keys that read it, keys that
write the state behind it; 1 / |q|; 1 / |k|; beta; beta times what multiplies keys that read; what is left at the chunk's end of the state before it."""


@triton.jit
def limit_of(counts_pointer, row, tokens, COUNTS: tl.constexpr):
    """How many of a row's tokens are real."""
    limit = tokens
    if COUNTS:
        limit = tl.minimum(tl.load(counts_pointer + row), tokens).to(tl.int32)
    return limit


@triton.jit
def places(row, start, head, tokens, heads, C: tl.constexpr):
    """Where the C tokens from `start` stand in a tensor [B, S, H], 64 bits."""
    return (row.to(tl.int64) * tokens + start + tl.arange(0, C)) * heads + head


@triton.jit
def rows_of(pointer, place, mask, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, first):
    """COLUMNS columns from `first` of the rows at `place` of a tensor [B, S, H, WIDTH]; zeros where masked."""
    return tl.load(pointer + place[:, None] * WIDTH + first + tl.arange(0, COLUMNS)[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def decays_between(decay, sums, same, C: tl.constexpr, EXACT: tl.constexpr, TURNED: tl.constexpr = False):
    """e^D [C, C]: 0 where token i does not see j; j by rows where TURNED. Exactly: D summed pair by pair and not the difference of two sums."""
    if TURNED:
        i, j, at_i, at_j = tl.arange(0, C)[None, :], tl.arange(0, C)[:, None], sums[None, :], sums[:, None]
        step = decay[None, :]
    else:
        i, j, at_i, at_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], sums[:, None], sums[None, :]
        step = decay[:, None]
    if EXACT:
        between = tl.cumsum(tl.where(i > j, step + tl.zeros([C, C], dtype=tl.float32), 0.0), axis=1 if TURNED else 0)
    else:
        between = at_i - at_j
    return tl.exp(tl.where((i >= j) & same, between, float("-inf")))


@triton.jit
def _pairs(x, N: tl.constexpr, M: tl.constexpr):
    """What stands at even and at odd places of the first dimension of [N, M, M]."""
    return tl.split(tl.permute(tl.reshape(x, [N // 2, 2, M, M]), (0, 2, 3, 1)))


@triton.jit
def _inverse_blocks(a, BLOCKS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of strictly lower blocks [BLOCKS, 16, 16]."""
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    x = tl.where(i == j, 1.0, tl.where((i % 2 == 1) & (j == i - 1), -a, 0.0))
    for level in tl.static_range(1, 4):
        above, before = i >> level, j >> level
        joins = tl.where((above % 2 == 1) & (before == above - 1), a, 0.0)
        x -= tl.dot(tl.dot(x, joins, input_precision=PRECISION), x, input_precision=PRECISION)
    return x


@triton.jit
def _whole(x0, x10, x1, N: tl.constexpr, M: tl.constexpr):
    """[[x0, 0], [x10, x1]], [N, 2 M, 2 M], of parts [N, M, M]."""
    left, right = tl.join(x0, x10), tl.join(tl.zeros([N, M, M], dtype=tl.float32), x1)
    return tl.reshape(tl.permute(tl.join(left, right), (0, 3, 1, 4, 2)), [N, 2 * M, 2 * M])


@triton.jit
def _put(pointer, block, i: tl.constexpr, j: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """Writes a block of N x N into a matrix of C x C at (i, j)."""
    rows, columns = i + tl.arange(0, N), j + tl.arange(0, N)
    tl.store(pointer + rows[:, None] * C + columns[None, :], block.to(pointer.dtype.element_ty))


@triton.jit
def _put_inverse(pointer, a, C: tl.constexpr, PRECISION: tl.constexpr):
    """Writes (I + A)^-1 of a strictly lower A [C, C]."""
    BLOCKS: tl.constexpr = C // 16
    blocks = tl.permute(tl.reshape(a, [BLOCKS, 16, BLOCKS, 16]), (0, 2, 1, 3))
    row, column = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, :, None, None]
    x0, x1 = _pairs(_inverse_blocks(tl.sum(tl.where(row == column, blocks, 0.0), axis=1), BLOCKS, PRECISION), BLOCKS, 16)
    _, joins = _pairs(tl.sum(tl.where((row % 2 == 1) & (column == row - 1), blocks, 0.0), axis=1), BLOCKS, 16)
    x10 = -tl.dot(tl.dot(x1, joins, input_precision=PRECISION), x0, input_precision=PRECISION)
    x = _whole(x0, x10, x1, BLOCKS // 2, 16)
    if C == 32:
        _put(pointer, tl.reshape(x, [32, 32]), 0, 0, C, 32)
    else:
        upper, lower = _pairs(x, 2, 32)
        upper, lower = tl.reshape(upper, [32, 32]), tl.reshape(lower, [32, 32])
        left, _ = tl.split(tl.permute(tl.reshape(a, [2, 32, 2, 32]), (1, 3, 0, 2)))
        _, joins = tl.split(left)
        _put(pointer, upper, 0, 0, C, 32)
        _put(pointer, tl.zeros([32, 32], dtype=tl.float32), 0, 32, C, 32)
        _put(pointer, -tl.dot(tl.dot(lower, joins, input_precision=PRECISION), upper, input_precision=PRECISION), 32, 0, C, 32)
        _put(pointer, lower, 32, 32, C, 32)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def prepare_kernel(
    q_pointer, k_pointer, decay_pointer, beta_pointer, documents_pointer, counts_pointer,
    solved_pointer, scores_pointer, factors_pointer, ordinals_pointer, borders_pointer, tokens, chunks, heads, scale, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, C: tl.constexpr, NORMALISE: tl.constexpr, DOCUMENTS: tl.constexpr, COUNTS: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for each chunk and head: T and P [N of all rows, H, C, C], factors [N, H, FACTORS, C] float32; where there are documents, which one of the chunk's each token is of, counted
    from that which enters, [N, C] int32, and borders [N, 2] int32: how many tokens are of that one, and from which on they are of that which goes on."""
    # Compilers hand over numbers of Python in float64.
    scale, eps = tl.cast(scale, tl.float32), tl.cast(eps, tl.float32)
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = chunk // chunks
    start = (chunk - row * chunks) * C
    limit = limit_of(counts_pointer, row, tokens, COUNTS)
    token, place = start + tl.arange(0, C), places(row, start, head, tokens, heads, C)
    real = token < limit
    at = chunk.to(tl.int64) * heads + head

    decay = tl.maximum(tl.load(decay_pointer + place, mask=real, other=0.0).to(tl.float32), LOWEST)
    beta = tl.load(beta_pointer + place, mask=real, other=0.0).to(tl.float32)
    sums = tl.cumsum(decay, axis=0)
    total = tl.sum(decay, axis=0)
    same = tl.full([C, C], 1, dtype=tl.int1)
    # From the chunk's end, and not as the difference of two sums.
    entering, leaving, left = tl.exp(sums), tl.exp(tl.cumsum(decay, axis=0, reverse=True) - decay), tl.exp(total)
    if DOCUMENTS:
        flat = row.to(tl.int64) * tokens + token
        inside = real & (token > 0)
        begins = tl.load(documents_pointer + flat, mask=inside, other=0) != tl.load(documents_pointer + flat - 1, mask=inside, other=0)
        ordinal = tl.cumsum(begins.to(tl.int32), axis=0)
        last = tl.max(ordinal, axis=0)
        same = ordinal[:, None] == ordinal[None, :]
        entering, leaving = tl.where(ordinal == 0, entering, 0.0), tl.where(ordinal == last, leaving, 0.0)
        left = tl.where(last == 0, left, 0.0)
        if head == 0:
            tl.store(ordinals_pointer + chunk.to(tl.int64) * C + tl.arange(0, C), ordinal)
            tl.store(borders_pointer + 2 * chunk, tl.sum((ordinal == 0).to(tl.int32), axis=0))
            tl.store(borders_pointer + 2 * chunk + 1, tl.sum((ordinal != last).to(tl.int32), axis=0))

    qk, kk = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    q_square, k_square = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        q, k = rows_of(q_pointer, place, real, K, BLOCK_K, first), rows_of(k_pointer, place, real, K, BLOCK_K, first)
        qk = tl.dot(q, tl.trans(k), qk, input_precision=PRECISION)
        kk = tl.dot(k, tl.trans(k), kk, input_precision=PRECISION)
        if NORMALISE:
            q, k = q.to(tl.float32), k.to(tl.float32)
            q_square += tl.sum(q * q, axis=1)
            k_square += tl.sum(k * k, axis=1)
    q_inverse, k_inverse = tl.full([C], 1.0, dtype=tl.float32), tl.full([C], 1.0, dtype=tl.float32)
    if NORMALISE:
        q_inverse, k_inverse = 1.0 / tl.sqrt(q_square + eps), 1.0 / tl.sqrt(k_square + eps)

    factors = factors_pointer + at * FACTORS * C + tl.arange(0, C)
    tl.store(factors, sums)
    tl.store(factors + C, entering * q_inverse * scale)
    tl.store(factors + 2 * C, entering * k_inverse)
    tl.store(factors + 3 * C, leaving * k_inverse)
    tl.store(factors + 4 * C, q_inverse)
    tl.store(factors + 5 * C, k_inverse)
    tl.store(factors + 6 * C, beta)
    tl.store(factors + 7 * C, beta * entering * k_inverse)
    tl.store(factors + 8 * C, left + tl.zeros([C], dtype=tl.float32))

    power = decays_between(decay, sums, same, C, EXACT) * k_inverse[None, :]
    _put(scores_pointer + at * C * C, qk * power * (q_inverse * scale)[:, None], 0, 0, C, C)
    a = tl.where(tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :], kk * power * (beta * k_inverse)[:, None], 0.0)
    _put_inverse(solved_pointer + at * C * C, a, C, PRECISION)
