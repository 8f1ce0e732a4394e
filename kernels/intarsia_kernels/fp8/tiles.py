"""Float8 with scales in Triton: weights by tiles, activations by pieces of rows, and the transpose that the input's gradient needs.

The arithmetic is that of `intarsia_float8.format`, bit for bit: scale = max(largest, 1e-12) / 448 in float32, payload = value * (1 / scale) rounded to nearest even.
The largest magnitude is found among bit patterns, whose order as integers is that of the numbers, with NaN above all: a NaN is not hidden.

Shape suffixes: M rows, K columns, k pieces of 128 columns; O output and I input features, o and i their tiles.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from intarsia_float8.format import FORMAT, LARGEST, SMALLEST
from torch import Tensor

PIECE = 128
"""Columns of an activation's row that share a scale."""
MAX_TILE = 2**15
"""Elements of a tile that a program holds at once."""
ROWS_PER_PROGRAM = 32
WARPS = 8
"""Of a program that holds a tile of 128 x 128."""
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Boxes = tuple[tuple[int, int, int, int, int], ...]


@triton.jit
def scale_of(bits, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Scales for the largest magnitudes, which are given as bit patterns."""
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    if POWER_OF_TWO:
        pattern = scale.to(tl.int32, bitcast=True)
        up = ((pattern + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(pattern < 0x7F800000, up, scale)
    return scale


@triton.jit
def encode(values, scale, LARGEST: tl.constexpr):
    """values / scale by the reciprocal, clamped: what is cast to float8."""
    scaled = values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))


@triton.jit
def find_box(boxes_pointer, boxes, tile, BOXES: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, WHOLE: tl.constexpr):
    """Where tile number `tile` of a table of boxes lies: the first elements of value and payload, the number of its scale, columns of its box, rows and columns left."""
    listed = tl.arange(0, BOXES)
    firsts = tl.load(boxes_pointer + listed * 6 + 5, mask=listed < boxes, other=9223372036854775807)
    about = boxes_pointer + (tl.sum((firsts <= tile).to(tl.int32), axis=0) - 1) * 6
    value, payload, scale = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    rows, columns = tl.load(about + 3).to(tl.int32), tl.load(about + 4).to(tl.int32)
    tile -= tl.load(about + 5).to(tl.int32)
    if WHOLE:  # Without what is promised here, every element would be an access of its own.
        value, payload, columns = tl.multiple_of(value, 16), tl.multiple_of(payload, 16), tl.multiple_of(columns, 16)
    across = tl.cdiv(columns, TILE_I)
    row, column = tile // across * TILE_O, tile % across * TILE_I
    begin = row.to(tl.int64) * columns + column
    return value + begin, payload + begin, scale + tile, columns, rows - row, columns - column


@triton.jit
def _quantise_tiles(
    values_pointer,
    payload_pointer,
    scales_pointer,
    boxes_pointer,
    boxes,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BOXES: tl.constexpr,
    COMPUTE: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WHOLE: tl.constexpr,
):
    value, payload, scale_at, columns, rows_left, columns_left = find_box(
        boxes_pointer, boxes, tl.program_id(0), BOXES, TILE_O, TILE_I, WHOLE
    )
    # Eight at a time: what a thread reads is what it writes.
    o, i = tl.arange(0, BLOCK_O)[:, None], tl.max_contiguous(tl.arange(0, BLOCK_I), 8)[None, :]
    inside = (o < TILE_O) & (i < TILE_I) & (o < rows_left) & (i < columns_left)
    if WHOLE:
        stored = tl.load(values_pointer + value + (o * columns + i))
    else:
        stored = tl.load(values_pointer + value + (o * columns + i), mask=inside, other=0.0)
    values = stored.to(COMPUTE).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = scale_of(tl.max(tl.max(bits, axis=1), axis=0), LARGEST, SMALLEST, POWER_OF_TWO)
    encoded = encode(values, scale, LARGEST).to(payload_pointer.dtype.element_ty)
    if WHOLE:
        tl.store(payload_pointer + payload + (o * columns + i), encoded)
    else:
        tl.store(payload_pointer + payload + (o * columns + i), encoded, mask=inside)
    tl.store(scales_pointer + scale_at, scale)


class Table(NamedTuple):
    """Boxes on the device, each with the number of its first tile; how many there are, and how many tiles."""

    rows: Tensor
    boxes: int
    tiles: int


def is_whole(box: tuple[int, ...], tile: tuple[int, int]) -> bool:
    """Whether a box is made of whole tiles whose rows can be read 16 elements at a time."""
    value, payload, _, rows, columns = box
    powers = all(size == triton.next_power_of_2(size) for size in tile)
    return powers and tile[1] % 16 == 0 and not (value % 16 or payload % 16 or rows % tile[0] or columns % tile[1])


@functools.lru_cache(maxsize=4096)
def tables(boxes: Boxes, tile: tuple[int, int], device: torch.device) -> tuple[Table | None, Table | None]:
    """Tables of those of `boxes` that are whole, and of the others."""
    found: list[Table | None] = []
    for wanted in (True, False):
        rows, count = [], 0
        for box in boxes:
            if is_whole(box, tile) == wanted and box[3] * box[4]:
                rows.append((*box, count))
                count += triton.cdiv(box[3], tile[0]) * triton.cdiv(box[4], tile[1])
        found.append(Table(torch.tensor(rows, dtype=torch.int64).to(device), len(rows), count) if rows else None)
    return found[0], found[1]


def quantise_tiles(values: Tensor, wire: Tensor, boxes: Boxes, tile: tuple[int, int], power_of_two: bool, dtype: torch.dtype) -> None:
    """As `intarsia_flexshard.tiles.quantise_tiles`: one launch for all boxes of whole tiles, and one for the others. Tables of boxes are built at the first call."""
    blocks = triton.next_power_of_2(tile[0]), triton.next_power_of_2(tile[1])
    for table, is_whole in zip(tables(boxes, tile, values.device), (True, False), strict=True):
        if table is None:
            continue
        _quantise_tiles[(table.tiles,)](
            values,
            wire.view(FORMAT),
            wire[: wire.numel() // 4 * 4].view(torch.float32),
            table.rows,
            table.boxes,
            TILE_O=tile[0],
            TILE_I=tile[1],
            BLOCK_O=blocks[0],
            BLOCK_I=blocks[1],
            BOXES=triton.next_power_of_2(table.boxes),
            COMPUTE=TRITON_DTYPES[dtype],
            LARGEST=LARGEST,
            SMALLEST=SMALLEST,
            POWER_OF_TWO=power_of_two,
            WHOLE=is_whole,
            num_warps=WARPS if blocks[0] * blocks[1] >= 8192 else 4,
        )


def supports_quantise(
    values: Tensor, wire: Tensor, boxes: Boxes, tile: tuple[int, int], power_of_two: bool, dtype: torch.dtype
) -> str | None:
    """Why a call cannot be taken."""
    if values.dtype not in TRITON_DTYPES or dtype not in TRITON_DTYPES:
        return f"values in {values.dtype} for {dtype}"
    return _tile_too_large(tile)


quantise_tiles.supports = supports_quantise  # type: ignore[attr-defined]


def _tile_too_large(tile: tuple[int, int]) -> str | None:
    if triton.next_power_of_2(tile[0]) * triton.next_power_of_2(tile[1]) > MAX_TILE:
        return f"a tile of {tile[0]} x {tile[1]}: a program holds {MAX_TILE} elements"
    return None


@triton.jit
def _dequantise_tiles(
    payload_pointer,
    scales_pointer,
    out_pointer,
    rows,
    columns,
    payload_stack,
    payload_row,
    scales_stack,
    scales_row,
    out_stack,
    out_row,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    across = tl.cdiv(columns, TILE_I)
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    matrix = tl.program_id(1).to(tl.int64)
    row, column = tile_row * TILE_O, tile_column * TILE_I
    o, i = tl.arange(0, BLOCK_O)[:, None], tl.arange(0, BLOCK_I)[None, :]
    inside = (o < TILE_O) & (i < TILE_I) & (row + o < rows) & (column + i < columns)
    scale = tl.load(scales_pointer + matrix * scales_stack + tile_row * scales_row + tile_column)
    payload_pointer += matrix * payload_stack + row.to(tl.int64) * payload_row + column
    out_pointer += matrix * out_stack + row.to(tl.int64) * out_row + column
    payload = tl.load(payload_pointer + (o * payload_row + i), mask=inside)
    tl.store(out_pointer + (o * out_row + i), (payload.to(tl.float32) * scale).to(out_pointer.dtype.element_ty), mask=inside)


def dequantise_tiles(payload: Tensor, scales: Tensor, tile: tuple[int, int], out: Tensor) -> None:
    """As `intarsia_flexshard.tiles.dequantise_tiles`."""
    *stack, rows, columns = payload.shape
    if not payload.numel():
        return
    stacked = bool(stack)
    blocks = triton.next_power_of_2(tile[0]), triton.next_power_of_2(tile[1])
    _dequantise_tiles[(triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]), stack[0] if stacked else 1)](
        payload,
        scales,
        out,
        rows,
        columns,
        payload.stride(0) if stacked else 0,
        payload.stride(-2),
        scales.stride(0) if stacked else 0,
        scales.stride(-2),
        out.stride(0) if stacked else 0,
        out.stride(-2),
        TILE_O=tile[0],
        TILE_I=tile[1],
        BLOCK_O=blocks[0],
        BLOCK_I=blocks[1],
        num_warps=WARPS if blocks[0] * blocks[1] >= 8192 else 4,
    )


def supports_dequantise(payload: Tensor, scales: Tensor, tile: tuple[int, int], out: Tensor) -> str | None:
    """Why a call cannot be taken."""
    if out.dtype not in TRITON_DTYPES:
        return f"values in {out.dtype}"
    if payload.dim() not in (2, 3) or any(tensor.numel() and tensor.stride(-1) != 1 for tensor in (payload, scales, out)):
        return "neither a matrix nor a stack of matrices, or columns that are not adjacent"
    return _tile_too_large(tile)


dequantise_tiles.supports = supports_dequantise  # type: ignore[attr-defined]


@triton.jit
def _quantise_rows(
    x_pointer,
    payload_pointer,
    scales_pointer,
    rows,
    padded,
    columns,
    stride,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    wide = m.to(tl.int64)[:, None]
    x = tl.load(x_pointer + wide * stride + c[None, :], mask=(m < rows)[:, None] & (c < columns)[None, :], other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = scale_of(tl.max(bits, axis=1), LARGEST, SMALLEST, False)
    payload = encode(x, scale[:, None], LARGEST).to(payload_pointer.dtype.element_ty)
    tl.store(payload_pointer + wide * columns + c[None, :], payload, mask=(m < padded)[:, None] & (c < columns)[None, :])
    tl.store(scales_pointer + tl.program_id(1).to(tl.int64) * padded + m, scale, mask=m < padded)


@torch.library.custom_op("intarsia::fp8_quantise_rows", mutates_args=())
def quantise_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Payload [M, K] and scales [k, M] of rows in pieces of 128 columns; M is rounded up to a multiple of 4, and the rows added are zero.

    An opaque operator, so that a compiler that meets the same activation twice (queries, keys and values) quantises it once.
    """
    rows, columns = x_MK.shape
    padded = -(-rows // 4) * 4
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    payload_MK = torch.empty(padded, columns, dtype=FORMAT, device=x_MK.device)
    scales_kM = torch.empty(triton.cdiv(columns, PIECE), padded, dtype=torch.float32, device=x_MK.device)
    if rows:
        grid = (triton.cdiv(padded, ROWS_PER_PROGRAM), scales_kM.shape[0])
        _quantise_rows[grid](
            x_MK,
            payload_MK,
            scales_kM,
            rows,
            padded,
            columns,
            x_MK.stride(0),
            ROWS=ROWS_PER_PROGRAM,
            PIECE=PIECE,
            LARGEST=LARGEST,
            SMALLEST=SMALLEST,
        )
    return payload_MK, scales_kM


@quantise_rows.register_fake
def _(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x_MK.shape
    padded = (rows + 3) // 4 * 4
    return x_MK.new_empty(padded, columns, dtype=FORMAT), x_MK.new_empty((columns + PIECE - 1) // PIECE, padded, dtype=torch.float32)


@triton.jit
def _transpose(payload_pointer, out_pointer, scales_pointer, scales_out_pointer, rows, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    a, b = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    payload_pointer += row.to(tl.int64) * columns + column
    out_pointer += column.to(tl.int64) * rows + row
    block = tl.load(payload_pointer + (a * columns + b), mask=(row + a < rows) & (column + b < columns), other=0)
    tl.store(out_pointer + (a * rows + b), tl.trans(block), mask=(column + a < columns) & (row + b < rows))
    scale = tl.load(scales_pointer + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))
    tl.store(scales_out_pointer + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), scale)


@torch.library.custom_op("intarsia::fp8_transpose", mutates_args=())
def transpose(payload_OI: Tensor, scales_oi: Tensor) -> tuple[Tensor, Tensor]:
    """Payload [I, O] and scales [i, o], contiguous, of a payload with scales for tiles of 128 x 128."""
    rows, columns = payload_OI.shape
    grid = (triton.cdiv(rows, PIECE), triton.cdiv(columns, PIECE))
    out = torch.empty(columns, rows, dtype=torch.uint8, device=payload_OI.device)
    scales = torch.empty(grid[1], grid[0], dtype=scales_oi.dtype, device=payload_OI.device)
    _transpose[grid](payload_OI.view(torch.uint8), out, scales_oi.contiguous(), scales, rows, columns, BLOCK=PIECE, num_warps=8)
    return out.view(FORMAT), scales


@transpose.register_fake
def _(payload_OI: Tensor, scales_oi: Tensor) -> tuple[Tensor, Tensor]:
    return payload_OI.new_empty(payload_OI.shape[::-1]), scales_oi.new_empty(scales_oi.shape[::-1])
