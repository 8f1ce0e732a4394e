"""`silu(gate) * up`, computed in float32 and rounded once. N tokens (any leading shape), F hidden width.

The operator is opaque to torch.compile (`torch.library.custom_op`), so that what stands here is what runs. Backward recomputes silu from the
inputs: autograd keeps two tensors of [N, F] instead of three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


@torch.library.custom_op("acme_swiglu::forward", mutates_args=())
def swiglu_forward(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """silu(gate) * up, contiguous, in gate's dtype."""
    return (F.silu(wide(gate_NF)) * wide(up_NF)).to(gate_NF.dtype).contiguous()


@torch.library.custom_op("acme_swiglu::backward", mutates_args=())
def swiglu_backward(grad_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> tuple[Tensor, Tensor]:
    """With s = sigmoid(gate): d gate = grad * up * s * (1 + gate * (1 - s)),  d up = grad * gate * s."""
    grad, gate, up = wide(grad_NF), wide(gate_NF), wide(up_NF)
    s = torch.sigmoid(gate)
    d_gate = grad * up * s * (1 + gate * (1 - s))
    return d_gate.to(gate_NF.dtype).contiguous(), (grad * gate * s).to(up_NF.dtype).contiguous()


@swiglu_forward.register_fake
def _(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return torch.empty(gate_NF.shape, dtype=gate_NF.dtype, device=gate_NF.device)


@swiglu_backward.register_fake
def _(grad_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(gate_NF.shape, dtype=gate_NF.dtype, device=gate_NF.device),
        torch.empty(up_NF.shape, dtype=up_NF.dtype, device=up_NF.device),
    )


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward(grad_NF, *ctx.saved_tensors)


swiglu_forward.register_autograd(_backward, setup_context=_keep)


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """`silu(gate) * up` (arXiv 2002.05202), with the signature of `intarsia.ops.swiglu`."""
    return swiglu_forward(gate_NF, up_NF)
