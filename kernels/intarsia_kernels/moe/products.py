"""`grouped_linear` by torch's grouped product, and `scaled_grouped_linear` before it. M rows, E groups, I input and O output features.

torch leaves rows after the last group, and the weight gradient of a group without rows, as the memory was: two small kernels write zeros there, and their programs elsewhere end at once.
The groups' sizes stay on the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from intarsia_float8.format import dequantise
from intarsia_models_common.moe.products import grouped, scaled
from torch import Tensor
from torch.library import wrap_triton

from intarsia_kernels.fp8 import tiles

_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm

ALIGNED = 16
"""Bytes: what strides of the operands are multiples of."""
ROWS, COLUMNS = 16, 1024
ELEMENTS = 16384
"""What a program clears: of rows after the last group, of the gradient of a group without rows."""


@triton.jit
def _clear_tail(y_pointer, offsets_pointer, groups, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    valid = tl.load(offsets_pointer + groups - 1)
    first = tl.program_id(0) * ROWS
    if first + ROWS > valid:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = ((row >= valid) & (row < rows))[:, None] & (column < columns)[None, :]
        zeros = tl.zeros([ROWS, BLOCK], dtype=y_pointer.dtype.element_ty)
        tl.store(y_pointer + row.to(tl.int64)[:, None] * columns + column[None, :], zeros, mask=mask)


@triton.jit
def _clear_empty(grad_pointer, counts_pointer, numel, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    if tl.load(counts_pointer + group) == 0:
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(grad_pointer + group * numel + offsets, tl.zeros([BLOCK], dtype=grad_pointer.dtype.element_ty), mask=offsets < numel)


@torch.library.triton_op("intarsia::grouped_mm_product", mutates_args={})
def product(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """See `intarsia_models_common.moe.products.product`."""
    if not x_MI.numel() or not weight_EOI.numel():
        return x_MI.new_zeros(x_MI.shape[0], weight_EOI.shape[1])
    offsets_E = counts_E.cumsum(0, dtype=torch.int32)
    y_MO = _grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=offsets_E)
    rows, columns = y_MO.shape
    grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    wrap_triton(_clear_tail)[grid](y_MO, offsets_E, offsets_E.shape[0], rows, columns, ROWS=ROWS, BLOCK=COLUMNS)
    return y_MO


@torch.library.triton_op("intarsia::grouped_mm_weight_gradient", mutates_args={})
def weight_gradient(grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor) -> Tensor:
    """See `intarsia_models_common.moe.products.weight_gradient`."""
    if not grad_MO.numel() or not x_MI.numel():
        return x_MI.new_zeros(counts_E.shape[0], grad_MO.shape[1], x_MI.shape[1])
    grad_EOI = _grouped_mm(grad_MO.t(), x_MI, offs=counts_E.cumsum(0, dtype=torch.int32))
    numel = grad_EOI.shape[1] * grad_EOI.shape[2]
    wrap_triton(_clear_empty)[(counts_E.shape[0], triton.cdiv(numel, ELEMENTS))](grad_EOI, counts_E, numel, BLOCK=ELEMENTS, num_warps=8)
    return grad_EOI


_grouped = grouped(product, weight_gradient)


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """As the operator `grouped_linear`."""
    return _grouped(x_MI.contiguous(), weight_EOI, counts_E)


def supports(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> str | None:
    """Why a call cannot be taken."""
    if x_MI.dtype != weight_EOI.dtype:
        return f"values in {x_MI.dtype} and weights in {weight_EOI.dtype}"
    if x_MI.dtype != torch.bfloat16 and x_MI.is_cuda:
        return f"values in {x_MI.dtype}"
    if any(size * x_MI.element_size() % ALIGNED for size in weight_EOI.shape[1:]):
        return f"matrices of {weight_EOI.shape[1]} x {weight_EOI.shape[2]}: rows and columns must be multiples of {ALIGNED // x_MI.element_size()}"
    return None


grouped_linear.supports = supports  # type: ignore[attr-defined]
grouped_linear.weight_gradient = weight_gradient  # type: ignore[attr-defined]


def _expand(payload_EOI: Tensor, scales_Eoi: Tensor, tile: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weights, by the kernel where it takes them."""
    out_EOI = torch.empty(payload_EOI.shape, dtype=dtype, device=payload_EOI.device)
    if tiles.supports_dequantise(payload_EOI, scales_Eoi, tile, out_EOI) is not None:
        return dequantise(payload_EOI, scales_Eoi, tile, dtype)
    tiles.dequantise_tiles(payload_EOI, scales_Eoi, tile, out_EOI)
    return out_EOI


_scaled = scaled(_expand)


def scaled_grouped_linear(
    x_MI: Tensor, weight_EOI: Tensor, payload_EOI: Tensor, scales_Eoi: Tensor, counts_E: Tensor, tile: tuple[int, int] = (128, 128)
) -> Tensor:
    """As the operator `scaled_grouped_linear`."""
    return _scaled(x_MI, weight_EOI, payload_EOI, scales_Eoi, counts_E, tile)
