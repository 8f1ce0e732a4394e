"""Products of float8 matrices with scales: activations by pieces of 128 columns, weights by tiles of 128 x 128.

y[m, n] = sum over k of  x_scale[k, m] * w_scale[n // 128, k] * sum over the 128 columns of piece k of  x[m, :] * w[n, :]

The inner sums are the tensor cores', whose accumulator for float8 is narrower than float32; the outer sum is in float32. Two implementations: cuBLAS through torch, where torch
and the device have it, and Triton.

Shape suffixes: M rows, N columns of the result, K summed over, n and k their pieces of 128.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.fp8.tiles import PIECE

# Rows, columns, stages and warps of a program.
CONFIGS = ((128, 128, 4, 8), (128, 128, 4, 4), (128, 256, 3, 8), (64, 128, 4, 4), (64, 64, 5, 4), (128, 64, 5, 4), (256, 128, 3, 8))


@triton.jit
def _product(
    x_descriptor,
    weight_descriptor,
    y_pointer,
    x_scales_pointer,
    weight_scales_pointer,
    rows,
    padded,
    columns,
    weight_scales_row,
    DEPTH: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run at the same time share rows of x and of the weight: GROUP blocks of rows for each block of columns.
    program, blocks_m, blocks_n = tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    group = program // (GROUP * blocks_n)
    first = group * GROUP
    height = tl.minimum(blocks_m - first, GROUP)
    row = (first + program % (GROUP * blocks_n) % height) * BLOCK_M
    column = program % (GROUP * blocks_n) // height * BLOCK_N
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    x_scales = x_scales_pointer + m
    weight_scales = weight_scales_pointer + n // PIECE * weight_scales_row
    y = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(DEPTH // PIECE):
        x = x_descriptor.load([row, k * PIECE])
        if IS_TRANSPOSED:
            part = tl.dot(x, weight_descriptor.load([k * PIECE, column]))
        else:
            part = tl.dot(x, weight_descriptor.load([column, k * PIECE]).T)
        x_scale = tl.load(x_scales + k * padded, mask=m < padded, other=0.0)
        if BLOCK_N <= PIECE:
            scale = x_scale * tl.load(weight_scales_pointer + column // PIECE * weight_scales_row + k)
            y += part * scale[:, None]
        else:
            weight_scale = tl.load(weight_scales + k, mask=n < columns, other=0.0)
            y += part * (x_scale[:, None] * weight_scale[None, :])
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(y_pointer + m.to(tl.int64)[:, None] * columns + n[None, :], y.to(y_pointer.dtype.element_ty), mask=inside)


def triton_product(
    x_MK: Tensor,
    x_scales_kM: Tensor,
    weight_NK: Tensor,
    weight_scales_nk: Tensor,
    dtype: torch.dtype,
    rows: int,
    config: tuple[int, ...],
    is_transposed: bool = False,
) -> Tensor:
    """The first `rows` rows of the product, in Triton. `is_transposed`: the weight is given as [K, N]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block_m, block_n, stages, warps = config
    padded = x_MK.shape[0]
    columns = weight_NK.shape[is_transposed]
    y_MN = torch.empty(rows, columns, dtype=dtype, device=x_MK.device)
    _product[(triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n),)](
        TensorDescriptor.from_tensor(x_MK, [block_m, PIECE]),
        TensorDescriptor.from_tensor(weight_NK, [PIECE, block_n] if is_transposed else [block_n, PIECE]),
        y_MN,
        x_scales_kM,
        weight_scales_nk,
        rows,
        padded,
        columns,
        weight_scales_nk.stride(0),
        DEPTH=x_MK.shape[1],
        IS_TRANSPOSED=is_transposed,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PIECE=PIECE,
        GROUP=8,
        num_warps=warps,
        num_stages=stages,
    )
    return y_MN


def torch_product(x_MK: Tensor, x_scales_kM: Tensor, weight_NK: Tensor, weight_scales_nk: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The first `rows` rows of the product, by cuBLAS. It wants rows of weight scales in multiples of 4."""
    pieces = weight_scales_nk.shape[1]
    scales_nk = F.pad(weight_scales_nk, (0, -pieces % 4)) if pieces % 4 else weight_scales_nk
    kinds: Any = F.ScalingType  # type: ignore[attr-defined]
    return F.scaled_mm(  # type: ignore[attr-defined]
        x_MK, weight_NK.t(), x_scales_kM.t(), kinds.BlockWise1x128, scales_nk.t(), kinds.BlockWise128x128, output_dtype=dtype
    )[:rows]


def config_for(rows: int, columns: int) -> tuple[int, ...]:
    """Which of CONFIGS: small blocks where large ones would leave the device idle. A rule and no measurement, so that equal runs give equal bits."""
    if triton.cdiv(rows, 128) * triton.cdiv(columns, 128) >= 96:
        return CONFIGS[0]
    return CONFIGS[4]


@functools.cache
def has_torch_product(device: torch.device) -> bool:
    """Whether torch multiplies such matrices on this device: tried once."""
    if not hasattr(F, "scaled_mm") or device.type != "cuda":
        return False
    x = torch.zeros(128, 512, device=device).to(torch.float8_e4m3fn)
    x_scales, weight_scales = torch.ones(4, 128, device=device), torch.ones(1, 4, device=device)
    try:
        torch_product(x, x_scales, x, weight_scales, torch.bfloat16, 128)
    except (RuntimeError, ValueError, AttributeError):
        return False
    return True
