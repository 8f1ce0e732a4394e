"""States from chunk to chunk of a run, and their gradients back again, in Triton. Chunk matrices T and P and the factors of rows as `prepare` leaves them.

    x = beta (v - k S);   n = T x;   y = q S + P n;   S <- e^(sum of decays) S + k^T n              (k, q times the factors of their rows)
    dn = P^T dy + k dS;   dx = T^T dn;   dS <- e^(sum of decays) dS + q^T dy - k^T (beta dx)

The values that a token writes (n) come from T, S and the inputs themselves: neither T (beta v) nor T (beta k) exists in memory, nor are they rounded. Outputs are made where the state already is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from intarsia_kernels.delta_rule.prepare import FACTORS, limit_of, places, rows_of
from intarsia_kernels.delta_rule.schedule import item_of, run_of


@triton.jit
def square(pointer, at, C: tl.constexpr):
    """A chunk's C x C."""
    return tl.load(pointer + at * C * C + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def factor(pointer, at, which: tl.constexpr, C: tl.constexpr):
    """One of a chunk's rows of factors."""
    return tl.load(pointer + (at * FACTORS + which) * C + tl.arange(0, C))


@triton.jit
def carried(factors_pointer, borders_pointer, chunk, at, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """What is left at a chunk's end of the state before it: nothing if a document begins in it."""
    left = tl.exp(tl.load(factors_pointer + at * FACTORS * C + C - 1))
    if DOCUMENTS:
        left = tl.where(tl.load(borders_pointer + 2 * chunk) == C, left, 0.0)
    return left


@triton.jit
def state_block(pointer, at, column, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Where a block of the `at`-th state's columns stands."""
    return pointer + at * K * V + tl.arange(0, K)[:, None] * V + (column + tl.arange(0, BLOCK_V))[None, :]


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def forward_kernel(
    q_pointer, k_pointer, v_pointer, solved_pointer, scores_pointer, factors_pointer, borders_pointer, runs_pointer, count_pointer,
    counts_pointer, state_pointer, y_pointer, states_pointer, final_pointer, rows, tokens, chunks, heads,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr, COUNTS: tl.constexpr,
    STATE: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs and final states [B, H, K, V] where OUTPUT, the state before each chunk [N, H, K, V] in the inputs' dtype where KEEP. Any number of programs."""
    BLOCKS: tl.constexpr = V // BLOCK_V
    count = rows
    if DOCUMENTS:
        count = tl.load(count_pointer)
    items, programs = count * heads * BLOCKS, tl.num_programs(0)
    dtype = q_pointer.dtype.element_ty
    for turn in range(tl.cdiv(items, programs)):
        item = item_of(turn, tl.program_id(0), programs)
        if item < items:
            which, head, column = item // (heads * BLOCKS), item // BLOCKS % heads, item % BLOCKS * BLOCK_V
            start, stop, late, followed = run_of(runs_pointer, which, chunks, DOCUMENTS)
            row = start // chunks
            limit = limit_of(counts_pointer, row, tokens, COUNTS)
            first = row * chunks
            state = tl.zeros([K, BLOCK_V], dtype=tl.float32)
            if STATE:
                enters = (start == first) & (late == 0)
                state = tl.load(state_block(state_pointer, row.to(tl.int64) * heads + head, column, K, V, BLOCK_V), mask=enters, other=0.0)
            wide_start = start.to(tl.int64)
            for step in tl.range(0, stop - start, num_stages=STAGES):
                chunk = start + step
                at = (wide_start + step) * heads + head
                token = (chunk - first) * C + tl.arange(0, C)
                place = places(row, (chunk - first) * C, head, tokens, heads, C)
                k = rows_of(k_pointer, place, token < limit, K, K, 0)
                v = rows_of(v_pointer, place, token < limit, V, BLOCK_V, column)
                solved = square(solved_pointer, at, C)
                before = state.to(dtype)
                missing = v - factor(factors_pointer, at, 2, C)[:, None] * tl.dot(k, before, input_precision=PRECISION)
                new = tl.dot(solved, (missing * factor(factors_pointer, at, 6, C)[:, None]).to(dtype), input_precision=PRECISION)
                owned = (late == 0) | (step > 0)
                if KEEP:
                    tl.store(state_block(states_pointer, at, column, K, V, BLOCK_V), before, mask=owned)
                if OUTPUT:
                    q = rows_of(q_pointer, place, token < limit, K, K, 0)
                    y = tl.dot(q, before, input_precision=PRECISION) * factor(factors_pointer, at, 1, C)[:, None]
                    y = tl.dot(square(scores_pointer, at, C), new.to(dtype), y, input_precision=PRECISION)
                    to = y_pointer + place[:, None] * V + (column + tl.arange(0, BLOCK_V))[None, :]
                    tl.store(to, y.to(dtype), mask=((token < tokens) & owned)[:, None])
                written = (new * factor(factors_pointer, at, 3, C)[:, None]).to(dtype)
                state = state * carried(factors_pointer, borders_pointer, chunk, at, C, DOCUMENTS)
                state = tl.dot(tl.trans(k), written, state, input_precision=PRECISION)
            if OUTPUT:
                ends = (stop == first + chunks) & (followed == 0)
                tl.store(state_block(final_pointer, row.to(tl.int64) * heads + head, column, K, V, BLOCK_V), state, mask=ends)


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def backward_kernel(
    dy_pointer, dfinal_pointer, q_pointer, k_pointer, solved_pointer, scores_pointer, factors_pointer, borders_pointer, runs_pointer,
    count_pointer, counts_pointer, dnew_pointer, dstates_pointer, dstate_pointer, rows, tokens, chunks, heads,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr, COUNTS: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of what is written (n, [B, S, H, V]) and of the state behind each chunk ([N, H, K, V]) in the inputs' dtype, and of the state that enters each row where STATE. In a
    chunk in which a run ends and another begins, each gives what belongs to its own documents."""
    BLOCKS: tl.constexpr = V // BLOCK_V
    count = rows
    if DOCUMENTS:
        count = tl.load(count_pointer)
    items, programs = count * heads * BLOCKS, tl.num_programs(0)
    dtype = q_pointer.dtype.element_ty
    for turn in range(tl.cdiv(items, programs)):
        item = item_of(turn, tl.program_id(0), programs)
        if item < items:
            which, head, column = item // (heads * BLOCKS), item // BLOCKS % heads, item % BLOCKS * BLOCK_V
            start, stop, late, followed = run_of(runs_pointer, which, chunks, DOCUMENTS)
            row = start // chunks
            limit = limit_of(counts_pointer, row, tokens, COUNTS)
            first = row * chunks
            dstate = tl.zeros([K, BLOCK_V], dtype=tl.float32)
            if FINAL:
                ends = (stop == first + chunks) & (followed == 0)
                dstate = tl.load(state_block(dfinal_pointer, row.to(tl.int64) * heads + head, column, K, V, BLOCK_V), mask=ends, other=0.0)
            wide_last = stop.to(tl.int64) - 1
            for back in tl.range(0, stop - start, num_stages=STAGES):
                chunk = stop - 1 - back
                at = (wide_last - back) * heads + head
                token = (chunk - first) * C + tl.arange(0, C)
                place = places(row, (chunk - first) * C, head, tokens, heads, C)
                k, q = rows_of(k_pointer, place, token < limit, K, K, 0), rows_of(q_pointer, place, token < limit, K, K, 0)
                dy = rows_of(dy_pointer, place, token < limit, V, BLOCK_V, column)
                scores, solved = square(scores_pointer, at, C), square(solved_pointer, at, C)
                behind = dstate.to(dtype)
                goes_on = (followed == 0) | (back > 0)
                tl.store(state_block(dstates_pointer, at, column, K, V, BLOCK_V), behind, mask=goes_on)
                dnew = tl.dot(k, behind, input_precision=PRECISION) * factor(factors_pointer, at, 3, C)[:, None]
                dnew = tl.dot(tl.trans(scores), dy, dnew, input_precision=PRECISION).to(dtype)
                own = token < tokens
                if DOCUMENTS:
                    later = tl.arange(0, C) >= tl.load(borders_pointer + 2 * chunk + 1)
                    own = own & (goes_on | ~later) & ((late == 0) | (chunk > start) | later)
                tl.store(dnew_pointer + place[:, None] * V + (column + tl.arange(0, BLOCK_V))[None, :], dnew, mask=own[:, None])
                dx = tl.dot(tl.trans(solved), dnew, input_precision=PRECISION)
                read = (dx * (factor(factors_pointer, at, 6, C) * factor(factors_pointer, at, 2, C))[:, None]).to(dtype)
                dread = (dy * factor(factors_pointer, at, 1, C)[:, None]).to(dtype)
                dstate = dstate * carried(factors_pointer, borders_pointer, chunk, at, C, DOCUMENTS)
                dstate = tl.dot(tl.trans(q), dread, dstate, input_precision=PRECISION)
                dstate -= tl.dot(tl.trans(k), read, input_precision=PRECISION)
            if STATE:
                enters = (start == first) & (late == 0)
                tl.store(state_block(dstate_pointer, row.to(tl.int64) * heads + head, column, K, V, BLOCK_V), dstate, mask=enters)
