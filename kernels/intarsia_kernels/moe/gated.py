"""`grouped_swiglu` by torch's grouped product: what `grouped_linear` and `swiglu` give in three calls, with their bits. M rows, E groups, I input and O output features.

One node of the autograd graph instead of three, and one launch for what needs several: zeros behind the last group are written by the pass that gates and by the one that adds the input's two gradients,
into the first of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from intarsia import ops
from intarsia_models_common.moe.operators import GROUPED_LINEAR
from torch import Tensor

from intarsia_kernels.direct import cdiv, direct_op, wrap_triton
from intarsia_kernels.moe import products, swiglu
from intarsia_kernels.moe.swiglu import BLOCK, WARPS, _gated, _slopes


@triton.jit
def _gate(gate_pointer, up_pointer, y_pointer, ends_pointer, groups, numel, columns, BLOCK: tl.constexpr):
    """y = g sigmoid(g) u in the rows of groups, 0 behind them."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < tl.load(ends_pointer + groups - 1).to(tl.int64) * columns
    gate = tl.load(gate_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_pointer + offsets, _gated(gate, up).to(y_pointer.dtype.element_ty), mask=offsets < numel)


@triton.jit
def _gate_backward(
    dy_pointer, gate_pointer, up_pointer, dgate_pointer, dup_pointer, ends_pointer, groups, columns, BLOCK: tl.constexpr
):  # fmt: skip
    """dg and du in the rows of groups; nobody reads what is behind them."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < tl.load(ends_pointer + groups - 1).to(tl.int64) * columns
    dy = tl.load(dy_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    dgate, dup = _slopes(dy, gate, up)
    tl.store(dgate_pointer + offsets, dgate.to(dgate_pointer.dtype.element_ty), mask=mask)
    tl.store(dup_pointer + offsets, dup.to(dup_pointer.dtype.element_ty), mask=mask)


@triton.jit
def _add(total_pointer, other_pointer, ends_pointer, groups, numel, columns, BLOCK: tl.constexpr):
    """total += other in the rows of groups, total = 0 behind them."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < tl.load(ends_pointer + groups - 1).to(tl.int64) * columns
    total = tl.load(total_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(other_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(total_pointer + offsets, total.to(total_pointer.dtype.element_ty), mask=offsets < numel)


def _grid(tensor: Tensor) -> tuple[int]:
    return (cdiv(tensor.numel(), BLOCK),)


@direct_op("intarsia::grouped_swiglu")
def _forward(x_MI: Tensor, gate_EOI: Tensor, up_EOI: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, and g and u, whose rows behind the last group nobody has written."""
    gate_MO = products._grouped_mm(x_MI, gate_EOI.transpose(1, 2), offs=ends_E)
    up_MO = products._grouped_mm(x_MI, up_EOI.transpose(1, 2), offs=ends_E)
    y_MO = torch.empty_like(gate_MO)
    columns = y_MO.shape[1]
    wrap_triton(_gate)[_grid(y_MO)](gate_MO, up_MO, y_MO, ends_E, ends_E.shape[0], y_MO.numel(), columns, BLOCK=BLOCK, num_warps=WARPS)
    return y_MO, gate_MO, up_MO


@direct_op("intarsia::grouped_swiglu_gates")
def _gates(dy_MO: Tensor, gate_MO: Tensor, up_MO: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    dgate_MO, dup_MO = torch.empty_like(gate_MO), torch.empty_like(up_MO)
    wrap_triton(_gate_backward)[_grid(dy_MO)](
        dy_MO, gate_MO, up_MO, dgate_MO, dup_MO, ends_E, ends_E.shape[0], dy_MO.shape[1], BLOCK=BLOCK, num_warps=WARPS
    )
    return dgate_MO, dup_MO


@direct_op("intarsia::grouped_swiglu_input")
def _input_gradient(dgate_MO: Tensor, dup_MO: Tensor, gate_EOI: Tensor, up_EOI: Tensor, ends_E: Tensor) -> Tensor:
    total_MI = products._grouped_mm(dup_MO, up_EOI, offs=ends_E)
    other_MI = products._grouped_mm(dgate_MO, gate_EOI, offs=ends_E)
    wrap_triton(_add)[_grid(total_MI)](
        total_MI, other_MI, ends_E, ends_E.shape[0], total_MI.numel(), total_MI.shape[1], BLOCK=BLOCK, num_warps=WARPS
    )
    return total_MI


@direct_op("intarsia::grouped_swiglu_weights")
def _weight_gradients(dgate_MO: Tensor, dup_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate_EOI = products._grouped_mm(dgate_MO.t(), x_MI, offs=ends_E)
    grad_up_EOI = products._grouped_mm(dup_MO.t(), x_MI, offs=ends_E)
    products.clear_empty(grad_gate_EOI, grad_up_EOI, ends_E)
    return grad_gate_EOI, grad_up_EOI


class _GroupedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, gate_EOI: Tensor, up_EOI: Tensor, counts_E: Tensor) -> Tensor:
        ends_E = products.ends_of(counts_E)
        y_MO, gate_MO, up_MO = _forward(x_MI, gate_EOI, up_EOI, ends_E)
        ctx.save_for_backward(x_MI, gate_EOI, up_EOI, gate_MO, up_MO, ends_E)
        return y_MO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, gate_EOI, up_EOI, gate_MO, up_MO, ends_E = ctx.saved_tensors
        dgate_MO, dup_MO = _gates(grads[0].contiguous(), gate_MO, up_MO, ends_E)
        needs_x, *needs_weights, _ = ctx.needs_input_grad
        grad_x = grad_gate = grad_up = None
        if needs_x:
            grad_x = _input_gradient(dgate_MO, dup_MO, gate_EOI, up_EOI, ends_E)
        if all(needs_weights):
            grad_gate, grad_up = _weight_gradients(dgate_MO, dup_MO, x_MI, ends_E)
        elif any(needs_weights):
            one = products._weight_gradient(dgate_MO if needs_weights[0] else dup_MO, x_MI, ends_E)
            grad_gate, grad_up = (one, None) if needs_weights[0] else (None, one)
        return grad_x, grad_gate, grad_up, None


def grouped_swiglu(x_MI: Tensor, gate_EOI: Tensor, up_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """As the operator `grouped_swiglu`."""
    return _GroupedSwiGLU.apply(x_MI.contiguous(), gate_EOI, up_EOI, counts_E)


def supports(x_MI: Tensor, gate_EOI: Tensor, up_EOI: Tensor, counts_E: Tensor) -> str | None:
    """Why a call cannot be taken."""
    if gate_EOI.shape != up_EOI.shape or gate_EOI.dtype != up_EOI.dtype or not x_MI.numel() or not gate_EOI.numel():
        return f"{x_MI.shape[0]} rows, matrices of {tuple(gate_EOI.shape)} and {tuple(up_EOI.shape)}"
    return products.supports(x_MI, gate_EOI, counts_E)


grouped_swiglu.supports = supports  # type: ignore[attr-defined]
grouped_swiglu.stands_for = ((GROUPED_LINEAR, products.grouped_linear), (ops.swiglu, swiglu.swiglu))  # type: ignore[attr-defined]
