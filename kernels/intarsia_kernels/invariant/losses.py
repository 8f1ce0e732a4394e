"""Losses by the logits of a token that do not depend on the other tokens. N tokens, C tokens of a chunk, D model width, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from intarsia.contracts import IGNORE
from torch import Tensor

from intarsia_kernels.invariant.products import TILE, product


def _log_probs(hidden_CD: Tensor, weight_VD: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """log_softmax of the logits [C, V] in float32 (float64 for that dtype), and tanh where there is a softcap."""
    logits_CV = product(hidden_CD, weight_VD)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    tanh_CV = None
    if softcap is not None:
        tanh_CV = torch.tanh(logits_CV / softcap)
        logits_CV = softcap * tanh_CV
    return logits_CV.log_softmax(-1), tanh_CV


def _entropy(log_p_CV: Tensor) -> Tensor:
    """[C]. torch sums a single long row by its threads; several rows each by one."""
    terms_CV = log_p_CV.exp() * log_p_CV
    if terms_CV.shape[0] < TILE:
        terms_CV = torch.nn.functional.pad(terms_CV, (0, 0, 0, TILE - terms_CV.shape[0]))
    return -terms_CV.sum(-1)[: log_p_CV.shape[0]]


class _TokenLogProbs(torch.autograd.Function):
    """Logits of a chunk at a time, made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, softcap: float | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, tokens_N)
        ctx.softcap, ctx.chunk = softcap, chunk
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        chosen_N, entropy_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=wide), hidden_ND.new_zeros(hidden_ND.shape[0], dtype=wide)
        for start in range(0, hidden_ND.shape[0], chunk):
            here = slice(start, start + chunk)
            log_p_CV, _ = _log_probs(hidden_ND[here], weight_VD, softcap)
            ignored_C = tokens_N[here] == IGNORE
            index_C1 = tokens_N[here].masked_fill(ignored_C, 0)[:, None]
            chosen_N[here] = log_p_CV.gather(1, index_C1).squeeze(1).masked_fill_(ignored_C, 0.0)
            entropy_N[here] = _entropy(log_p_CV).masked_fill_(ignored_C, 0.0)
        ctx.mark_non_differentiable(entropy_N)
        return chosen_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, tokens_N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=grads[0].dtype) if needs_weight else None
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            here = slice(start, start + ctx.chunk)
            log_p_CV, tanh_CV = _log_probs(hidden_ND[here], weight_VD, ctx.softcap)
            ignored_C = tokens_N[here] == IGNORE
            scale_C1 = grads[0][here].masked_fill(ignored_C, 0.0)[:, None]
            # d log p[token] / d logits = [token] - softmax
            grad_CV = log_p_CV.exp_().mul_(-scale_C1)
            grad_CV.scatter_add_(1, tokens_N[here].masked_fill(ignored_C, 0)[:, None], scale_C1)
            if tanh_CV is not None:
                grad_CV.mul_(1 - tanh_CV.square())
            grad_CV = grad_CV.to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[here] = torch.mm(grad_CV, weight_VD)
            if grad_weight_VD is not None:
                grad_weight_VD += torch.mm(grad_CV.t(), hidden_ND[here])
        return grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None, None


def token_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, *, softcap: float | None = None, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """As the operator `token_log_probs`. Backward makes the logits again: none are kept."""
    return _TokenLogProbs.apply(hidden_ND, weight_VD, tokens_N, softcap, chunk)


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float | None = None, chunk: int = 1024) -> Tensor:
    """As `intarsia.ops.cross_entropy`: the negative sum of the tokens' log-probabilities. Each of them is independent of the batch; their sum is of the batch."""
    return -_TokenLogProbs.apply(hidden_ND, weight_VD, labels_N, softcap, chunk)[0].sum()
