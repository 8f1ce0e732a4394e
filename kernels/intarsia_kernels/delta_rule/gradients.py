"""Gradients of the gated delta rule's inputs, chunk by chunk at once, from the states before and the gradients of the states behind each chunk; in Triton.

With x = beta (v - k S), n = T x, y = q S + P n and S' = e^(sum of decays) S + k^T n, rows times their factors:

    dx = T^T dn;   dv = beta dx;   dP = dy n^T, j <= i;   dA = -dx n^T, j < i        (T is solved, and never differentiated by itself)
    dq = dy S^T + dP-part k;   dk = n dS'^T - dv S^T + dP-part^T q + (dA-part + dA-part^T) k

and of a sum of decays G_i: what its row gives in y, less what it takes as a key. Lengths of queries and keys are differentiated at the end, where whole rows are at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from intarsia_kernels.delta_rule.prepare import LOWEST, decays_between, limit_of, places, rows_of
from intarsia_kernels.delta_rule.recurrence import carried, factor, square, state_block


@triton.jit
def _of_lengths(x, dx, inverse):
    """The gradient of x from that of x / |x|, given as `dx` = (gradient) / |x|."""
    x = x.to(tl.float32)
    return dx - x * (inverse * inverse * tl.sum(x * dx, axis=1))[:, None]


@triton.jit(do_not_specialize=["tokens", "chunks"])
def gradients_kernel(
    dy_pointer, dnew_pointer, q_pointer, k_pointer, v_pointer, decay_pointer, solved_pointer, factors_pointer, ordinals_pointer,
    borders_pointer, counts_pointer, states_pointer, dstates_pointer, dq_pointer, dk_pointer, dv_pointer, ddecay_pointer, dbeta_pointer,
    tokens, chunks, heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, NORMALISE: tl.constexpr, DOCUMENTS: tl.constexpr,
    COUNTS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for each chunk and head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = chunk // chunks
    start = (chunk - row * chunks) * C
    limit = limit_of(counts_pointer, row, tokens, COUNTS)
    token, place = start + tl.arange(0, C), places(row, start, head, tokens, heads, C)
    real = token < limit
    at = chunk.to(tl.int64) * heads + head
    dtype = q_pointer.dtype.element_ty
    q, k = rows_of(q_pointer, place, real, K, K, 0), rows_of(k_pointer, place, real, K, K, 0)
    solved = square(solved_pointer, at, C)
    reads_q, reads_k, writes_k = factor(factors_pointer, at, 1, C), factor(factors_pointer, at, 2, C), factor(factors_pointer, at, 3, C)
    beta = factor(factors_pointer, at, 6, C)

    dq, dk = tl.zeros([C, K], dtype=tl.float32), tl.zeros([C, K], dtype=tl.float32)
    dscores, dmixed = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    dbeta, given = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    dcarried = tl.zeros([], dtype=tl.float32)
    for column in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        state = tl.load(state_block(states_pointer, at, column, K, V, BLOCK_V))
        dstate = tl.load(state_block(dstates_pointer, at, column, K, V, BLOCK_V))
        v, dy = rows_of(v_pointer, place, real, V, BLOCK_V, column), rows_of(dy_pointer, place, real, V, BLOCK_V, column)
        dnew = rows_of(dnew_pointer, place, real, V, BLOCK_V, column)
        held = tl.dot(k, state, input_precision=PRECISION)
        missing = v - reads_k[:, None] * held
        new = tl.dot(solved, (missing * beta[:, None]).to(dtype), input_precision=PRECISION)
        dx = tl.dot(tl.trans(solved), dnew, input_precision=PRECISION)
        dv = dx * beta[:, None]
        to = dv_pointer + place[:, None] * V + (column + tl.arange(0, BLOCK_V))[None, :]
        tl.store(to, dv.to(dtype), mask=(token < tokens)[:, None])
        dbeta += tl.sum(dx * missing, axis=1)
        read = (dv * reads_k[:, None]).to(dtype)
        given -= tl.sum(read.to(tl.float32) * held, axis=1)
        dcarried += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
        dscores = tl.dot(dy, tl.trans(new.to(dtype)), dscores, input_precision=PRECISION)
        dmixed = tl.dot(dx.to(dtype), tl.trans(new.to(dtype)), dmixed, input_precision=PRECISION)
        dq = tl.dot((dy * reads_q[:, None]).to(dtype), tl.trans(state), dq, input_precision=PRECISION)
        dk = tl.dot((new * writes_k[:, None]).to(dtype), tl.trans(dstate), dk, input_precision=PRECISION)
        dk = tl.dot(-read, tl.trans(state), dk, input_precision=PRECISION)

    # Of sums of decays: what rows that read the state before give; what writes the state behind takes, and gives to the sum of all.
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    taken = tl.sum(wide_k * dk, axis=1) - given
    dsums = tl.sum(wide_q * dq, axis=1) + given - taken
    left = carried(factors_pointer, borders_pointer, chunk, at, C, DOCUMENTS)
    dtotal = tl.sum(taken, axis=0) + left * dcarried

    q_inverse, k_inverse = factor(factors_pointer, at, 4, C), factor(factors_pointer, at, 5, C)
    decay = tl.maximum(tl.load(decay_pointer + place, mask=real, other=0.0).to(tl.float32), LOWEST)
    same = tl.full([C, C], 1, dtype=tl.int1)
    if DOCUMENTS:
        ordinal = tl.load(ordinals_pointer + chunk.to(tl.int64) * C + tl.arange(0, C))
        same = ordinal[:, None] == ordinal[None, :]
    power = decays_between(decay, factor(factors_pointer, at, 0, C), same, C, EXACT) * k_inverse[None, :]
    dscores *= power * (q_inverse * scale)[:, None]
    pairs = dscores * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dmixed *= tl.where(tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :], -power, 0.0) * k_inverse[:, None]
    mixed = dmixed * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    dbeta += tl.sum(mixed, axis=1)
    pairs += mixed * beta[:, None]
    dsums += tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
    dsums += tl.where(tl.arange(0, C) == C - 1, dtotal, 0.0)
    narrow = token < tokens
    tl.store(ddecay_pointer + place, tl.where(real, tl.cumsum(dsums, axis=0, reverse=True), 0.0), mask=narrow)
    tl.store(dbeta_pointer + place, tl.where(real, dbeta, 0.0), mask=narrow)

    scores_b, mixed_b = dscores.to(dtype), (dmixed * beta[:, None]).to(dtype)
    dq = tl.dot(scores_b, k, dq, input_precision=PRECISION)
    if NORMALISE:
        dq = _of_lengths(q, dq, q_inverse)
    columns = tl.arange(0, K)[None, :]
    tl.store(dq_pointer + place[:, None] * K + columns, dq.to(dtype), mask=narrow[:, None])
    dk = tl.dot(tl.trans(scores_b), q, dk, input_precision=PRECISION)
    dk = tl.dot(mixed_b, k, dk, input_precision=PRECISION)
    dk = tl.dot(tl.trans(mixed_b), k, dk, input_precision=PRECISION)
    if NORMALISE:
        dk = _of_lengths(k, dk, k_inverse)
    tl.store(dk_pointer + place[:, None] * K + columns, dk.to(dtype), mask=narrow[:, None])
