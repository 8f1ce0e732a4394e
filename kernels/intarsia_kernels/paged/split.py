"""`paged_attention` for a GPU that is to be filled whatever the batch: flash decoding over tables. Shape suffixes as in `intarsia_generation.paged`.

One new token for each request: all requests' blocks of keys, head by head, are one line of work, of which each of a fixed number of programs does an equal share. Programs find their shares from
the positions on the device, so that lengths may differ as they like, tables may be wider than anybody needs, and a CUDA graph may hold the launch. A program keeps a running softmax for each
request and head that it meets; where it did not see all of one, it leaves maximum, sum and output behind, and a second launch adds up what several programs left.

More new tokens: a program for each tile of queries of one key/value head, all its query heads together; where such programs are too few, several share a tile's blocks, and the second launch is there as well.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.direct import cdiv, direct_op, power_of_two, wrap_triton
from intarsia_kernels.paged.blocks import _block
from intarsia_kernels.paged.tables import kernel, named

LEAST = 2
"""Blocks of keys of a program at least: fewer are not worth a second launch's reads."""
PIECES = 16
"""The most programs that share a tile of queries."""


@triton.jit
def _begin(position, window, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first block of keys that a query at this position sees any of."""
    if HAS_WINDOW:
        return tl.maximum(position - window + 1, 0) // KEYS
    return position * 0


@triton.jit
def _work(counts_pointer, positions_pointer, requests, window, REQUESTS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Blocks of keys that requests of one token see, and how many are in all up to each request's last."""
    request = tl.arange(0, REQUESTS)
    position = tl.load(positions_pointer + request, mask=request < requests, other=0)
    count = tl.load(counts_pointer + request, mask=request < requests, other=0)
    blocks = tl.where(count > 0, position // KEYS + 1 - _begin(position, window, KEYS, HAS_WINDOW), 0)
    return blocks, tl.cumsum(blocks, 0)


@triton.jit
def _start(sinks_pointer, head, valid, is_first, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Maximum and sum before any key. A sink is a key without a value, which the first part of a row counts."""
    m = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_pointer + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        m = tl.where(is_first, sink, m)
        total = tl.where(is_first, 1.0, total)
    return m, total


@triton.jit(do_not_specialize=["width", "requests"])
def _decode(q_pointer, k_pointer, v_pointer, sinks_pointer, out_pointer, part_pointer, sums_pointer, tables_pointer, firsts_pointer,
            counts_pointer, positions_pointer, width, requests, scale, softcap, window, q_stride, q_head, k_block, k_stride, k_head, v_block,
            v_stride, v_head, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SIZE: tl.constexpr,
            WIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
            PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr, REQUESTS: tl.constexpr,
            HAS_SINKS: tl.constexpr):  # fmt: skip
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # compilers hand over numbers of Python in float64
    blocks, ends = _work(counts_pointer, positions_pointer, requests, window, REQUESTS, KEYS, HAS_WINDOW)
    all_blocks = tl.sum(blocks, 0) * KV_HEADS
    share = tl.maximum(tl.cdiv(all_blocks, tl.num_programs(0)), LEAST)
    at = tl.program_id(0) * share
    stop = tl.minimum(at + share, all_blocks)
    row, offsets, offsets_v = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    valid = row < GROUPS
    while at < stop:
        # Only `ends` stays in registers: of what lies before the share's place, and up to the end of the request in which it lies.
        is_before = ends * KV_HEADS <= at
        request = tl.sum(is_before.to(tl.int32), 0)
        before = tl.max(tl.where(is_before, ends, 0), 0)
        own = tl.min(tl.where(is_before, 2147483647, ends), 0) - before
        within = at - before * KV_HEADS
        kv_head, passed = within // own, within % own
        here = tl.minimum(own - passed, stop - at)
        position, first = tl.load(positions_pointer + request), tl.load(firsts_pointer + request).to(tl.int64)
        head = kv_head * GROUPS + row
        q_pointers = q_pointer + first * q_stride + head[:, None] * q_head + offsets[None, :]
        q = tl.load(q_pointers, mask=valid[:, None] & (offsets < D)[None, :], other=0.0)
        m, total = _start(sinks_pointer, head, valid, passed == 0, ROWS, HAS_SINKS)
        o = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        position_q = position + tl.zeros([ROWS], tl.int32)
        table_pointer = tables_pointer + request.to(tl.int64) * width
        keys_pointer, values_pointer = k_pointer + kv_head.to(tl.int64) * k_head, v_pointer + kv_head.to(tl.int64) * v_head
        begin = _begin(position, window, KEYS, HAS_WINDOW) + passed
        for block in range(begin, begin + here):
            m, total, o = _block(q, position_q, keys_pointer, values_pointer, table_pointer, block, position + 1, k_block, k_stride, v_block,
                                 v_stride, scale, softcap, window, m, total, o, D, DV, BLOCK_D, BLOCK_DV, SIZE, WIDE, KEYS, HAS_SOFTCAP,
                                 HAS_WINDOW, True, PRECISION)  # fmt: skip
        if here == own:
            place = first * (KV_HEADS * GROUPS) + head
            tl.store(out_pointer + place[:, None] * DV + offsets_v[None, :], (o / total[:, None]).to(out_pointer.dtype.element_ty),
                     mask=valid[:, None] & (offsets_v < DV)[None, :])  # fmt: skip
        else:  # of two parts that a program leaves the first goes on with what another began, the second begins
            part = (2 * tl.program_id(0) + (passed == 0).to(tl.int32)) * GROUPS + row
            tl.store(part_pointer + part[:, None] * DV + offsets_v[None, :], o, mask=valid[:, None] & (offsets_v < DV)[None, :])
            tl.store(sums_pointer + part * 2, m, mask=valid)
            tl.store(sums_pointer + part * 2 + 1, total, mask=valid)
        at += here


@triton.jit
def _added(part_pointer, sums_pointer, base, step, extra, first, last, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PIECES: tl.constexpr):
    """A row's result of parts `first` to `last`, which lie at base + part * step, the first `extra` further on."""
    offsets = tl.arange(0, BLOCK_DV)
    m, total, o = -1e30, 0.0, tl.zeros([BLOCK_DV], tl.float32)
    for start in range(first, last + 1, PIECES):
        part = start + tl.arange(0, PIECES)
        inside = part <= last
        place = base + part.to(tl.int64) * step + tl.where(part == first, extra, 0)
        part_m = tl.load(sums_pointer + place * 2, mask=inside, other=-1e30)
        part_total = tl.load(sums_pointer + place * 2 + 1, mask=inside, other=0.0)
        part_o = tl.load(part_pointer + place[:, None] * DV + offsets[None, :], mask=inside[:, None] & (offsets < DV)[None, :], other=0.0)
        largest = tl.maximum(m, tl.max(part_m, 0))
        weight, kept = tl.exp2(part_m - largest), tl.exp2(m - largest)
        total = total * kept + tl.sum(part_total * weight, 0)
        o = o * kept + tl.sum(part_o * weight[:, None], 0)
        m = largest
    return o / total


@triton.jit(do_not_specialize=["requests", "programs"])
def _add_decoded(out_pointer, part_pointer, sums_pointer, firsts_pointer, counts_pointer, positions_pointer, requests, programs, window,
                 DV: tl.constexpr, BLOCK_DV: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HAS_WINDOW: tl.constexpr,
                 KEYS: tl.constexpr, LEAST: tl.constexpr, REQUESTS: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    blocks, ends = _work(counts_pointer, positions_pointer, requests, window, REQUESTS, KEYS, HAS_WINDOW)
    share = tl.maximum(tl.cdiv(tl.sum(blocks, 0) * KV_HEADS, programs), LEAST)
    head, request = tl.program_id(0), tl.program_id(1)
    is_own = tl.arange(0, REQUESTS) == request
    own = tl.sum(tl.where(is_own, blocks, 0), 0)
    at = (tl.sum(tl.where(is_own, ends, 0), 0) - own) * KV_HEADS + head // GROUPS * own
    first, last = at // share, (at + own - 1) // share
    if (own > 0) & (first < last):
        y = _added(part_pointer, sums_pointer, head % GROUPS, 2 * GROUPS, GROUPS, first, last, DV, BLOCK_DV, PIECES)
        place = tl.load(firsts_pointer + request).to(tl.int64) * (KV_HEADS * GROUPS) + head
        offsets = tl.arange(0, BLOCK_DV)
        tl.store(out_pointer + place * DV + offsets, y.to(out_pointer.dtype.element_ty), mask=offsets < DV)


@triton.jit
def _reach(tile, count, position, pieces, window, GROUPS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr,
           HAS_WINDOW: tl.constexpr):  # fmt: skip
    """Of a tile of rows: its first query's position, what its last one sees, its first block of keys, how many there are, and how many of them a program does."""
    lowest = position + tile * ROWS // GROUPS
    end = position + tl.minimum((tile * ROWS + ROWS - 1) // GROUPS + 1, count)
    begin = _begin(lowest, window, KEYS, HAS_WINDOW)
    blocks = tl.cdiv(end, KEYS) - begin
    return lowest, end, begin, blocks, tl.maximum(tl.cdiv(blocks, pieces), LEAST)


@triton.jit(do_not_specialize=["width", "tiles", "pieces", "tokens"])
def _prompts(q_pointer, k_pointer, v_pointer, sinks_pointer, out_pointer, part_pointer, sums_pointer, tables_pointer, firsts_pointer,
             counts_pointer, positions_pointer, width, tiles, pieces, tokens, scale, softcap, window, q_stride, q_head, k_block, k_stride,
             k_head, v_block, v_stride, v_head, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
             SIZE: tl.constexpr, WIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
             HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr,
             SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr):  # fmt: skip
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # compilers hand over numbers of Python in float64
    # The last tiles see the most, and begin first.
    tile, piece = tiles - 1 - tl.program_id(0) // pieces, tl.program_id(0) % pieces
    kv_head, request = tl.program_id(1), tl.program_id(2)
    count, position = tl.load(counts_pointer + request), tl.load(positions_pointer + request)
    lowest, end, begin, blocks, share = _reach(tile, count, position, pieces, window, GROUPS, ROWS, KEYS, LEAST, HAS_WINDOW)
    start = begin + piece * share
    stop = tl.minimum(start + share, begin + blocks)
    if (tile * ROWS < count * GROUPS) & (start < stop):
        row = tile * ROWS + tl.arange(0, ROWS)
        query, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
        valid = query < count
        offsets, offsets_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        place = (tl.load(firsts_pointer + request) + query).to(tl.int64)
        q_pointers = q_pointer + place[:, None] * q_stride + head[:, None] * q_head + offsets[None, :]
        q = tl.load(q_pointers, mask=valid[:, None] & (offsets < D)[None, :], other=0.0)
        m, total = _start(sinks_pointer, head, valid, piece == 0, ROWS, HAS_SINKS)
        o = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        position_q = position + query
        table_pointer = tables_pointer + request.to(tl.int64) * width
        k_pointer += kv_head.to(tl.int64) * k_head
        v_pointer += kv_head.to(tl.int64) * v_head
        # Blocks that every row sees whole need no mask.
        whole = start
        if not HAS_WINDOW:
            whole = tl.maximum(start, tl.minimum((lowest + 1) // KEYS, stop))
            for block in range(start, whole):
                m, total, o = _block(q, position_q, k_pointer, v_pointer, table_pointer, block, end, k_block, k_stride, v_block, v_stride,
                                     scale, softcap, window, m, total, o, D, DV, BLOCK_D, BLOCK_DV, SIZE, WIDE, KEYS, HAS_SOFTCAP,
                                     HAS_WINDOW, False, PRECISION)  # fmt: skip
        for block in range(whole, stop):
            m, total, o = _block(q, position_q, k_pointer, v_pointer, table_pointer, block, end, k_block, k_stride, v_block, v_stride,
                                 scale, softcap, window, m, total, o, D, DV, BLOCK_D, BLOCK_DV, SIZE, WIDE, KEYS, HAS_SOFTCAP, HAS_WINDOW,
                                 True, PRECISION)  # fmt: skip
        place = place * (KV_HEADS * GROUPS) + head
        mask = valid[:, None] & (offsets_v < DV)[None, :]
        if SPLIT:
            place += piece.to(tl.int64) * tokens * (KV_HEADS * GROUPS)
            tl.store(part_pointer + place[:, None] * DV + offsets_v[None, :], o, mask=mask)
            tl.store(sums_pointer + place * 2, m, mask=valid)
            tl.store(sums_pointer + place * 2 + 1, total, mask=valid)
        else:
            total = tl.where(valid, total, 1.0)
            tl.store(
                out_pointer + place[:, None] * DV + offsets_v[None, :], (o / total[:, None]).to(out_pointer.dtype.element_ty), mask=mask
            )


@triton.jit(do_not_specialize=["pieces", "tokens"])
def _add_prompts(out_pointer, part_pointer, sums_pointer, firsts_pointer, counts_pointer, positions_pointer, pieces, tokens, window,
                 DV: tl.constexpr, BLOCK_DV: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HAS_WINDOW: tl.constexpr,
                 ROWS: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    heads: tl.constexpr = KV_HEADS * GROUPS
    query, head, request = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    count, position = tl.load(counts_pointer + request), tl.load(positions_pointer + request)
    if query < count:
        tile = (query * GROUPS + head % GROUPS) // ROWS
        _, _, _, blocks, share = _reach(tile, count, position, pieces, window, GROUPS, ROWS, KEYS, LEAST, HAS_WINDOW)
        place = (tl.load(firsts_pointer + request) + query).to(tl.int64) * heads + head
        step = tokens.to(tl.int64) * heads
        y = _added(part_pointer, sums_pointer, place, step, 0, 0, tl.cdiv(blocks, share) - 1, DV, BLOCK_DV, PIECES)
        offsets = tl.arange(0, BLOCK_DV)
        tl.store(out_pointer + place * DV + offsets, y.to(out_pointer.dtype.element_ty), mask=offsets < DV)


@dataclasses.dataclass(frozen=True)
class Shape:
    """How programs are cut: rows of a tile, keys of a block, warps, stages of loads (two for each block of keys under way: its numbers come first), and programs that a multiprocessor holds at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int


def decoding(groups: int, width: int, wide: bool) -> Shape:
    """For one new token: `groups` query heads of a key/value head as rows, heads of `width`. `wide`: numbers of 32 bits."""
    rows = max(16, power_of_two(groups))
    if wide:
        return Shape(rows, 32, 4, 3, 2)
    return Shape(rows, 64, 4, 5, 4 if width <= 64 else 3) if width <= 128 else Shape(rows, 32, 4, 5, 2)


def prompting(rows: int, width: int, wide: bool) -> Shape:
    """For several new tokens: so many rows of one key/value head at most."""
    rows = min(max(16, power_of_two(rows)), 128)
    if wide:
        return Shape(min(rows, 32), 32, 4, 3, 2)
    if width <= 64:
        return Shape(rows, 64, 4, 3, 2)
    return Shape(rows, 64, 4 if rows <= 64 else 8, 3, 1) if width <= 128 else Shape(min(rows, 64), 32, 4, 3, 1)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 where an interpreter stands in for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@direct_op("intarsia::paged_attention_split")
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
    if out.numel() and tables_RW.numel() and queries:
        sinks = q_NHD if sinks_H is None else sinks_H
        settings = named(q_NHD, keys, values, scale, softcap, window, size)
        settings |= {"HAS_SINKS": sinks_H is not None, "PRECISION": "tf32x3"}
        launch = _launch_decode if queries == 1 else _launch_prompts
        launch((q_NHD, keys, values, sinks, out), (tables_RW, firsts_R, counts_R, positions_R), settings, queries)
    return out


def _parts(places: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Room for rows' parts: outputs, and maxima with sums."""
    return out.new_empty(places, out.shape[2], dtype=torch.float32), out.new_empty(places, 2, dtype=torch.float32)


def _launch_decode(operands: tuple[Tensor, ...], where: tuple[Tensor, ...], settings: dict[str, Any], queries: int) -> None:
    out, (tables_RW, *rest) = operands[-1], where
    requests, width = tables_RW.shape
    heads, kv_heads, size = out.shape[1], settings["KV_HEADS"], settings["SIZE"]
    shape = decoding(heads // kv_heads, max(settings["D"], settings["DV"]), operands[0].dtype == torch.float32)
    most = cdiv(requests * kv_heads * cdiv(width * size, shape.keys), LEAST)
    programs = min(multiprocessors(out.device) * shape.resident, most)
    parts = _parts(2 * programs * (heads // kv_heads), out)
    cut = {"KEYS": shape.keys, "LEAST": LEAST, "REQUESTS": power_of_two(requests)}
    wrap_triton(_decode)[(programs,)](
        *operands,
        *parts,
        *where,
        tables_RW.stride(0),
        requests,
        **settings,
        **cut,
        ROWS=shape.rows,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    shared = {name: settings[name] for name in ("window", "DV", "BLOCK_DV", "KV_HEADS", "GROUPS", "HAS_WINDOW")}
    wrap_triton(_add_decoded)[(heads, requests)](
        out, *parts, *rest, requests, programs, **shared, **cut, PIECES=16 if requests > 8 else 64, num_warps=4
    )


def _launch_prompts(operands: tuple[Tensor, ...], where: tuple[Tensor, ...], settings: dict[str, Any], queries: int) -> None:
    out, (tables_RW, *rest) = operands[-1], where
    requests, width = tables_RW.shape
    tokens, heads = out.shape[:2]
    kv_heads, groups = settings["KV_HEADS"], settings["GROUPS"]
    shape = prompting(queries * groups, max(settings["D"], settings["DV"]), operands[0].dtype == torch.float32)
    tiles = cdiv(queries * groups, shape.rows)
    room = multiprocessors(out.device) * shape.resident // (tiles * kv_heads * requests)
    pieces = max(1, min(room, PIECES, cdiv(width * settings["SIZE"], shape.keys * LEAST)))
    parts = _parts(pieces * tokens * heads if pieces > 1 else 0, out)
    cut = {"ROWS": shape.rows, "KEYS": shape.keys, "LEAST": LEAST}
    wrap_triton(_prompts)[(tiles * pieces, kv_heads, requests)](
        *operands,
        *parts,
        *where,
        tables_RW.stride(0),
        tiles,
        pieces,
        tokens,
        **settings,
        **cut,
        SPLIT=pieces > 1,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if pieces > 1:
        shared = {name: settings[name] for name in ("window", "DV", "BLOCK_DV", "KV_HEADS", "GROUPS", "HAS_WINDOW")}
        wrap_triton(_add_prompts)[(queries * heads, requests)](
            out, *parts, *rest, pieces, tokens, **shared, **cut, PIECES=power_of_two(pieces), num_warps=1
        )


paged_attention = kernel(_attend, "As the operator's reference; what stands behind a request's last entry is not read. Not differentiable.")
