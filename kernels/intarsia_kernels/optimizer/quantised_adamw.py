"""AdamW that also quantises: the new values go to the masters and, as float8 with a scale for each tile, onto the wire of a sharder's next gather.

A program updates one tile, some rows at a time, and finds its largest magnitude; the scale is known only then, and what the program has just written is read once more, from the
cache. The wire's bits are those of `intarsia_kernels.fp8.tiles.quantise_tiles` afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from intarsia_float8.format import FORMAT, LARGEST, SMALLEST
from torch import Tensor

from intarsia_kernels.fp8.tiles import TRITON_DTYPES, Boxes, encode, find_box, is_whole, scale_of, tables
from intarsia_kernels.optimizer.adamw import Gradient, contributions, numbers, speeds, updated
from intarsia_kernels.optimizer.adamw import supports as supports_adamw
from intarsia_kernels.optimizer.blocks import gradient, read_master, write_master
from intarsia_kernels.optimizer.launch import Launcher

BLOCK, WARPS, STAGES = 4096, 8, 1


@triton.jit(do_not_specialize=["boxes"], do_not_specialize_on_alignment=["step", "lr"])
def _adamw_tiles(
    value, low, mean, square, p0, p1, p2, p3, p4, p5, p6, p7, payload, scales, table,
    boxes, step, lr, share, log_mean, log_square, new_mean, new_square, keep_square, eps, weight_decay,
    SPLIT: tl.constexpr, LOADED: tl.constexpr, PARTS: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BOXES: tl.constexpr,
    COMPUTE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    at, payload_at, scale_at, columns, _, _ = find_box(table, boxes, tl.program_id(0), BOXES, TILE_O, TILE_I, True)
    value, low, mean, square, payload = value + at, low + at, mean + at, square + at, payload + payload_at
    p0, p1, p2, p3, p4, p5, p6, p7 = p0 + at, p1 + at, p2 + at, p3 + at, p4 + at, p5 + at, p6 + at, p7 + at
    rate, root, shrink = speeds(step, lr, log_mean, log_square, weight_decay, LOADED)
    o = tl.arange(0, ROWS)[:, None]
    # Four at a time: what a thread reads of the widest is what it writes of all.
    i = tl.max_contiguous(tl.arange(0, TILE_I), 4)[None, :]
    largest = tl.zeros([ROWS, TILE_I], dtype=tl.int32)
    # Rows of one tile are nobody else's: later ones may be read before earlier ones are written.
    for first in tl.range(0, TILE_O, ROWS, num_stages=STAGES):
        offsets = (first + o) * columns + i
        w = read_master(value, low, offsets, 0, SPLIT, True)
        g = gradient(p0, p1, p2, p3, p4, p5, p6, p7, offsets, 0, share, PARTS, True)
        m = tl.load(mean + offsets).to(tl.float32)
        v = tl.load(square + offsets).to(tl.float32)
        w, m, v = updated(w, g, m, v, rate, root, shrink, new_mean, new_square, keep_square, eps)
        tl.store(mean + offsets, m.to(mean.dtype.element_ty))
        tl.store(square + offsets, v.to(square.dtype.element_ty))
        write_master(value, low, offsets, 0, w, SPLIT, True)
        seen = w.to(value.dtype.element_ty).to(COMPUTE).to(tl.float32)
        largest = tl.maximum(largest, seen.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = scale_of(tl.max(tl.max(largest, axis=1), axis=0), LARGEST, SMALLEST, POWER_OF_TWO)
    tl.debug_barrier()  # What one thread has written another may read.
    for first in range(0, TILE_O, ROWS):
        offsets = (first + o) * columns + i
        seen = tl.load(value + offsets).to(COMPUTE).to(tl.float32)
        tl.store(payload + offsets, encode(seen, scale, LARGEST).to(payload.dtype.element_ty))
    tl.store(scales + scale_at, scale)


_launch = Launcher(_adamw_tiles, WARPS, contracts=False)


@torch.no_grad()
def adamw_quantised(
    value: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Gradient,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    wire: Tensor,
    boxes: Boxes,
    tile: tuple[int, int],
    power_of_two: bool,
    dtype: torch.dtype,
) -> bool:
    """As `intarsia_optimizers.updates.adamw_quantised`, in one launch."""
    table, _ = tables(boxes, tile, value.device)
    if table is None:
        return True
    loaded = isinstance(lr, Tensor)
    scales = wire[: wire.numel() // 4 * 4].view(torch.float32)
    parts, count, share = contributions(gradient)
    scalars = (table.boxes, step, lr if loaded else float(lr), share, *numbers(*betas, eps, weight_decay))
    rows = max(1, min(tile[0], BLOCK // tile[1]))
    constants = (
        *(low is not None, loaded, count, *tile, rows, STAGES, triton.next_power_of_2(table.boxes)),
        *(TRITON_DTYPES[dtype], LARGEST, SMALLEST, power_of_two),
    )
    tensors = (value, value if low is None else low, mean, square, *parts, wire.view(FORMAT), scales, table.rows)
    _launch(table.tiles, tensors, scalars, constants, table.boxes)
    return True


def supports(
    value: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Gradient,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    wire: Tensor,
    boxes: Boxes,
    tile: tuple[int, int],
    power_of_two: bool,
    dtype: torch.dtype,
) -> str | None:
    """Why a call cannot be taken."""
    if value.dtype not in TRITON_DTYPES or dtype not in TRITON_DTYPES:
        return f"values in {value.dtype} for {dtype}"
    if wire.device != value.device:
        return "the wire is on another device"
    if not all(is_whole(box, tile) for box in boxes):
        return f"boxes that are not made of whole tiles of {tile[0]} x {tile[1]}"
    return supports_adamw(value, low, mean, square, gradient, step, lr, betas, eps, weight_decay)


adamw_quantised.supports = supports  # type: ignore[attr-defined]
adamw_quantised.takes_sums = True  # type: ignore[attr-defined]
