"""Cross-entropy from hidden states: the logits of one chunk of tokens at a time, never all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from intarsia.contracts import IGNORE


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float | None = None, chunk: int = 1024) -> Tensor:
    """`sum over n with labels[n] != -100 of (logsumexp(z_n) - z_n[labels[n]])` with `z = hidden @ weight^T`, a float32 scalar (float64 for float64).

    `softcap` c makes z `c * tanh(z / c)`. Memory is `chunk` x V logits and, when gradients are asked for, the gradients themselves: they are made
    in the forward pass, while a chunk's logits are at hand (three matrix products in all, where recomputing takes four).
    No counted label gives 0 with zero gradients.
    """
    needs = torch.is_grad_enabled()
    return _CrossEntropy.apply(
        hidden_ND, weight_VD, labels_N, softcap, chunk, needs and hidden_ND.requires_grad, needs and weight_VD.requires_grad
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        softcap: float | None,
        chunk: int,
        needs_hidden: bool,
        needs_weight: bool,
    ) -> Tensor:
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        total = hidden_ND.new_zeros((), dtype=wide)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        for start in range(0, hidden_ND.shape[0], chunk):
            h_ND, labels = hidden_ND[start : start + chunk], labels_N[start : start + chunk]
            logits_NV = torch.mm(h_ND, weight_VD.t()).to(wide)
            tanh_NV = None
            if softcap is not None:
                tanh_NV = torch.tanh(logits_NV / softcap)
                logits_NV = softcap * tanh_NV
            log_p_NV = F.log_softmax(logits_NV, -1)
            ignored_N = labels == IGNORE
            index_N1 = labels.masked_fill(ignored_N, 0)[:, None]
            total -= log_p_NV.gather(1, index_N1).squeeze(1).masked_fill(ignored_N, 0.0).sum()
            if not (needs_hidden or needs_weight):
                continue
            grad_NV = log_p_NV.exp_().scatter_add_(1, index_N1, log_p_NV.new_full((), -1.0).expand(index_N1.shape))
            if tanh_NV is not None:
                grad_NV.mul_(1 - tanh_NV.square())
            grad_NV = grad_NV.masked_fill_(ignored_N[:, None], 0.0).to(h_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_NV, weight_VD, out=grad_hidden_ND[start : start + chunk])
            if grad_weight_VD is not None and grad_weight_VD.dtype == grad_NV.dtype:
                grad_weight_VD.addmm_(grad_NV.t(), h_ND)
            elif grad_weight_VD is not None:  # the sum over chunks stays wide
                grad_weight_VD += torch.mm(grad_NV.t(), h_ND)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_hidden_ND is None else (grad_hidden_ND.to(scale.dtype) * scale).to(grad_hidden_ND.dtype),
            None if grad_weight_VD is None else (grad_weight_VD * scale).to(ctx.weight_dtype),
            *(None,) * 5,
        )
