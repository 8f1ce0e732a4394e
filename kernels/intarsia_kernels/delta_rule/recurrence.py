"""States from chunk to chunk of a run, and their gradients back again, in Triton. Chunk matrices T and P and the factors of rows as `prepare` leaves them.

    x = beta (v - k S);   n = T x;   y = q S + P n;   S <- e^(sum of decays) S + k^T n              (k, q times the factors of their rows)
    dn = P^T dy + k dS;   dx = T^T dn;   dv = beta dx;   dS <- e^(sum of decays) dS + q^T dy - k^T dv

The values that a token writes (n) come from T, S and the inputs themselves: neither T (beta v) nor T (beta k) exists in memory, nor are they rounded. Outputs are made where the state already is.
All is transposed, values by tokens and values by keys: what is computed here is always the left factor, which tensor cores take from registers, and what comes from memory the right one.
A warp has its own values, and none waits for another.
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
def left_of(pointer, at, C: tl.constexpr):
    """What is left at a chunk's end of the state before it."""
    return tl.load(pointer + (at * FACTORS + 8) * C)


@triton.jit
def state_rows(pointer, at, column, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Where some rows of the `at`-th of states [.., V, K] stand."""
    return pointer + at * K * V + (column + tl.arange(0, BLOCK_V))[:, None] * K + tl.arange(0, K)[None, :]


@triton.jit
def state_columns(pointer, at, column, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Where the same of states [.., K, V] stands: transposed."""
    return pointer + at * K * V + tl.arange(0, K)[None, :] * V + (column + tl.arange(0, BLOCK_V))[:, None]


@triton.jit
def chunk_columns(pointer, at, column, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr):
    """Where some rows of the `at`-th of matrices [.., V, C] stand."""
    return pointer + (at * V + column + tl.arange(0, BLOCK_V)[:, None]) * C + tl.arange(0, C)[None, :]


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def forward_kernel(
    q_pointer, k_pointer, v_pointer, solved_pointer, scores_pointer, factors_pointer, runs_pointer, count_pointer,
    counts_pointer, state_pointer, y_pointer, states_pointer, new_pointer, final_pointer, rows, tokens, chunks, heads,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr, COUNTS: tl.constexpr,
    STATE: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs and final states [B, H, K, V] where OUTPUT; where KEEP, in the inputs' dtype, the state before each chunk [N, H, V, K] and what its tokens write [N, H, V, C]. Any number of programs."""
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
            state_VK = tl.zeros([BLOCK_V, K], dtype=tl.float32)
            if STATE:
                enters = (start == first) & (late == 0)
                state_VK = tl.load(
                    state_columns(state_pointer, row.to(tl.int64) * heads + head, column, K, V, BLOCK_V), mask=enters, other=0.0
                )
            wide_start = start.to(tl.int64)
            for step in tl.range(0, stop - start, num_stages=STAGES):
                chunk = start + step
                at = (wide_start + step) * heads + head
                token = (chunk - first) * C + tl.arange(0, C)
                place = places(row, (chunk - first) * C, head, tokens, heads, C)
                k = rows_of(k_pointer, place, token < limit, K, K, 0)
                v = rows_of(v_pointer, place, token < limit, V, BLOCK_V, column)
                solved = square(solved_pointer, at, C)
                before_VK = state_VK.to(dtype)
                held_VC = tl.dot(before_VK, tl.trans(k), input_precision=PRECISION) * factor(factors_pointer, at, 2, C)[None, :]
                x_VC = ((tl.trans(v) - held_VC) * factor(factors_pointer, at, 6, C)[None, :]).to(dtype)
                new_VC = tl.dot(x_VC, tl.trans(solved), input_precision=PRECISION)
                owned = (late == 0) | (step > 0)
                if KEEP:
                    tl.store(state_rows(states_pointer, at, column, K, V, BLOCK_V), before_VK, mask=owned)
                    tl.store(chunk_columns(new_pointer, at, column, V, C, BLOCK_V), new_VC.to(dtype), mask=owned)
                if OUTPUT:
                    q = rows_of(q_pointer, place, token < limit, K, K, 0)
                    y_VC = tl.dot(before_VK, tl.trans(q), input_precision=PRECISION) * factor(factors_pointer, at, 1, C)[None, :]
                    scores = square(scores_pointer, at, C)
                    y_VC = tl.dot(new_VC.to(dtype), tl.trans(scores), y_VC, input_precision=PRECISION).to(dtype)
                    to = y_pointer + place[:, None] * V + (column + tl.arange(0, BLOCK_V))[None, :]
                    tl.store(to, tl.trans(y_VC), mask=((token < tokens) & owned)[:, None])
                written_VC = (new_VC * factor(factors_pointer, at, 3, C)[None, :]).to(dtype)
                state_VK = state_VK * left_of(factors_pointer, at, C)
                state_VK = tl.dot(written_VC, k, state_VK, input_precision=PRECISION)
            if OUTPUT:
                ends = (stop == first + chunks) & (followed == 0)
                tl.store(state_columns(final_pointer, row.to(tl.int64) * heads + head, column, K, V, BLOCK_V), state_VK, mask=ends)


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def backward_kernel(
    dy_pointer, dfinal_pointer, q_pointer, k_pointer, solved_pointer, scores_pointer, factors_pointer, borders_pointer, runs_pointer,
    count_pointer, counts_pointer, dx_pointer, dv_pointer, dstates_pointer, dstate_pointer, rows, tokens, chunks, heads,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr, COUNTS: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of what tokens miss (x, [N, H, V, C]), of values, and of the state behind each chunk ([N, H, V, K]) in the inputs' dtype, and of the state that enters each row where STATE. In
    a chunk in which a run ends and another begins, each gives what belongs to its own documents."""
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
            dstate_VK = tl.zeros([BLOCK_V, K], dtype=tl.float32)
            if FINAL:
                ends = (stop == first + chunks) & (followed == 0)
                dfinal = state_columns(dfinal_pointer, row.to(tl.int64) * heads + head, column, K, V, BLOCK_V)
                dstate_VK = tl.load(dfinal, mask=ends, other=0.0)
            begin, end = 0, C
            if DOCUMENTS:
                begin, end = tl.load(borders_pointer + 2 * start + 1), tl.load(borders_pointer + 2 * stop - 1)
            wide_last = stop.to(tl.int64) - 1
            for back in tl.range(0, stop - start, num_stages=STAGES):
                chunk = stop - 1 - back
                at = (wide_last - back) * heads + head
                token = (chunk - first) * C + tl.arange(0, C)
                place = places(row, (chunk - first) * C, head, tokens, heads, C)
                k, q = rows_of(k_pointer, place, token < limit, K, K, 0), rows_of(q_pointer, place, token < limit, K, K, 0)
                dy_VC = tl.trans(rows_of(dy_pointer, place, token < limit, V, BLOCK_V, column))
                scores, solved = square(scores_pointer, at, C), square(solved_pointer, at, C)
                behind_VK = dstate_VK.to(dtype)
                goes_on = (followed == 0) | (back > 0)
                tl.store(state_rows(dstates_pointer, at, column, K, V, BLOCK_V), behind_VK, mask=goes_on)
                dnew_VC = tl.dot(behind_VK, tl.trans(k), input_precision=PRECISION) * factor(factors_pointer, at, 3, C)[None, :]
                dnew_VC = tl.dot(dy_VC, scores, dnew_VC, input_precision=PRECISION).to(dtype)
                dx_VC = tl.dot(dnew_VC, solved, input_precision=PRECISION)
                to = chunk_columns(dx_pointer, at, column, V, C, BLOCK_V)
                values = dv_pointer + place[:, None] * V + (column + tl.arange(0, BLOCK_V))[None, :]
                dv = tl.trans((dx_VC * factor(factors_pointer, at, 6, C)[None, :]).to(dtype))
                inside = token < tokens
                if DOCUMENTS:
                    own = (goes_on | (tl.arange(0, C) < end)) & ((late == 0) | (chunk > start) | (tl.arange(0, C) >= begin))
                    tl.store(to, dx_VC.to(dtype), mask=own[None, :])
                    inside = inside & own
                else:
                    tl.store(to, dx_VC.to(dtype))
                tl.store(values, dv, mask=inside[:, None])
                lost_VC = (dx_VC * -factor(factors_pointer, at, 7, C)[None, :]).to(dtype)
                dread_VC = (dy_VC * factor(factors_pointer, at, 1, C)[None, :]).to(dtype)
                dstate_VK = dstate_VK * left_of(factors_pointer, at, C)
                dstate_VK = tl.dot(dread_VC, q, dstate_VK, input_precision=PRECISION)
                dstate_VK = tl.dot(lost_VC, k, dstate_VK, input_precision=PRECISION)
            if STATE:
                enters = (start == first) & (late == 0)
                tl.store(state_columns(dstate_pointer, row.to(tl.int64) * heads + head, column, K, V, BLOCK_V), dstate_VK, mask=enters)
