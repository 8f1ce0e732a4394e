"""`cross_entropy` with softmax, loss and gradient in one Triton kernel. N tokens, C tokens of a chunk, D model width, V vocabulary.

A chunk's logits are one matrix product; the kernel reads them twice and leaves d loss / d logits in their place, so that they are the only [C, V] memory.
Element by element the reference reads and writes about 50 bytes of each bfloat16 logit, this 6.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from intarsia.contracts import IGNORE
from torch import Tensor

BLOCK = 8192
"""Columns that a program holds at once."""


@triton.jit
def _capped(z, softcap):
    """softcap * tanh(z / softcap), and tanh itself."""
    softcap = tl.cast(softcap, tl.float32)  # compilers hand over numbers of Python in float64
    t = 2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0
    return softcap * t, t


@triton.jit
def _loss_and_gradient(
    logits_pointer,
    labels_pointer,
    losses_pointer,
    softcap,
    COLUMNS: tl.constexpr,
    IGNORED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_pointer += row * COLUMNS
    label = tl.load(labels_pointer + row)
    counted = label != IGNORED
    offsets = tl.arange(0, BLOCK)
    largest = -float("inf")
    total = 0.0
    picked = 0.0
    for start in range(0, COLUMNS, BLOCK):
        inside = start + offsets < COLUMNS
        z = tl.load(logits_pointer + start + offsets, mask=inside, other=0.0).to(tl.float32)
        if HAS_SOFTCAP:
            z, _ = _capped(z, softcap)
        z = tl.where(inside, z, -float("inf"))
        new = tl.maximum(largest, tl.max(z, axis=0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(z - new), axis=0)
        picked += tl.sum(tl.where(start + offsets == label, z, 0.0), axis=0)
        largest = new
    tl.store(losses_pointer + row, tl.where(counted, tl.log(total) + largest - picked, 0.0))
    if NEEDS_GRADIENT:
        for start in range(0, COLUMNS, BLOCK):
            inside = start + offsets < COLUMNS
            z = tl.load(logits_pointer + start + offsets, mask=inside, other=0.0).to(tl.float32)
            slope = tl.where(counted, 1.0, 0.0)
            if HAS_SOFTCAP:
                z, t = _capped(z, softcap)
                slope = slope * (1.0 - t * t)
            gradient = (tl.exp(z - largest) / total - tl.where(start + offsets == label, 1.0, 0.0)) * slope
            tl.store(logits_pointer + start + offsets, gradient.to(logits_pointer.dtype.element_ty), mask=inside)


def _add_product(sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """sum += grad^T hidden, summed and kept in float32."""
    if grad_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_CV.t(), hidden_CD)
    elif grad_CV.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads():
        torch.ops.aten.addmm.dtype_out(sum_VD, grad_CV.t(), hidden_CD, sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += torch.mm(grad_CV.t(), hidden_CD)


@torch.library.custom_op("intarsia::cross_entropy_forward", mutates_args={})
def cross_entropy_forward(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, softcap: float | None, chunk: int, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The float32 sum [], its gradients by hidden [N, D] in its dtype and by the weight [V, D] in float32; [0] each where not needed."""
    tokens, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
    labels_N = labels_N.contiguous()
    losses_N = torch.zeros(tokens, dtype=torch.float32, device=hidden_ND.device)
    grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else hidden_ND.new_empty(0)
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else hidden_ND.new_empty(0, dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    for start in range(0, tokens, chunk):
        hidden_CD, labels_C = hidden_ND[start : start + chunk], labels_N[start : start + chunk]
        logits_CV = torch.mm(hidden_CD, weight_VD.t())
        _loss_and_gradient[(hidden_CD.shape[0],)](
            logits_CV,
            labels_C,
            losses_N[start : start + chunk],
            1.0 if softcap is None else softcap,
            COLUMNS=vocabulary,
            IGNORED=IGNORE,
            HAS_SOFTCAP=softcap is not None,
            NEEDS_GRADIENT=needs_hidden or needs_weight,
            BLOCK=block,
            num_warps=16 if block >= 4096 else 4,
        )
        if needs_hidden:
            torch.mm(logits_CV, weight_VD, out=grad_hidden_ND[start : start + chunk])
        if needs_weight:
            _add_product(grad_weight_VD, logits_CV, hidden_CD)
    return losses_N.sum(), grad_hidden_ND, grad_weight_VD


@cross_entropy_forward.register_fake
def _(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, softcap: float | None, chunk: int, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else hidden_ND.new_empty(0)
    grad_weight_VD = torch.empty_like(weight_VD, dtype=torch.float32) if needs_weight else hidden_ND.new_empty(0, dtype=torch.float32)
    return hidden_ND.new_empty((), dtype=torch.float32), grad_hidden_ND, grad_weight_VD


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.weight_dtype, ctx.needs = inputs[1].dtype, inputs[5:7]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, scale: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
    needs_hidden, needs_weight = ctx.needs
    hidden = _scaled(grad_hidden_ND, scale, grad_hidden_ND.dtype) if needs_hidden and scale is not None else None
    weight = _scaled(grad_weight_VD, scale, ctx.weight_dtype) if needs_weight and scale is not None else None
    return hidden, weight, *(None,) * 5


def _scaled(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor * scale in `dtype`, multiplied in float32, in one pass over memory."""
    return torch.mul(tensor, scale, out=torch.empty_like(tensor, dtype=dtype))


cross_entropy_forward.register_autograd(_gradients, setup_context=_setup)


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float | None = None, chunk: int = 1024) -> Tensor:
    """As `intarsia.ops.cross_entropy`. The gradient by the weight is summed over chunks in float32."""
    needs = torch.is_grad_enabled()
    needs_hidden, needs_weight = needs and hidden_ND.requires_grad, needs and weight_VD.requires_grad
    return cross_entropy_forward(hidden_ND, weight_VD, labels_N, softcap, chunk, needs_hidden, needs_weight)[0]


def supports(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float | None = None, chunk: int = 1024) -> str | None:
    """Why a call cannot be taken."""
    if hidden_ND.dtype == torch.float64:
        return "it computes in float32"
    if hidden_ND.dtype != weight_VD.dtype:
        return "hidden states and weight differ in dtype"
    return None


cross_entropy.supports = supports  # type: ignore[attr-defined]
