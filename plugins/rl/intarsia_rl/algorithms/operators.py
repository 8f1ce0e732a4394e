"""The operator of policy losses. Shape suffixes: N tokens, D model width, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from intarsia import ops
from intarsia.contracts import IGNORE
from intarsia.ops import Operator
from torch import Tensor


def reference(
    hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, *, softcap: float | None = None, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """(log-probability [N], entropy [N]), float32 (float64 for float64), in nats, of `softmax(hidden @ weight^T)`; both 0 where the token is IGNORE.

    `softcap` c makes the logits z `c * tanh(z / c)`. The logits of `chunk` tokens are there at once: backward computes them again, a chunk at a time, by the same operator.
    """
    return _TokenLogProbs.apply(hidden_ND, weight_VD, tokens_N, softcap, chunk)


def _log_softmax(hidden_ND: Tensor, weight_VD: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """(log-probabilities, slope of the soft cap) [N, V] of a chunk."""
    logits_NV = ops.linear(hidden_ND, weight_VD)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if softcap is None:
        return logits_NV.log_softmax(-1), None
    tanh_NV = torch.tanh(logits_NV / softcap)
    return (softcap * tanh_NV).log_softmax(-1), 1 - tanh_NV.square()


def _of_entropy(log_p_NV: Tensor, grad_N: Tensor) -> Tensor:
    """What the entropy's gradient adds to that of the logits: dH / dz = -p (log p + H)."""
    p_NV = log_p_NV.exp()
    entropy_N = -(p_NV * log_p_NV).sum(-1)
    return p_NV.mul_(log_p_NV + entropy_N[:, None]).mul_(-grad_N[:, None])


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, softcap: float | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        chosen_N = hidden_ND.new_empty(hidden_ND.shape[0], dtype=wide)
        entropy_N = torch.empty_like(chosen_N)
        for start in range(0, hidden_ND.shape[0], chunk):
            here = slice(start, start + chunk)
            log_p_NV, _ = _log_softmax(hidden_ND[here], weight_VD, softcap)
            ignored_N = tokens_N[here] == IGNORE
            index_N1 = tokens_N[here].masked_fill(ignored_N, 0)[:, None]
            chosen_N[here] = log_p_NV.gather(1, index_N1).squeeze(1).masked_fill(ignored_N, 0.0)
            entropy_N[here] = -(log_p_NV.exp() * log_p_NV).sum(-1).masked_fill(ignored_N, 0.0)
        ctx.save_for_backward(hidden_ND, weight_VD, tokens_N)
        ctx.softcap, ctx.chunk = softcap, chunk
        # Who does not ask for the entropy's gradient pays nothing for it.
        ctx.set_materialize_grads(False)
        return chosen_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, tokens_N = ctx.saved_tensors
        given_N, grad_entropy_N = grads
        if given_N is None and grad_entropy_N is None:
            return None, None, None, None, None
        grad_N = torch.zeros_like(grad_entropy_N) if given_N is None else given_N  # type: ignore[arg-type]
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=grad_N.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            here = slice(start, start + ctx.chunk)
            h_ND = hidden_ND[here]
            log_p_NV, slope_NV = _log_softmax(h_ND, weight_VD, ctx.softcap)
            ignored_N = tokens_N[here] == IGNORE
            grad_N1 = grad_N[here][:, None]
            more_NV = None if grad_entropy_N is None else _of_entropy(log_p_NV, grad_entropy_N[here])
            # d log p[y] / dz = 1[y] - p
            grad_NV = log_p_NV.exp_().mul_(-grad_N1).scatter_add_(1, tokens_N[here].masked_fill(ignored_N, 0)[:, None], grad_N1)
            if more_NV is not None:
                grad_NV.add_(more_NV)
            if slope_NV is not None:
                grad_NV.mul_(slope_NV)
            grad_NV = grad_NV.masked_fill_(ignored_N[:, None], 0.0).to(h_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_NV, weight_VD.to(h_ND.dtype), out=grad_hidden_ND[here])
            if grad_weight_VD is not None and grad_weight_VD.dtype == grad_NV.dtype:
                grad_weight_VD.addmm_(grad_NV.t(), h_ND)
            elif grad_weight_VD is not None:  # the sum over chunks stays wide
                grad_weight_VD += torch.mm(grad_NV.t(), h_ND)
        return grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None, None


# As invariant as what is in force for `linear`, which batch-invariant mode sees to: the reference runs that, and log_softmax looks at one row at a time.
token_log_probs = Operator("token_log_probs", reference, "other", invariant=True)
