"""`cross_entropy` of which each token's part does not depend on the others. N tokens, C tokens of a chunk, D model width, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from intarsia import ops
from intarsia.contracts import IGNORE
from torch import Tensor

from intarsia_kernels.invariant.products import product


def _log_probs(hidden_CD: Tensor, weight_VD: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """log_softmax of the logits [C, V] in float32 (float64 for that dtype), and tanh where there is a softcap. On a GPU logits are made by what is in force for `linear`."""
    logits_CV = product(hidden_CD, weight_VD) if hidden_CD.device.type == "cpu" else ops.linear(hidden_CD, weight_VD)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    tanh_CV = None
    if softcap is not None:
        tanh_CV = torch.tanh(logits_CV / softcap)
        logits_CV = softcap * tanh_CV
    return logits_CV.log_softmax(-1), tanh_CV


class _CrossEntropy(torch.autograd.Function):
    """Logits of a chunk at a time, made again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, softcap: float | None, chunk: int) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.softcap, ctx.chunk = softcap, chunk
        total = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        for start in range(0, hidden_ND.shape[0], chunk):
            here = slice(start, start + chunk)
            log_p_CV, _ = _log_probs(hidden_ND[here], weight_VD, softcap)
            ignored_C = labels_N[here] == IGNORE
            total -= log_p_CV.gather(1, labels_N[here].masked_fill(ignored_C, 0)[:, None]).squeeze(1).masked_fill_(ignored_C, 0.0).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=grads[0].dtype) if needs_weight else None
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            here = slice(start, start + ctx.chunk)
            log_p_CV, tanh_CV = _log_probs(hidden_ND[here], weight_VD, ctx.softcap)
            ignored_C = labels_N[here] == IGNORE
            # d loss / d logits = softmax - [label]
            grad_CV = log_p_CV.exp_()
            grad_CV.scatter_add_(1, labels_N[here].masked_fill(ignored_C, 0)[:, None], grad_CV.new_full((grad_CV.shape[0], 1), -1.0))
            if tanh_CV is not None:
                grad_CV.mul_(1 - tanh_CV.square())
            grad_CV = grad_CV.mul_(grads[0]).masked_fill_(ignored_C[:, None], 0.0).to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[here] = torch.mm(grad_CV, weight_VD)
            if grad_weight_VD is not None:
                grad_weight_VD += torch.mm(grad_CV.t(), hidden_ND[here])
        return grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None, None


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float | None = None, chunk: int = 1024) -> Tensor:
    """As `intarsia.ops.cross_entropy`: the sum of the tokens' negative log-probabilities. Each of them is independent of the batch; their sum is of the batch."""
    return _CrossEntropy.apply(hidden_ND, weight_VD, labels_N, softcap, chunk)
