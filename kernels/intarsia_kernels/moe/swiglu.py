"""`swiglu` in Triton. One pass forward (3 numbers moved for each result), one backward (5).

y = g sigmoid(g) u,  du = dy g sigmoid(g),  dg = dy u sigmoid(g) (1 + g (1 - sigmoid(g)))
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.direct import cdiv, direct_op, wrap_triton

BLOCK = 4096
WARPS = 8


@triton.jit
def _gated(gate, up):
    """silu(gate) * up, in float32."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _slopes(dy, gate, up):
    """Its gradients by gate and up, times dy."""
    s = tl.sigmoid(gate)
    return dy * up * s * (1.0 + gate * (1.0 - s)), dy * gate * s


@triton.jit
def _forward(gate_pointer, up_pointer, y_pointer, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    gate = tl.load(gate_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_pointer + offsets, _gated(gate, up).to(y_pointer.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy_pointer, gate_pointer, up_pointer, dgate_pointer, dup_pointer, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    dy = tl.load(dy_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    dgate, dup = _slopes(dy, gate, up)
    tl.store(dgate_pointer + offsets, dgate.to(dgate_pointer.dtype.element_ty), mask=mask)
    tl.store(dup_pointer + offsets, dup.to(dup_pointer.dtype.element_ty), mask=mask)


@direct_op("intarsia::swiglu_forward")
def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """y, of contiguous tensors of one shape and dtype."""
    y = torch.empty_like(gate)
    if gate.numel():
        wrap_triton(_forward)[(cdiv(gate.numel(), BLOCK),)](gate, up, y, gate.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return y


@direct_op("intarsia::swiglu_backward")
def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        wrap_triton(_backward)[(cdiv(gate.numel(), BLOCK),)](dy, gate, up, dgate, dup, gate.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return dgate, dup


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        gate_NF, up_NF = gate_NF.contiguous(), up_NF.contiguous()
        ctx.save_for_backward(gate_NF, up_NF)
        return swiglu_forward(gate_NF, up_NF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors)


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """As `intarsia.ops.swiglu`."""
    return _SwiGLU.apply(gate_NF, up_NF)


def supports(gate_NF: Tensor, up_NF: Tensor) -> str | None:
    """Why a call cannot be taken."""
    if gate_NF.shape != up_NF.shape or gate_NF.dtype != up_NF.dtype:
        return "gate and up differ in shape or dtype"
    return "it computes in float32" if gate_NF.dtype == torch.float64 else None


swiglu.supports = supports  # type: ignore[attr-defined]
