"""Products in Triton whose sums go through the inputs in ascending order in one float32 accumulator. N rows, E experts, I input and O output features.

An element's bits are then the same whatever the tile: which tile it is may depend on the number of rows. float32 operands, which no tensor core multiplies exactly, have one tile for all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from intarsia.errors import UsageError
from intarsia_models_common.moe.products import routing
from torch import Tensor

from intarsia_kernels.direct import direct_op, wrap_triton
from intarsia_kernels.invariant.linear import differentiable

TILES = ((16, (16, 64, 128, 4, 4)), (64, (64, 128, 128, 4, 3)), (1 << 62, (128, 256, 64, 8, 3)))
"""Up to how many rows: rows and columns of a tile, inputs of a step, warps, stages."""
WIDE_TILE = (16, 32, 32, 4, 2)
"""The same for float32."""


@triton.jit
def _ascending(
    x_pointer,
    weight_pointer,
    y_pointer,
    rows,
    outputs,
    inputs,
    x_stride,
    weight_stride_o,
    weight_stride_i,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, ROWS)
    # Neighbouring programs share columns: the weight, which is the larger, is read once.
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    x_pointers = x_pointer + row.to(tl.int64)[:, None] * x_stride
    weight_pointers = weight_pointer + column.to(tl.int64)[None, :] * weight_stride_o
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, inputs, STEP):
        index = start + tl.arange(0, STEP)
        x = tl.load(x_pointers + index[None, :], mask=(row < rows)[:, None] & (index < inputs)[None, :], other=0.0)
        weight = tl.load(
            weight_pointers + index.to(tl.int64)[:, None] * weight_stride_i,
            mask=(index < inputs)[:, None] & (column < outputs)[None, :],
            other=0.0,
        )
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    y_pointers = y_pointer + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(y_pointers, total.to(y_pointer.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


@direct_op("intarsia::ascending_product")
def ascending_product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """`x @ weight^T`, [N, O], of two matrices of one dtype; the weight's strides are free."""
    rows, inputs = x_NI.shape
    outputs = weight_OI.shape[0]
    y_NO = x_NI.new_zeros(rows, outputs) if not inputs else x_NI.new_empty(rows, outputs)
    if y_NO.numel() and inputs:
        x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
        wide = x_NI.dtype == torch.float32
        tile_rows, columns, step, warps, stages = WIDE_TILE if wide else next(tile for most, tile in TILES if rows <= most)
        grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(outputs, columns),)
        wrap_triton(_ascending)[grid](
            x_NI,
            weight_OI,
            y_NO,
            rows,
            outputs,
            inputs,
            x_NI.stride(0),
            weight_OI.stride(0),
            weight_OI.stride(1),
            ROWS=tile_rows,
            COLUMNS=columns,
            STEP=step,
            PRECISION="ieee",
            num_warps=warps,
            num_stages=stages,
        )
    return y_NO


_differentiable = differentiable(ascending_product)


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `intarsia.ops.linear`, for bfloat16, float16 and float32."""
    if x_NI.dtype != weight_OI.dtype:
        raise UsageError(f"linear/ascending multiplies matrices of one dtype, and was given {x_NI.dtype} and {weight_OI.dtype}.")
    return _differentiable(x_NI, weight_OI, bias_O)


_routing = routing(ascending_product)


def router_linear(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """As the operator `router_linear`: float32 products, not TF32."""
    return _routing(x_ND, weight_ED)
