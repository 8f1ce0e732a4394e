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
from intarsia_kernels.delta_rule.recurrence import factor, left_of, square, state_rows


@triton.jit
def _put(pointer, place, inside, x, dx_KC, inverse, radial, K: tl.constexpr, NORMALISE: tl.constexpr):
    """Writes a gradient. `dx_KC` is that of x / |x|, divided by |x|, columns are tokens; `radial` the sums of x dx."""
    if NORMALISE:
        dx_KC -= tl.trans(x).to(tl.float32) * (inverse * inverse * radial)[None, :]
    to = pointer + place[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(to, tl.trans(dx_KC.to(pointer.dtype.element_ty)), mask=inside[:, None])


@triton.jit
def _column(
    k, solved, state_VK, dstate_VK, v, dy, dnew_VC, reads_q, reads_k, writes_k, beta, dq_KC, dk_KC, dscores, dsolved, dbeta, given,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What some columns of values add to all gradients; and dv. Of `given`: what keys that read the state before give to sums of decays."""
    dtype = k.dtype
    held = tl.dot(k, tl.trans(state_VK), input_precision=PRECISION)
    missing = v - reads_k[:, None] * held
    new = tl.dot(solved, (missing * beta[:, None]).to(dtype), input_precision=PRECISION)
    dx = tl.dot(tl.trans(solved), tl.trans(dnew_VC), input_precision=PRECISION)
    dbeta += tl.sum(dx * missing, axis=1)
    narrow = tl.trans(new.to(dtype))
    dscores = tl.dot(dy, narrow, dscores, input_precision=PRECISION)
    dsolved = tl.dot(tl.trans(dnew_VC), narrow, dsolved, input_precision=PRECISION)
    dv = dx * beta[:, None]
    lost = (dv * -reads_k[:, None]).to(dtype)
    given += tl.sum(lost.to(tl.float32) * held, axis=1)
    # Transposed, so that what comes from memory is the left factor: what is computed here stands in shared memory once, as the right one.
    dq_KC = tl.dot(tl.trans(state_VK), tl.trans((dy * reads_q[:, None]).to(dtype)), dq_KC, input_precision=PRECISION)
    dk_KC = tl.dot(tl.trans(dstate_VK), tl.trans((new * writes_k[:, None]).to(dtype)), dk_KC, input_precision=PRECISION)
    dk_KC = tl.dot(tl.trans(state_VK), tl.trans(lost), dk_KC, input_precision=PRECISION)
    return dv.to(dtype), dq_KC, dk_KC, dscores, dsolved, dbeta, given


@triton.jit(do_not_specialize=["tokens", "chunks"])
def gradients_kernel(
    dy_pointer, dnew_pointer, q_pointer, k_pointer, v_pointer, decay_pointer, solved_pointer, factors_pointer, ordinals_pointer,
    counts_pointer, states_pointer, dstates_pointer, dq_pointer, dk_pointer, dv_pointer, ddecay_pointer, dbeta_pointer,
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
    k, solved = rows_of(k_pointer, place, real, K, K, 0), square(solved_pointer, at, C)
    reads_q, reads_k, writes_k = factor(factors_pointer, at, 1, C), factor(factors_pointer, at, 2, C), factor(factors_pointer, at, 3, C)
    beta = factor(factors_pointer, at, 6, C)
    dq_KC, dk_KC = tl.zeros([K, C], dtype=tl.float32), tl.zeros([K, C], dtype=tl.float32)
    dscores, dsolved = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    dbeta, given, dleft = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32), tl.zeros([K], dtype=tl.float32)
    for column in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        state_VK = tl.load(state_rows(states_pointer, at, column, K, V, BLOCK_V))
        dstate_VK = tl.load(state_rows(dstates_pointer, at, column, K, V, BLOCK_V))
        v, dy = rows_of(v_pointer, place, real, V, BLOCK_V, column), rows_of(dy_pointer, place, real, V, BLOCK_V, column)
        dnew_VC = tl.load(dnew_pointer + (at * V + column + tl.arange(0, BLOCK_V)[:, None]) * C + tl.arange(0, C)[None, :])
        dleft += tl.sum(state_VK.to(tl.float32) * dstate_VK.to(tl.float32), axis=0)
        dv, dq_KC, dk_KC, dscores, dsolved, dbeta, given = _column(
            k, solved, state_VK, dstate_VK, v, dy, dnew_VC, reads_q, reads_k, writes_k, beta, dq_KC, dk_KC, dscores, dsolved, dbeta, given, PRECISION
        )  # fmt: skip
        tl.store(dv_pointer + place[:, None] * V + (column + tl.arange(0, BLOCK_V))[None, :], dv, mask=inside[:, None])

    # Read again: registers are short in the loop.
    q, k = rows_of(q_pointer, place, real, K, K, 0), rows_of(k_pointer, place, real, K, K, 0)
    # Of sums of decays: what rows that read the state before give; what writes the state behind takes, and gives to the sum of all.
    radial_k = tl.sum(tl.trans(k).to(tl.float32) * dk_KC, axis=0)
    radial_q = tl.sum(tl.trans(q).to(tl.float32) * dq_KC, axis=0)
    taken = radial_k - given
    dtotal = tl.sum(taken, axis=0) + left_of(factors_pointer, at, C) * tl.sum(dleft, axis=0)
    dsums = radial_q + given - taken + tl.where(tl.arange(0, C) == C - 1, dtotal, 0.0)

    q_inverse, k_inverse = factor(factors_pointer, at, 4, C), factor(factors_pointer, at, 5, C)
    decay = tl.maximum(tl.load(decay_pointer + place, mask=real, other=0.0).to(tl.float32), LOWEST)
    same = tl.full([C, C], 1, dtype=tl.int1)
    if DOCUMENTS:
        ordinal = tl.load(ordinals_pointer + chunk.to(tl.int64) * C + tl.arange(0, C))
        same = ordinal[:, None] == ordinal[None, :]
    power = decays_between(decay, factor(factors_pointer, at, 0, C), same, C, EXACT) * k_inverse[None, :]
    scores = (dscores * power * (q_inverse * scale)[:, None]).to(k.dtype)
    pairs = scores.to(tl.float32) * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    by_row, by_column = tl.sum(pairs, axis=1), tl.sum(pairs, axis=0)
    dsums += by_row - by_column
    radial_k += by_column
    dq_KC = tl.dot(tl.trans(k), tl.trans(scores), dq_KC, input_precision=PRECISION)
    _put(dq_pointer, place, inside, q, dq_KC, q_inverse, radial_q + by_row, K, NORMALISE)
    dk_KC = tl.dot(tl.trans(q), scores, dk_KC, input_precision=PRECISION)

    dmixed = tl.dot(tl.trans(solved), dsolved.to(k.dtype), input_precision=PRECISION) * power * -k_inverse[:, None]
    dmixed = tl.where(tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :], dmixed, 0.0)
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    dbeta += tl.sum(dmixed * products, axis=1)
    mixed = (dmixed * beta[:, None]).to(k.dtype)
    pairs = mixed.to(tl.float32) * products
    by_row, by_column = tl.sum(pairs, axis=1), tl.sum(pairs, axis=0)
    dsums += by_row - by_column
    tl.store(ddecay_pointer + place, tl.where(real, tl.cumsum(dsums, axis=0, reverse=True), 0.0), mask=inside)
    tl.store(dbeta_pointer + place, tl.where(real, dbeta, 0.0), mask=inside)
    dk_KC = tl.dot(tl.trans(k), mixed, dk_KC, input_precision=PRECISION)
    dk_KC = tl.dot(tl.trans(k), tl.trans(mixed), dk_KC, input_precision=PRECISION)
    _put(dk_pointer, place, inside, k, dk_KC, k_inverse, radial_k + by_row + by_column, K, NORMALISE)
