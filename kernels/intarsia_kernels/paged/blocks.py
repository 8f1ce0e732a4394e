"""`paged_attention` with the bits of `attention/blocks`: the same tiles of rows, the same blocks of 64 keys at absolute positions, the same sums; only loads go through tables.

A request is one program for each key/value head (or head and tile of queries), whatever runs beside it, so that its bits are those of a trainer's packed rows. Shape suffixes as in `intarsia_generation.paged`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.direct import cdiv, direct_op, wrap_triton
from intarsia_kernels.invariant.blocks import KEYS, _scores, _summed, _weighed, tiles
from intarsia_kernels.paged.tables import _entries, _numbers, _places, kernel, named


@triton.jit
def _block(q, position_q, k_pointer, v_pointer, table_pointer, block, end, k_block, k_stride, v_block, v_stride, scale, softcap, window,
           m, total, o, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SIZE: tl.constexpr,
           WIDE: tl.constexpr, KEYS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    position_k = block * KEYS + tl.arange(0, KEYS)
    inside = position_k < end
    number = _numbers(table_pointer, position_k, inside, SIZE, MASKED)
    k = _entries(k_pointer, _places(number, position_k, k_block, k_stride, SIZE, WIDE), inside, tl.arange(0, BLOCK_D), D, BLOCK_D, MASKED)
    s, _ = _scores(q, k, softcap, HAS_SOFTCAP, PRECISION)
    if MASKED:
        distance = position_q[:, None] - position_k[None, :]
        seen = (distance >= 0) & inside[None, :]
        if HAS_WINDOW:
            seen = seen & (distance < window)
        s = tl.where(seen, s, -float("inf"))
    p, largest, kept = _weighed(s, m, scale)
    v = _entries(
        v_pointer, _places(number, position_k, v_block, v_stride, SIZE, WIDE), inside, tl.arange(0, BLOCK_DV), DV, BLOCK_DV, MASKED
    )
    total, o = _summed(p, v, kept, total, o, PRECISION)
    return largest, total, o


@triton.jit(do_not_specialize=["width"])
def _forward(q_pointer, k_pointer, v_pointer, sinks_pointer, out_pointer, tables_pointer, firsts_pointer, counts_pointer, positions_pointer,
             width, scale, softcap, window, q_stride, q_head, k_block, k_stride, k_head, v_block, v_stride, v_head, D: tl.constexpr,
             DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
             KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
             KEYS: tl.constexpr, PACKED: tl.constexpr, HAS_SINKS: tl.constexpr):  # fmt: skip
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # compilers hand over numbers of Python in float64
    tile, request = tl.program_id(0), tl.program_id(2)
    first, count, position = tl.load(firsts_pointer + request), tl.load(counts_pointer + request), tl.load(positions_pointer + request)
    row = tl.arange(0, ROWS)
    if PACKED:  # rows are heads of one query
        query = tl.zeros([ROWS], tl.int32)
        head = tl.program_id(1) * GROUPS + row
        valid = row < GROUPS
        kv_head = tl.program_id(1).to(tl.int64)
    else:
        query = tile * ROWS + row
        head = tl.zeros([ROWS], tl.int32) + tl.program_id(1)
        valid = query < count
        kv_head = (tl.program_id(1) // GROUPS).to(tl.int64)
    if tile * ROWS < count:
        table_pointer = tables_pointer + request.to(tl.int64) * width
        offsets, offsets_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        place = (first + query).to(tl.int64)
        q_pointers = q_pointer + place[:, None] * q_stride + head[:, None] * q_head + offsets[None, :]
        q = tl.load(q_pointers, mask=valid[:, None] & (offsets < D)[None, :], other=0.0)
        position_q = position + query
        k_pointer += kv_head * k_head
        v_pointer += kv_head * v_head
        if HAS_SINKS:  # a key without a value, before all others
            m = tl.load(sinks_pointer + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full([ROWS], 1.0, tl.float32)
        else:
            m = tl.full([ROWS], -1e30, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        lowest = position + tile * ROWS
        end = position + (1 if PACKED else tl.minimum(tile * ROWS + ROWS, count))
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(lowest - window + 1, 0) // KEYS
        # Blocks that every row sees whole need no mask. One loop is better where loads are all there is to wait for.
        whole = begin
        if not PACKED and not HAS_WINDOW:
            whole = (lowest + 1) // KEYS
            for block in range(begin, whole):
                m, total, o = _block(q, position_q, k_pointer, v_pointer, table_pointer, block, end, k_block, k_stride, v_block, v_stride,
                                     scale, softcap, window, m, total, o, D, DV, BLOCK_D, BLOCK_DV, SIZE, WIDE, KEYS, HAS_SOFTCAP, HAS_WINDOW,
                                     False, PRECISION)  # fmt: skip
        for block in range(whole, tl.cdiv(end, KEYS)):
            m, total, o = _block(q, position_q, k_pointer, v_pointer, table_pointer, block, end, k_block, k_stride, v_block, v_stride,
                                 scale, softcap, window, m, total, o, D, DV, BLOCK_D, BLOCK_DV, SIZE, WIDE, KEYS, HAS_SOFTCAP, HAS_WINDOW, True,
                                 PRECISION)  # fmt: skip
        y = o / tl.where(valid, total, 1.0)[:, None]
        tl.store(out_pointer + (place * (KV_HEADS * GROUPS) + head)[:, None] * DV + offsets_v[None, :], y.to(out_pointer.dtype.element_ty),
                 mask=valid[:, None] & (offsets_v < DV)[None, :])  # fmt: skip


@direct_op("intarsia::paged_attention_blocks")
def _attend(
    q_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks_H: Tensor | None,
    tables_RW: Tensor,
    firsts_R: Tensor,
    counts_R: Tensor,
    positions_R: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    queries: int,
    size: int,
) -> Tensor:
    out = q_NHD.new_empty(*q_NHD.shape[:2], values.shape[3])
    heads, kv_heads, requests = q_NHD.shape[1], keys.shape[2], tables_RW.shape[0]
    rows, packed, warps = tiles(queries, heads // kv_heads)
    if out.numel() and requests and queries:
        wrap_triton(_forward)[(1 if packed else cdiv(queries, rows), kv_heads if packed else heads, requests)](
            q_NHD,
            keys,
            values,
            q_NHD if sinks_H is None else sinks_H,
            out,
            tables_RW,
            firsts_R,
            counts_R,
            positions_R,
            tables_RW.stride(0),
            **named(q_NHD, keys, values, scale, softcap, window, size),
            ROWS=rows,
            KEYS=KEYS,
            PACKED=packed,
            HAS_SINKS=sinks_H is not None,
            num_warps=warps,
            num_stages=3,
        )
    return out


paged_attention = kernel(_attend, "As the operator's reference with `attention/blocks` in force, bit for bit. Not differentiable.")
