"""`grouped_linear` by torch's grouped product, and `scaled_grouped_linear` before it. M rows, E groups, I input and O output features.

torch leaves rows after the last group, and the weight gradient of a group without rows, as the memory was: two small kernels write zeros there, by few programs, since as a rule there is nothing to write.
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

from intarsia_kernels.direct import cdiv, direct_op, wrap_triton
from intarsia_kernels.fp8 import tiles

_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm

ALIGNED = 16
"""Bytes: what strides of the operands are multiples of."""
ROWS, COLUMNS = 16, 1024
ELEMENTS = 16384
"""What a program clears at once: of rows after the last group, of the gradient of a group without rows."""
PROGRAMS, PROGRAMS_OF_GROUP = 256, 8
"""How many programs look for such rows, and for each such group."""


@triton.jit
def _clear_tail(y_pointer, ends_pointer, groups, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    valid = tl.load(ends_pointer + groups - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros([ROWS, BLOCK], dtype=y_pointer.dtype.element_ty)
    # There is no tail as a rule: few programs look, and share what there is.
    first = valid + tl.program_id(0) * ROWS
    while first < rows:
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(y_pointer + row.to(tl.int64)[:, None] * columns + column[None, :], zeros, mask=mask)
        first += tl.num_programs(0) * ROWS


@triton.jit
def _clear_empty(grad_pointer, other_pointer, ends_pointer, numel, BLOCK: tl.constexpr):
    """Of one gradient, or of two by a third dimension of the grid."""
    group = tl.program_id(0).to(tl.int64)
    before = tl.load(ends_pointer + group - 1, mask=group > 0, other=0)
    if tl.load(ends_pointer + group) == before:
        zeros = tl.zeros([BLOCK], dtype=grad_pointer.dtype.element_ty)
        first = tl.program_id(1) * BLOCK
        while first < numel:
            offsets = first + tl.arange(0, BLOCK)
            if tl.program_id(2) == 0:
                tl.store(grad_pointer + group * numel + offsets, zeros, mask=offsets < numel)
            else:
                tl.store(other_pointer + group * numel + offsets, zeros, mask=offsets < numel)
            first += tl.num_programs(1) * BLOCK


def ends_of(counts_E: Tensor) -> Tensor:
    """int32: where each group ends, as torch's product wants it."""
    return counts_E.cumsum(0, dtype=torch.int32)


@direct_op("intarsia::grouped_mm_product")
def _product(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    if not x_MI.numel() or not weight_EOI.numel():
        return x_MI.new_zeros(x_MI.shape[0], weight_EOI.shape[1])
    y_MO = _grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)
    rows, columns = y_MO.shape
    grid = min(PROGRAMS, cdiv(rows, ROWS)), cdiv(columns, COLUMNS)
    wrap_triton(_clear_tail)[grid](y_MO, ends_E, ends_E.shape[0], rows, columns, ROWS=ROWS, BLOCK=COLUMNS)
    return y_MO


@direct_op("intarsia::grouped_mm_weight_gradient")
def _weight_gradient(grad_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> Tensor:
    if not grad_MO.numel() or not x_MI.numel():
        return x_MI.new_zeros(ends_E.shape[0], grad_MO.shape[1], x_MI.shape[1])
    grad_EOI = _grouped_mm(grad_MO.t(), x_MI, offs=ends_E)
    clear_empty(grad_EOI, None, ends_E)
    return grad_EOI


def clear_empty(grad_EOI: Tensor, other_EOI: Tensor | None, ends_E: Tensor) -> None:
    """Write zeros where a group without rows left the memory of its gradient as it was; of two gradients of one shape in one launch."""
    numel = grad_EOI.shape[1] * grad_EOI.shape[2]
    grid = ends_E.shape[0], min(PROGRAMS_OF_GROUP, cdiv(numel, ELEMENTS)), 1 if other_EOI is None else 2
    other = grad_EOI if other_EOI is None else other_EOI
    wrap_triton(_clear_empty)[grid](grad_EOI, other, ends_E, numel, BLOCK=ELEMENTS, num_warps=8)


def weight_gradient(grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor) -> Tensor:
    """See `intarsia_models_common.moe.products.weight_gradient`."""
    return _weight_gradient(grad_MO, x_MI, ends_of(counts_E))


_grouped = grouped(_product, _weight_gradient, ends_of)


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
