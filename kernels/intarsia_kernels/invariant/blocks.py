"""Attention in Triton for training and for decoding: blocks of 64 keys at absolute positions, each row of a tile by itself. Shape suffixes as in `intarsia.ops`; N queries and M keys in a line.

A tile's rows are queries of one head, or, where there is one query to a segment, the G query heads that share a key/value head. A row goes through its blocks in ascending order by an online
softmax in base 2; blocks of which it sees nothing change no bit, so that it does not matter which rows are its neighbours. Scores are masked before they are scaled, in both loops alike. Backward is two kernels
without atomic sums: one program owns the queries' gradient, one the keys' and values', so that it repeats exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from intarsia.errors import UsageError
from intarsia.ops import Packing
from torch import Tensor

from intarsia_kernels.attention.widths import WIDEST, columns
from intarsia_kernels.direct import direct_op, wrap_triton
from intarsia_kernels.invariant.segments import Segments, of_lengths, segments

KEYS = 64
"""Positions of a block of keys. Another number gives other bits."""
LOG2E = 1.4426950408889634


@triton.jit
def _capped(s, softcap):
    """softcap * tanh(s / softcap), and tanh itself."""
    t = 2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0
    return softcap * t, t


@triton.jit
def _scores(q, k, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    slope = tl.full(s.shape, 1.0, tl.float32)
    if HAS_SOFTCAP:
        s, t = _capped(s, softcap)
        slope = 1.0 - t * t
    return s, slope


@triton.jit
def _load(pointer, index, count, stride, head, head_stride, offsets, width):
    """Rows `index` of one head, zeros outside of 0 to `count`."""
    inside = (index >= 0) & (index < count)
    pointers = pointer + index.to(tl.int64)[:, None] * stride + head * head_stride + offsets[None, :]
    return tl.load(pointers, mask=inside[:, None] & (offsets < width)[None, :], other=0.0)


@triton.jit
def _weighed(s, m, scale):
    """Weights of masked scores, the largest so far, and by what earlier sums have to shrink."""
    largest = tl.maximum(m, tl.max(s, axis=1) * scale)
    p = tl.exp2(s * scale - largest[:, None])
    kept = tl.exp2(m - largest)
    return p, largest, kept


@triton.jit
def _summed(p, v, kept, total, o, PRECISION: tl.constexpr):
    """Sums of weights and of weighted values, with a block's."""
    total = total * kept + tl.sum(p, axis=1)
    o = o * kept[:, None]
    o = tl.dot(p.to(v.dtype), v, o, input_precision=PRECISION)
    return total, o


@triton.jit
def _block(q, position_q, k_pointer, v_pointer, block, key_count, key_position, kv_head, k_stride, k_head, v_stride, v_head, scale, softcap,
           window, m, total, o, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
           HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    position_k = block * KEYS + tl.arange(0, KEYS)
    index = position_k - key_position
    k = _load(k_pointer, index, key_count, k_stride, kv_head, k_head, tl.arange(0, BLOCK_D), D)
    s, _ = _scores(q, k, softcap, HAS_SOFTCAP, PRECISION)
    if MASKED:
        distance = position_q[:, None] - position_k[None, :]
        seen = (distance >= 0) & ((index >= 0) & (index < key_count))[None, :]
        if HAS_WINDOW:
            seen = seen & (distance < window)
        s = tl.where(seen, s, -float("inf"))
    p, largest, kept = _weighed(s, m, scale)
    v = _load(v_pointer, index, key_count, v_stride, kv_head, v_head, tl.arange(0, BLOCK_DV), DV)
    total, o = _summed(p, v, kept, total, o, PRECISION)
    return largest, total, o


@triton.jit
def _forward(q_pointer, k_pointer, v_pointer, sinks_pointer, out_pointer, lse_pointer, table_pointer, scale, softcap, window, heads,
             q_stride, q_head, k_stride, k_head, v_stride, v_head, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, PACKED: tl.constexpr,
             HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # compilers hand over numbers of Python in float64
    tile, segment = tl.program_id(0), tl.program_id(2).to(tl.int64)
    table_pointer += segment * 6
    first, count, position = tl.load(table_pointer), tl.load(table_pointer + 1), tl.load(table_pointer + 2)
    key_first, key_count, key_position = tl.load(table_pointer + 3), tl.load(table_pointer + 4), tl.load(table_pointer + 5)
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
        offsets, offsets_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        line = (first + query).to(tl.int64)
        q_pointers = q_pointer + line[:, None] * q_stride + head[:, None] * q_head + offsets[None, :]
        q = tl.load(q_pointers, mask=valid[:, None] & (offsets < D)[None, :], other=0.0)
        position_q = position + query
        k_pointer += key_first.to(tl.int64) * k_stride
        v_pointer += key_first.to(tl.int64) * v_stride
        if HAS_SINKS:  # a key without a value, before all others
            m = tl.load(sinks_pointer + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full([ROWS], 1.0, tl.float32)
        else:
            m = tl.full([ROWS], -1e30, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        lowest = position + tile * ROWS
        highest = position if PACKED else position + tl.minimum(tile * ROWS + ROWS, count) - 1
        begin = key_position // KEYS
        if HAS_WINDOW:
            begin = tl.maximum(begin, tl.maximum(lowest - window + 1, 0) // KEYS)
        end = tl.minimum(highest, key_position + key_count - 1) // KEYS + 1
        # Blocks that every row sees whole need no mask: they lie before the first row's own, and are filled.
        whole = begin
        if not HAS_WINDOW:
            whole = tl.maximum(begin, tl.minimum((lowest + 1) // KEYS, (key_position + key_count) // KEYS))
            if key_position % KEYS != 0:
                whole = begin
        if key_count > 0:
            for block in range(begin, whole):
                m, total, o = _block(q, position_q, k_pointer, v_pointer, block, key_count, key_position, kv_head, k_stride, k_head, v_stride,
                                     v_head, scale, softcap, window, m, total, o, D, DV, BLOCK_D, BLOCK_DV, KEYS, HAS_SOFTCAP, HAS_WINDOW, False,
                                     PRECISION)  # fmt: skip
            for block in range(whole, end):
                m, total, o = _block(q, position_q, k_pointer, v_pointer, block, key_count, key_position, kv_head, k_stride, k_head, v_stride,
                                     v_head, scale, softcap, window, m, total, o, D, DV, BLOCK_D, BLOCK_DV, KEYS, HAS_SOFTCAP, HAS_WINDOW, True,
                                     PRECISION)  # fmt: skip
        nothing = total == 0.0
        total = tl.where(nothing, 1.0, total)
        y = o / total[:, None]
        place = line * heads + head
        tl.store(out_pointer + place[:, None] * DV + offsets_v[None, :], y.to(out_pointer.dtype.element_ty),
                 mask=valid[:, None] & (offsets_v < DV)[None, :])  # fmt: skip
        tl.store(lse_pointer + place, tl.where(nothing, 0.0, m + tl.log2(total)), mask=valid)


@triton.jit
def _backward_queries(q_pointer, k_pointer, v_pointer, grad_pointer, lse_pointer, delta_pointer, grad_q_pointer, table_pointer, scale, softcap,
                      window, heads, q_stride, q_head, k_stride, k_head, v_stride, v_head, D: tl.constexpr, DV: tl.constexpr,
                      BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr,
                      HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # compilers hand over numbers of Python in float64
    tile, head, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    table_pointer += segment * 6
    first, count, position = tl.load(table_pointer), tl.load(table_pointer + 1), tl.load(table_pointer + 2)
    key_first, key_count, key_position = tl.load(table_pointer + 3), tl.load(table_pointer + 4), tl.load(table_pointer + 5)
    if tile * ROWS < count:
        query = tile * ROWS + tl.arange(0, ROWS)
        valid = query < count
        offsets, offsets_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        kv_head = head // GROUPS
        q_pointer += first.to(tl.int64) * q_stride
        k_pointer += key_first.to(tl.int64) * k_stride
        v_pointer += key_first.to(tl.int64) * v_stride
        q = _load(q_pointer, query, count, q_stride, head, q_head, offsets, D)
        place = (first + query).to(tl.int64) * heads + head
        grad = tl.load(grad_pointer + place[:, None] * DV + offsets_v[None, :], mask=valid[:, None] & (offsets_v < DV)[None, :], other=0.0)
        lse = tl.load(lse_pointer + place, mask=valid, other=0.0)
        delta = tl.load(delta_pointer + place, mask=valid, other=0.0)
        position_q = position + query
        begin = key_position // KEYS
        if HAS_WINDOW:
            begin = tl.maximum(begin, tl.maximum(position + tile * ROWS - window + 1, 0) // KEYS)
        end = tl.minimum(position + tl.minimum(tile * ROWS + ROWS, count) - 1, key_position + key_count - 1) // KEYS + 1
        grad_q = tl.zeros([ROWS, BLOCK_D], tl.float32)
        if key_count > 0:
            for block in range(begin, end):
                position_k = block * KEYS + tl.arange(0, KEYS)
                index = position_k - key_position
                k = _load(k_pointer, index, key_count, k_stride, kv_head, k_head, offsets, D)
                v = _load(v_pointer, index, key_count, v_stride, kv_head, v_head, offsets_v, DV)
                s, slope = _scores(q, k, softcap, HAS_SOFTCAP, PRECISION)
                distance = position_q[:, None] - position_k[None, :]
                seen = (distance >= 0) & ((index >= 0) & (index < key_count))[None, :]
                if HAS_WINDOW:
                    seen = seen & (distance < window)
                p = tl.where(seen, tl.exp2(s * scale - lse[:, None]), 0.0)
                grad_p = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
                grad_s = p * (grad_p - delta[:, None]) * slope
                grad_q = tl.dot(grad_s.to(k.dtype), k, grad_q, input_precision=PRECISION)
        tl.store(grad_q_pointer + place[:, None] * D + offsets[None, :], (grad_q * (scale * 0.6931471805599453)).to(grad_q_pointer.dtype.element_ty),
                 mask=valid[:, None] & (offsets < D)[None, :])  # fmt: skip


@triton.jit
def _backward_keys(q_pointer, k_pointer, v_pointer, grad_pointer, lse_pointer, delta_pointer, grad_k_pointer, grad_v_pointer, table_pointer,
                   scale, softcap, window, heads, kv_heads, q_stride, q_head, k_stride, k_head, v_stride, v_head, D: tl.constexpr,
                   DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
                   GROUPS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # compilers hand over numbers of Python in float64
    kv_head, segment = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    table_pointer += segment * 6
    first, count, position = tl.load(table_pointer), tl.load(table_pointer + 1), tl.load(table_pointer + 2)
    key_first, key_count, key_position = tl.load(table_pointer + 3), tl.load(table_pointer + 4), tl.load(table_pointer + 5)
    block = key_position // KEYS + tl.program_id(0)
    if block * KEYS < key_position + key_count:
        position_k = block * KEYS + tl.arange(0, KEYS)
        index = position_k - key_position
        valid_k = (index >= 0) & (index < key_count)
        offsets, offsets_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        q_pointer += first.to(tl.int64) * q_stride
        k = _load(k_pointer + key_first.to(tl.int64) * k_stride, index, key_count, k_stride, kv_head, k_head, offsets, D)
        v = _load(v_pointer + key_first.to(tl.int64) * v_stride, index, key_count, v_stride, kv_head, v_head, offsets_v, DV)
        grad_k, grad_v = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_DV], tl.float32)
        # The first query that sees any of it is the one at its first position.
        begin = tl.maximum(tl.maximum(block * KEYS, key_position) - position, 0) // ROWS
        end = tl.cdiv(count, ROWS)
        if HAS_WINDOW:
            end = tl.minimum(end, (tl.maximum(block * KEYS + KEYS - 1 + window - position, 0) + ROWS - 1) // ROWS)
        for group in range(GROUPS):
            head = kv_head * GROUPS + group
            for tile in range(begin, end):
                query = tile * ROWS + tl.arange(0, ROWS)
                valid = query < count
                q = _load(q_pointer, query, count, q_stride, head, q_head, offsets, D)
                place = (first + query).to(tl.int64) * heads + head
                inside = valid[:, None] & (offsets_v < DV)[None, :]
                grad = tl.load(grad_pointer + place[:, None] * DV + offsets_v[None, :], mask=inside, other=0.0)
                lse = tl.load(lse_pointer + place, mask=valid, other=0.0)
                delta = tl.load(delta_pointer + place, mask=valid, other=0.0)
                # By rows of keys from the start, and never turned: see `intarsia_kernels.delta_rule.gradients`.
                s, slope = _scores(k, q, softcap, HAS_SOFTCAP, PRECISION)
                distance = (position + query)[None, :] - position_k[:, None]
                seen = (distance >= 0) & valid_k[:, None] & valid[None, :]
                if HAS_WINDOW:
                    seen = seen & (distance < window)
                p = tl.where(seen, tl.exp2(s * scale - lse[None, :]), 0.0)
                grad_v = tl.dot(p.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
                grad_p = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
                grad_s = p * (grad_p - delta[None, :]) * slope
                grad_k = tl.dot(grad_s.to(q.dtype), q, grad_k, input_precision=PRECISION)
        place_k = (key_first + index).to(tl.int64) * kv_heads + kv_head
        tl.store(grad_k_pointer + place_k[:, None] * D + offsets[None, :], (grad_k * (scale * 0.6931471805599453)).to(grad_k_pointer.dtype.element_ty),
                 mask=valid_k[:, None] & (offsets < D)[None, :])  # fmt: skip
        tl.store(grad_v_pointer + place_k[:, None] * DV + offsets_v[None, :], grad_v.to(grad_v_pointer.dtype.element_ty),
                 mask=valid_k[:, None] & (offsets_v < DV)[None, :])  # fmt: skip


def _named(q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, scale: float, softcap: float | None, window: int | None) -> dict[str, Any]:
    """Arguments that all three kernels share."""
    return {
        "scale": scale * LOG2E,
        # Scores are capped before they are scaled: c tanh(s scale / c) = scale c' tanh(s / c') for c' = c / scale.
        "softcap": 1.0 if softcap is None else softcap / scale,
        "window": window or 0,
        "heads": q_NHD.shape[1],
        "q_stride": q_NHD.stride(0),
        "q_head": q_NHD.stride(1),
        "k_stride": k_MKD.stride(0),
        "k_head": k_MKD.stride(1),
        "v_stride": v_MKD.stride(0),
        "v_head": v_MKD.stride(1),
        "D": q_NHD.shape[2],
        "DV": v_MKD.shape[2],
        "BLOCK_D": columns(q_NHD.shape[2]),
        "BLOCK_DV": columns(v_MKD.shape[2]),
        "KEYS": KEYS,
        "GROUPS": q_NHD.shape[1] // k_MKD.shape[1],
        "HAS_SOFTCAP": softcap is not None,
        "HAS_WINDOW": window is not None,
        "PRECISION": "ieee",
    }


def tiles(queries: int, groups: int) -> tuple[int, bool, int]:
    """Rows of a tile for segments of at most so many queries, whether they are heads of one query, and warps."""
    packed = queries == 1 and groups > 1
    rows = max(16, triton.next_power_of_2(groups)) if packed else (64 if queries > 16 else 16)
    # One warp where a tile has few rows: with more, a row's sum would cross them, in another order.
    return rows, packed, 1 if rows == 16 else 4


@direct_op("intarsia::block_attention")
def block_attention(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    sinks_H: Tensor | None,
    table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    queries: int,
) -> tuple[Tensor, Tensor]:
    """Attention of lines of tokens by segments (`Segments.table`), [N, H, Dv], and the base-2 logarithm of each row's sum of exponentials, float32 [N, H]. `queries` are the most of a segment."""
    out = q_NHD.new_zeros(*q_NHD.shape[:2], v_MKD.shape[2])
    lse = torch.zeros(q_NHD.shape[:2], dtype=torch.float32, device=q_NHD.device)
    rows, packed, warps = tiles(queries, q_NHD.shape[1] // k_MKD.shape[1])
    if out.numel():
        grid = (1 if packed else triton.cdiv(queries, rows), k_MKD.shape[1] if packed else q_NHD.shape[1], table.shape[0])
        wrap_triton(_forward)[grid](
            q_NHD,
            k_MKD,
            v_MKD,
            q_NHD if sinks_H is None else sinks_H,
            out,
            lse,
            table,
            **_named(q_NHD, k_MKD, v_MKD, scale, softcap, window),
            ROWS=rows,
            PACKED=packed,
            HAS_SINKS=sinks_H is not None,
            num_warps=warps,
            num_stages=2,
        )
    return out, lse


@direct_op("intarsia::block_attention_backward")
def block_attention_backward(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    grad_NHD: Tensor,
    lse_NH: Tensor,
    delta_NH: Tensor,
    table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    queries: int,
    keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by queries, keys and values. Each is written by one program: it repeats exactly."""
    grad_q = torch.zeros(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    grad_k = torch.zeros(k_MKD.shape, dtype=k_MKD.dtype, device=q_NHD.device)
    grad_v = torch.zeros(v_MKD.shape, dtype=v_MKD.dtype, device=q_NHD.device)
    if grad_q.numel() and grad_k.numel():
        named = _named(q_NHD, k_MKD, v_MKD, scale, softcap, window)
        rows = 64 if max(q_NHD.shape[2], v_MKD.shape[2]) <= 128 else 32
        operands = (q_NHD, k_MKD, v_MKD, grad_NHD, lse_NH, delta_NH)
        grid = (triton.cdiv(queries, rows), q_NHD.shape[1], table.shape[0])
        wrap_triton(_backward_queries)[grid](*operands, grad_q, table, **named, ROWS=rows, num_warps=4, num_stages=2)
        grid = (triton.cdiv(keys, KEYS) + 1, k_MKD.shape[1], table.shape[0])
        wrap_triton(_backward_keys)[grid](
            *operands, grad_k, grad_v, table, kv_heads=k_MKD.shape[1], **named, ROWS=rows, num_warps=4, num_stages=2
        )
    return grad_q, grad_k, grad_v


def flash_backward(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, grad_NHD: Tensor, out_NHD: Tensor, lse_NH: Tensor, where: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same gradients by torch's flash attention, which takes the result and the sums of exponentials of whichever kernel made them. Held to one order of sums, so that it repeats exactly.
    Segments must be `whole`, and causal without a window."""
    starts = F.pad(where.table[:, 1].cumsum(0), (1, 0)).to(torch.int32)
    lse_HN = (lse_NH.t() / LOG2E).contiguous()
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q_NHD.device), torch.empty(0, device=q_NHD.device)
    with _one_order():
        found = torch.ops.aten._flash_attention_backward(
            grad_NHD,
            q_NHD,
            k_NKD,
            v_NKD,
            out_NHD,
            lse_HN,
            starts,
            starts,
            where.queries,
            where.keys,
            0.0,
            True,
            state,
            unused,
            scale=scale,
            window_size_left=-1,
            window_size_right=0,
        )
    return found[0], found[1], found[2]


@contextlib.contextmanager
def _one_order() -> Iterator[None]:
    """torch's deterministic algorithms for the one call that has them: flash attention asks for the strict mode, and cuBLAS would refuse to run without a workspace in it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, where: Segments, by_flash: bool, *settings: Any
    ) -> Tensor:
        out, lse = block_attention(q, k, v, sinks_H, where.table, *settings, where.queries)
        ctx.save_for_backward(q, k, v, sinks_H, out, lse)
        ctx.where, ctx.by_flash, ctx.settings = where, by_flash, settings
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks_H, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        where: Segments = ctx.where
        if ctx.by_flash:
            return *flash_backward(q, k, v, grad, out, lse, where, ctx.settings[0]), None, None, None, *(None,) * len(ctx.settings)
        delta = (grad.float() * out.float()).sum(-1)
        found = block_attention_backward(q, k, v, grad, lse, delta, where.table, *ctx.settings, where.queries, where.keys)
        grad_sinks = None
        if sinks_H is not None:
            # Queries of no segment have no result, and delta 0.
            grad_sinks = -(torch.exp2(sinks_H.float() * LOG2E - lse) * delta).sum(0).to(sinks_H.dtype)
        return *found, grad_sinks, None, None, *(None,) * len(ctx.settings)


def attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    documents_q_BS: Tensor | None = None,
    documents_k_BT: Tensor | None = None,
    positions_q_BS: Tensor | None = None,
    positions_k_BT: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """As `intarsia.ops.attention`, for segments of consecutive positions. UsageError for other masks."""
    masks = (documents_q_BS, documents_k_BT, positions_q_BS, positions_k_BT, packing)
    return _attended(q_BSHD, k_BTKD, v_BTKD, scale, window, softcap, sinks_H, masks, False)


def attention_by_flash(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    documents_q_BS: Tensor | None = None,
    documents_k_BT: Tensor | None = None,
    positions_q_BS: Tensor | None = None,
    positions_k_BT: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """As `attention`, of the same bits, and its gradients by `flash_backward` where that takes the call."""
    plain = window is None and softcap is None and sinks_H is None
    width = q_BSHD.shape[-1]
    by_flash = plain and width == v_BTKD.shape[-1] and not width % 8 and width <= WIDEST and q_BSHD.dtype != torch.float32
    masks = (documents_q_BS, documents_k_BT, positions_q_BS, positions_k_BT, packing)
    return _attended(q_BSHD, k_BTKD, v_BTKD, scale, window, softcap, sinks_H, masks, by_flash)


def _attended(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
    masks: tuple[Any, ...],
    by_flash: bool,
) -> Tensor:
    if q_BSHD.dtype != k_BTKD.dtype or q_BSHD.dtype != v_BTKD.dtype:
        raise UsageError(f"attention/blocks takes one dtype, and was given {q_BSHD.dtype}, {k_BTKD.dtype} and {v_BTKD.dtype}.")
    rows, queries = q_BSHD.shape[:2]
    if not q_BSHD.numel():
        return q_BSHD.new_zeros(*q_BSHD.shape[:3], v_BTKD.shape[-1])
    where = segments(rows, queries, k_BTKD.shape[1], q_BSHD.device, *masks)
    q_NHD, k_MKD, v_MKD = (_dense(x) for x in (q_BSHD.flatten(0, 1), where.line(k_BTKD), where.line(v_BTKD)))
    out = _Attention.apply(q_NHD, k_MKD, v_MKD, sinks_H, where, by_flash and where.whole, scale, window, softcap)
    return out.unflatten(0, (rows, queries))


def _dense(x_NHD: Tensor) -> Tensor:
    return x_NHD if x_NHD.stride(-1) == 1 else x_NHD.contiguous()


def prepare(packing: Packing, windows: Any, documents_BS: Tensor) -> None:
    """The segments of a packed batch, for all layers."""
    packing.prepared["segments", documents_BS.device] = of_lengths(packing.lengths, documents_BS.device)


attention.prepare = prepare  # type: ignore[attr-defined]
attention_by_flash.prepare = prepare  # type: ignore[attr-defined]
