"""Gradients of the gated delta rule's inputs, chunk by chunk at once, from what tokens write, the states before and the gradients of the states behind each chunk; in Triton.

With x = beta (v - k S), n = T x, y = q S + P n and S' = e^(sum of decays) S + k^T n, rows times their factors:

    dx = T^T dn;   dv = beta dx;   dP = dy n^T, j <= i;   dA = -dx n^T, j < i        (T is solved, and never differentiated by itself)
    dq = dy S^T + dP-part k;   dk = beta reads + writes, with reads = dA-part k - dx S^T and writes = n dS'^T + dP-part^T q + (beta dA-part)^T k

A token's beta is given reads . k + dx . v; a sum of decays G_i what its row gives in y and as a key that reads (dq . q + beta reads . k), less what it takes as a key that is written (writes . k).
n is of the forward pass and dx of the one back along the states: products have both of their factors in memory, rows are scaled after them, and few sums are held at a time: at keys
of 128 one program of 8 warps has all of a multiprocessor's registers. Lengths of queries and keys are differentiated where whole rows are at hand.

dP and dA are made twice, by rows and by columns, and not turned: Triton 3.4 to 3.7.0 on Hopper hands a turned result to the next product in registers that are in use again (wrong keys' gradients).
"""

from __future__ import annotations

import triton
import triton.language as tl

from intarsia_kernels.delta_rule.prepare import LOWEST, decays_between, limit_of, places, rows_of
from intarsia_kernels.delta_rule.recurrence import chunk_columns, factor, left_of, state_rows


@triton.jit
def _put(pointer, place, inside, x, dx, inverse, radial, K: tl.constexpr, NORMALISE: tl.constexpr):
    """Writes a gradient [C, K]. `dx` is that of x / |x|, divided by |x|; `radial` the sums of x dx."""
    if NORMALISE:
        dx -= x.to(tl.float32) * (inverse * inverse * radial)[:, None]
    tl.store(pointer + place[:, None] * K + tl.arange(0, K)[None, :], dx.to(pointer.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _powers(
    factors_pointer, decay_pointer, ordinals_pointer, chunk, at, place, real, k_inverse,
    C: tl.constexpr, DOCUMENTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """e^D over the lengths of keys [C, C]: by rows of tokens that see, and by rows of those that are seen."""
    sums = factor(factors_pointer, at, 0, C)
    decay = sums
    if EXACT:
        decay = tl.maximum(tl.load(decay_pointer + place, mask=real, other=0.0).to(tl.float32), LOWEST)
    same = tl.full([C, C], 1, dtype=tl.int1)
    if DOCUMENTS:
        ordinal = tl.load(ordinals_pointer + chunk.to(tl.int64) * C + tl.arange(0, C))
        same = ordinal[:, None] == ordinal[None, :]
    power = decays_between(decay, sums, same, C, EXACT) * k_inverse[None, :]
    return power, decays_between(decay, sums, same, C, EXACT, True) * k_inverse[:, None]


@triton.jit(do_not_specialize=["tokens", "chunks"])
def gradients_kernel(
    dy_pointer, dx_pointer, new_pointer, q_pointer, k_pointer, v_pointer, decay_pointer, factors_pointer, ordinals_pointer,
    counts_pointer, states_pointer, dstates_pointer, dq_pointer, dk_pointer, ddecay_pointer, dbeta_pointer,
    tokens, chunks, heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, NORMALISE: tl.constexpr, DOCUMENTS: tl.constexpr,
    COUNTS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for each chunk and head."""
    scale = tl.cast(scale, tl.float32)  # a compiler hands over numbers of Python in float64
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = chunk // chunks
    start = (chunk - row * chunks) * C
    limit = limit_of(counts_pointer, row, tokens, COUNTS)
    token, place = start + tl.arange(0, C), places(row, start, head, tokens, heads, C)
    real, inside = token < limit, token < tokens
    at = chunk.to(tl.int64) * heads + head
    dtype = k_pointer.dtype.element_ty
    below = tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :]
    above = tl.arange(0, C)[:, None] < tl.arange(0, C)[None, :]

    # What queries take from the state, and from what tokens of the chunk write.
    dq, dscores, turned = tl.zeros([C, K], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for column in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        dy = rows_of(dy_pointer, place, real, V, BLOCK_V, column)
        new_VC = tl.load(chunk_columns(new_pointer, at, column, V, C, BLOCK_V))
        dq = tl.dot(dy, tl.load(state_rows(states_pointer, at, column, K, V, BLOCK_V)), dq, input_precision=PRECISION)
        dscores = tl.dot(dy, new_VC, dscores, input_precision=PRECISION)
        turned = tl.dot(tl.trans(new_VC), tl.trans(dy), turned, input_precision=PRECISION)
    q_inverse, k_inverse = factor(factors_pointer, at, 4, C), factor(factors_pointer, at, 5, C)
    power, power_turned = _powers(
        factors_pointer, decay_pointer, ordinals_pointer, chunk, at, place, real, k_inverse, C, DOCUMENTS, EXACT
    )  # fmt: skip
    scores = (dscores * power * (q_inverse * scale)[:, None]).to(dtype)
    turned_scores = (turned * power_turned * (q_inverse * scale)[None, :]).to(dtype)
    q, k = rows_of(q_pointer, place, real, K, K, 0), rows_of(k_pointer, place, real, K, K, 0)
    dq = tl.dot(scores, k, dq * factor(factors_pointer, at, 1, C)[:, None], input_precision=PRECISION)
    radial = tl.sum(q.to(tl.float32) * dq, axis=1)
    dsums = radial
    _put(dq_pointer, place, inside, q, dq, q_inverse, radial, K, NORMALISE)

    # What keys take that read, and the values that tokens miss. Rows are read again where they are used: registers are short.
    reads, mixed, turned = tl.zeros([C, K], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    missed = tl.zeros([C, BLOCK_V], dtype=tl.float32)
    for column in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        dx_VC = tl.load(chunk_columns(dx_pointer, at, column, V, C, BLOCK_V))
        new_VC = tl.load(chunk_columns(new_pointer, at, column, V, C, BLOCK_V))
        reads = tl.dot(tl.trans(dx_VC), tl.load(state_rows(states_pointer, at, column, K, V, BLOCK_V)), reads, input_precision=PRECISION)
        mixed = tl.dot(tl.trans(dx_VC), new_VC, mixed, input_precision=PRECISION)
        turned = tl.dot(tl.trans(new_VC), dx_VC, turned, input_precision=PRECISION)
        v = rows_of(v_pointer, place, real, V, BLOCK_V, column)
        missed += tl.trans(dx_VC).to(tl.float32) * v.to(tl.float32)
    k = rows_of(k_pointer, place, real, K, K, 0)
    beta = factor(factors_pointer, at, 6, C)
    mixed = tl.where(below, mixed * power * -k_inverse[:, None], 0.0)
    turned_mixed = tl.where(above, turned * power_turned * -(k_inverse * beta)[None, :], 0.0).to(dtype)
    reads = tl.dot(mixed.to(dtype), k, reads * -factor(factors_pointer, at, 2, C)[:, None], input_precision=PRECISION)
    given = tl.sum(k.to(tl.float32) * reads, axis=1)
    tl.store(dbeta_pointer + place, tl.where(real, tl.sum(missed, axis=1) + given, 0.0), mask=inside)
    dsums += beta * given
    reads *= beta[:, None]

    # What keys take that write.
    writes, left = tl.zeros([C, K], dtype=tl.float32), tl.zeros([BLOCK_V, K], dtype=tl.float32)
    for column in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        dstate_VK = tl.load(state_rows(dstates_pointer, at, column, K, V, BLOCK_V))
        state_VK = tl.load(state_rows(states_pointer, at, column, K, V, BLOCK_V))
        new_CV = tl.trans(tl.load(chunk_columns(new_pointer, at, column, V, C, BLOCK_V)))
        writes = tl.dot(new_CV, dstate_VK, writes, input_precision=PRECISION)
        left += state_VK.to(tl.float32) * dstate_VK.to(tl.float32)
    k = rows_of(k_pointer, place, real, K, K, 0)
    writes *= factor(factors_pointer, at, 3, C)[:, None]
    dtotal = tl.sum(k.to(tl.float32) * writes) + left_of(factors_pointer, at, C) * tl.sum(left)
    writes = tl.dot(turned_mixed, k, writes, input_precision=PRECISION)
    writes = tl.dot(turned_scores, rows_of(q_pointer, place, real, K, K, 0), writes, input_precision=PRECISION)
    taken = tl.sum(k.to(tl.float32) * writes, axis=1)
    dsums += tl.where(tl.arange(0, C) == C - 1, dtotal, 0.0) - taken
    tl.store(ddecay_pointer + place, tl.where(real, tl.cumsum(dsums, axis=0, reverse=True), 0.0), mask=inside)
    _put(dk_pointer, place, inside, k, reads + writes, k_inverse, beta * given + taken, K, NORMALISE)
