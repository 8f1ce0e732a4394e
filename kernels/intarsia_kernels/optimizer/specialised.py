"""Symmetric products on Hopper with roles given to warps. B matrices, M rows and columns, K summed.

    C = alpha X Y^T + beta S + gamma I,  C known to be symmetric

Persistent programs, one for each multiprocessor. One warp copies operand tiles into a ring of four stages (TMA), eight warps multiply 128 x 256 tiles
(wgmma) while it runs ahead, also into the next tile. Only tiles that touch the lower triangle are computed: column block j of 256 pairs with row block
i of 128 where j <= i // 2. A tile below the diagonal leaves twice, once as it is and once transposed, both through shared memory and TMA; the pair
of tiles on the diagonal holds both of its halves itself. Gluon has no interpreter: the kernel is tried on a GPU, and its compilation without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS, COLUMNS, DEPTH, STAGES, STRIP = 128, 256, 64, 4, 64
"""A tile's rows and columns, what is summed in one stage, the stages, and the columns that leave at once."""

WARPS = 8
REGISTERS = 168
"""For each of 12 warps at launch; the copying warps give theirs to the multiplying ones."""


@gluon.jit
def _tile(t, tiles):
    """Batch, row block (of 128) and column block (of 256) of tile t: pairs of row blocks over the lower triangle of 256 x 256 blocks."""
    batch = t // tiles
    half = (t - batch * tiles) // 2
    r = ((gl.sqrt(8.0 * half.to(gl.float32) + 1.0) - 1.0) * 0.5).to(gl.int32)
    r = gl.where((r + 1) * (r + 2) // 2 <= half, r + 1, r)  # The root is a float32.
    r = gl.where(r * (r + 1) // 2 > half, r - 1, r)
    return batch, 2 * r + t % 2, half - r * (r + 1) // 2


@gluon.jit
def _copy(x, y, x_ring, y_ring, full, empty, rows, depth, tiles, total, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr):
    ROWS: gl.constexpr = 128
    COLUMNS: gl.constexpr = 256
    DEPTH: gl.constexpr = 64
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, i, j = _tile(t, tiles)
        for k in range(0, depth, DEPTH):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, x.block_type.nbytes + y.block_type.nbytes)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(x, [batch * depth + k, i * ROWS], ready, x_ring.index(stage))
                tma.async_copy_global_to_shared(y, [batch * depth + k, j * COLUMNS], ready, y_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(x, [batch * rows + i * ROWS, k], ready, x_ring.index(stage))
                tma.async_copy_global_to_shared(y, [batch * rows + j * COLUMNS, k], ready, y_ring.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _halves(tile):
    """The left and the right half of a tile, without moving anything between threads."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1] // 2
    left, right = tile.reshape([rows, 2, columns]).permute((0, 2, 1)).split()
    return left, right


@gluon.jit
def _leave(
    part,
    s_pointer,
    straight,
    mirrored,
    c,
    c_mirrored,
    base,
    row,
    column,
    rows,
    alpha,
    beta,
    gamma,
    below,
    ADDEND: gl.constexpr,
    IDENTITY: gl.constexpr,
):
    """Store `part` [128, 64], whose corner is (row, column), and its transpose if it lies below the diagonal."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16])
    value = gl.convert_layout(part, LAYOUT) * alpha
    at_row = row + gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    at_column = column + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    if ADDEND:
        offsets = at_row[:, None] * rows + at_column[None, :]
        value += beta * gl.load(s_pointer + base.to(gl.int64) * rows + offsets).to(gl.float32)
    if IDENTITY and not below:
        value += gl.where(at_row[:, None] == at_column[None, :], gamma, 0.0)
    out = value.to(c.dtype)
    if below:
        tma.store_wait(pendings=1)
    else:
        tma.store_wait(pendings=0)
    straight.store(out)
    fence_async_shared()
    tma.async_copy_shared_to_global(c, [base + row, column], straight)
    if below:
        tma.store_wait(pendings=1)
        mirrored.permute((1, 0)).store(out)
        fence_async_shared()
        tma.async_copy_shared_to_global(c_mirrored, [base + column, row], mirrored)


@gluon.jit
def _multiply(
    s_pointer, c, c_mirrored, x_ring, y_ring, straight, mirrored, full, empty, rows, depth, tiles, total, alpha, beta, gamma,
    TRANSPOSED: gl.constexpr, STAGES: gl.constexpr, ADDEND: gl.constexpr, IDENTITY: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 128
    COLUMNS: gl.constexpr = 256
    DEPTH: gl.constexpr = 64
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, i, j = _tile(t, tiles)
        sums = warpgroup_mma_init(gl.zeros((ROWS, COLUMNS), dtype=gl.float32, layout=LAYOUT))
        previous = stage
        for k in range(0, depth, DEPTH):
            mbarrier.wait(full.index(stage), phase)
            if TRANSPOSED:
                sums = warpgroup_mma(x_ring.index(stage).permute((1, 0)), y_ring.index(stage), sums, use_acc=k > 0, is_async=True)
            else:
                sums = warpgroup_mma(x_ring.index(stage), y_ring.index(stage).permute((1, 0)), sums, use_acc=k > 0, is_async=True)
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
            mbarrier.arrive(empty.index(previous), count=1, pred=k > 0)
            previous = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        done = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index(previous), count=1)
        below = j < i // 2
        base = batch * rows
        left, right = _halves(done)
        p0, p1 = _halves(left)
        p2, p3 = _halves(right)
        row = i * ROWS
        column = j * COLUMNS
        _leave(p0, s_pointer, straight, mirrored, c, c_mirrored, base, row, column, rows, alpha, beta, gamma, below, ADDEND, IDENTITY)
        _leave(p1, s_pointer, straight, mirrored, c, c_mirrored, base, row, column + 64, rows, alpha, beta, gamma, below, ADDEND, IDENTITY)
        _leave(p2, s_pointer, straight, mirrored, c, c_mirrored, base, row, column + 128, rows, alpha, beta, gamma, below, ADDEND, IDENTITY)
        _leave(p3, s_pointer, straight, mirrored, c, c_mirrored, base, row, column + 192, rows, alpha, beta, gamma, below, ADDEND, IDENTITY)
    tma.store_wait(pendings=0)


@gluon.jit
def _product(
    x, y, s_pointer, c, c_mirrored, rows, depth, tiles, total, alpha, beta, gamma,
    TRANSPOSED: gl.constexpr, STAGES: gl.constexpr, ADDEND: gl.constexpr, IDENTITY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_type.shape[0], x.block_type.shape[1]], x.layout)
    y_ring = gl.allocate_shared_memory(y.dtype, [STAGES, y.block_type.shape[0], y.block_type.shape[1]], y.layout)
    straight = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    mirrored = gl.allocate_shared_memory(c.dtype, c_mirrored.block_type.shape, c_mirrored.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    s_pointer, c, c_mirrored, x_ring, y_ring, straight, mirrored, full, empty, rows, depth, tiles, total, alpha, beta, gamma,
                    TRANSPOSED, STAGES, ADDEND, IDENTITY,
                ),
            ),
            (_copy, (x, y, x_ring, y_ring, full, empty, rows, depth, tiles, total, TRANSPOSED, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


def _descriptor(tensor: Tensor, block: list[int]) -> Any:
    """A view of [B, rows, columns] as one matrix, read or written in blocks."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16 if tensor.dtype == torch.float16 else gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), block, layout)


def product(
    x: Tensor,
    y: Tensor,
    out_BMM: Tensor,
    transposed: bool,
    alpha: float,
    addend_BMM: Tensor | None,
    beta: float,
    gamma: float,
    *,
    stages: int = STAGES,
) -> None:
    """As `reference.symmetric_product`, for contiguous float16 or bfloat16 tensors with M a multiple of 256 and K of 64."""
    batch, rows = out_BMM.shape[0], out_BMM.shape[-1]
    depth = x.shape[1] if transposed else x.shape[2]
    blocks = rows // COLUMNS
    tiles = blocks * (blocks + 1)
    programs = min(tiles * batch, torch.cuda.get_device_properties(x.device).multi_processor_count)
    _product[(programs,)](
        _descriptor(x, [DEPTH, ROWS] if transposed else [ROWS, DEPTH]),
        _descriptor(y, [DEPTH, COLUMNS] if transposed else [COLUMNS, DEPTH]),
        out_BMM if addend_BMM is None else addend_BMM,
        _descriptor(out_BMM, [ROWS, STRIP]),
        _descriptor(out_BMM, [STRIP, ROWS]),
        rows,
        depth,
        tiles,
        tiles * batch,
        alpha,
        beta,
        gamma,
        TRANSPOSED=transposed,
        STAGES=stages,
        ADDEND=addend_BMM is not None,
        IDENTITY=gamma != 0.0,
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
