"""`rms_norm` in Triton. N rows, D columns, P programs of the backward pass.

y = w * x * r,  r = 1 / sqrt(mean(x^2) + eps)
dx = r * (w dy - x r^2 mean(w dy x)),  dw = sum over rows of dy * x r
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

MAX_COLUMNS = 65536
ROWS_PER_PROGRAM = 16
"""Rows over which one program of the backward pass sums dw: fixed, so that the sum's order does not depend on the machine."""


@triton.jit
def _forward(x_pointer, weight_pointer, y_pointer, rstd_pointer, columns, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_pointer + row * columns + offsets, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    # Compilers hand over numbers of Python in float64.
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / columns + tl.cast(eps, tl.float32))
    y = (wide * rstd).to(x.dtype)
    if HAS_WEIGHT:
        y = (y.to(tl.float32) * tl.load(weight_pointer + offsets, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(y_pointer + row * columns + offsets, y, mask=mask)
    tl.store(rstd_pointer + row, rstd)


@triton.jit
def _backward(
    dy_pointer,
    x_pointer,
    weight_pointer,
    rstd_pointer,
    dx_pointer,
    dw_pointer,
    rows,
    columns,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    for i in range(ROWS):
        row = program * ROWS + i
        inside = mask & (row < rows)
        x = tl.load(x_pointer + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_pointer + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_pointer + row, mask=row < rows, other=0.0)
        g = dy
        if HAS_WEIGHT:
            dw += dy * x * rstd
            g = dy * weight
        mean = tl.sum(g * x, axis=0) / columns
        dx = rstd * (g - x * rstd * rstd * mean)
        tl.store(dx_pointer + row * columns + offsets, dx.to(dx_pointer.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(dw_pointer + program * columns + offsets, dw, mask=mask)


@triton_op("intarsia::rms_norm_forward", mutates_args={})
def rms_norm_forward(x_ND: Tensor, weight_D: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y [N, D] and r [N] float32, of contiguous rows."""
    rows, columns = x_ND.shape
    y_ND, rstd_N = torch.empty_like(x_ND), torch.empty(rows, dtype=torch.float32, device=x_ND.device)
    if rows:
        weight = x_ND if weight_D is None else weight_D
        block = triton.next_power_of_2(columns)
        wrap_triton(_forward)[(rows,)](x_ND, weight, y_ND, rstd_N, columns, eps, HAS_WEIGHT=weight_D is not None, BLOCK=block)
    return y_ND, rstd_N


@triton_op("intarsia::rms_norm_backward", mutates_args={})
def rms_norm_backward(dy_ND: Tensor, x_ND: Tensor, weight_D: Tensor | None, rstd_N: Tensor) -> tuple[Tensor, Tensor]:
    """dx [N, D] and partial sums of dw [P, D] float32 ([0, D] without a weight)."""
    rows, columns = x_ND.shape
    programs = triton.cdiv(rows, ROWS_PER_PROGRAM)
    dx_ND = torch.empty_like(x_ND)
    dw_PD = torch.empty(programs if weight_D is not None else 0, columns, dtype=torch.float32, device=x_ND.device)
    if rows:
        weight = x_ND if weight_D is None else weight_D
        block = triton.next_power_of_2(columns)
        wrap_triton(_backward)[(programs,)](
            dy_ND, x_ND, weight, rstd_N, dx_ND, dw_PD, rows, columns, HAS_WEIGHT=weight_D is not None, ROWS=ROWS_PER_PROGRAM, BLOCK=block
        )
    return dx_ND, dw_PD


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_ND, weight_D, _ = inputs
    ctx.save_for_backward(x_ND, weight_D, output[1])


def _gradients(ctx: Any, dy_ND: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x_ND, weight_D, rstd_N = ctx.saved_tensors
    dx_ND, dw_PD = rms_norm_backward(dy_ND.contiguous(), x_ND, weight_D, rstd_N)
    return dx_ND, None if weight_D is None else dw_PD.sum(0).to(weight_D.dtype), None


rms_norm_forward.register_autograd(_gradients, setup_context=_setup)


def rms_norm(x_ND: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """As `intarsia.ops.rms_norm`."""
    rows = x_ND.reshape(-1, x_ND.shape[-1]).contiguous()
    return rms_norm_forward(rows, weight_D, eps)[0].view(x_ND.shape)


def supports(x_ND: Tensor, weight_D: Tensor | None, eps: float) -> str | None:
    """Why a call cannot be taken."""
    if x_ND.dtype == torch.float64:
        return "it computes in float32"
    if x_ND.shape[-1] > MAX_COLUMNS:
        return f"a row has more than {MAX_COLUMNS} columns"
    return None


rms_norm.supports = supports  # type: ignore[attr-defined]
