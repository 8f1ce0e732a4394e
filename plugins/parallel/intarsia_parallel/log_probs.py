"""Log-probabilities of tokens with the vocabulary shared out. N tokens, C tokens of a chunk, D model width, V vocabulary (this rank's rows of it).

As the operator `token_log_probs`, backward makes a chunk's logits again; no rank ever has more of them than chunk x V / tp. Of each chunk the ranks exchange the largest
logit, then the sum of exponentials, the token's logit, and the sum from which the entropy follows: 16 bytes for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from intarsia import ops
from intarsia.comm import Communicator
from intarsia.contracts import IGNORE
from torch import Tensor

from intarsia_parallel.collectives import gathered, scattered

Pair = tuple[Tensor, Tensor]


def vocab_token_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    rows: tuple[int, int],
    parts: Sequence[int],
    comm: Communicator,
    *,
    softcap: float | None = None,
    chunk: int = 1024,
    what: str = "token_log_probs",
) -> Pair:
    """(log-probability [N], entropy [N]) of all ranks' tokens in rank order, the same on every rank (*replicated*); both 0 where the token is IGNORE.

    Arguments: `hidden_ND` this rank's tokens; `weight_VD` its rows, which are `rows` (first, number) of the whole; `tokens_N` all tokens in rank order; `parts` how many each
    rank has. Gradients: of the hidden states, whole; of the own rows, whole. Statistics are float32 (float64 for float64). Stability: provisional.
    """
    return _VocabTokenLogProbs.apply(hidden_ND, weight_VD, tokens_N, rows, tuple(parts), comm, softcap, chunk, what)


def in_order_of_rows(each_N: Tensor, counts: Sequence[int]) -> Tensor:
    """Numbers of tokens in rank order, [B, part of S] of each rank, as [B, S] flattened. `counts` are the parts' lengths."""
    rows = each_N.numel() // max(1, sum(counts))
    parts = each_N.split([rows * count for count in counts])
    return torch.cat([part.view(rows, count) for part, count in zip(parts, counts, strict=True)], 1).flatten()


def _logits(hidden_CD: Tensor, weight_VD: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """This rank's logits [C, V], and the slope of the soft cap."""
    logits_CV = ops.linear(hidden_CD, weight_VD)
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    if softcap is None:
        return logits_CV, None
    tanh_CV = torch.tanh(logits_CV / softcap)
    return softcap * tanh_CV, 1 - tanh_CV.square()


def _own(tokens_C: Tensor, rows: tuple[int, int]) -> Pair:
    """Where each token lies among this rank's rows [C, 1], and whether it lies elsewhere."""
    elsewhere_C = (tokens_C < rows[0]) | (tokens_C >= sum(rows))
    return (tokens_C - rows[0]).masked_fill(elsewhere_C, 0)[:, None], elsewhere_C


def _of_entropy(log_p_CV: Tensor, grad_C: Tensor, entropy_C: Tensor) -> Tensor:
    """What the gradient of the whole distribution's entropy adds to that of this rank's logits: dH / dz = -p (log p + H)."""
    return log_p_CV.exp().mul_(log_p_CV + entropy_C[:, None]).mul_(-grad_C[:, None])


class _VocabTokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        tokens_N: Tensor,
        rows: tuple[int, int],
        parts: tuple[int, ...],
        comm: Communicator,
        softcap: float | None,
        chunk: int,
        what: str,
    ) -> Pair:
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        all_ND = gathered(hidden_ND, 0, parts, comm, f"{what}, hidden states")
        chosen_N, entropy_N, log_sums_N = (all_ND.new_empty(all_ND.shape[0], dtype=wide) for _ in range(3))
        for start in range(0, all_ND.shape[0], chunk):
            here = slice(start, start + chunk)
            logits_CV, _ = _logits(all_ND[here], weight_VD, softcap)
            index_C1, elsewhere_C = _own(tokens_N[here], rows)
            largest_C = comm.all_reduce(logits_CV.amax(-1), "max", f"{what}, largest logits")
            logits_CV = logits_CV.sub_(largest_C[:, None])
            exponentials_CV = logits_CV.exp()
            sums = (
                exponentials_CV.sum(-1),
                logits_CV.gather(1, index_C1).squeeze(1).masked_fill(elsewhere_C, 0.0),
                (exponentials_CV * logits_CV).sum(-1),
            )
            total_C, picked_C, products_C = comm.all_reduce(torch.stack(sums), "sum", f"{what}, sums of exponentials")
            ignored_C = tokens_N[here] == IGNORE
            chosen_N[here] = (picked_C - total_C.log()).masked_fill(ignored_C, 0.0)
            entropy_N[here] = (total_C.log() - products_C / total_C).masked_fill(ignored_C, 0.0)
            log_sums_N[here] = largest_C + total_C.log()
        ctx.save_for_backward(all_ND, weight_VD, tokens_N, log_sums_N, entropy_N)
        ctx.call = (rows, parts, comm, softcap, chunk, what)
        ctx.set_materialize_grads(False)
        return chosen_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        all_ND, weight_VD, tokens_N, log_sums_N, entropy_N = ctx.saved_tensors
        rows, parts, comm, softcap, chunk, what = ctx.call
        grad_entropy_N = grads[1]
        grad_N = torch.zeros_like(entropy_N) if grads[0] is None else grads[0]
        grad_all_ND = torch.empty_like(all_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=grad_N.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, all_ND.shape[0], chunk):
            here = slice(start, start + chunk)
            logits_CV, slope_CV = _logits(all_ND[here], weight_VD, softcap)
            index_C1, elsewhere_C = _own(tokens_N[here], rows)
            grad_C1 = grad_N[here][:, None]
            log_p_CV = logits_CV.sub_(log_sums_N[here][:, None])
            more_CV = None if grad_entropy_N is None else _of_entropy(log_p_CV, grad_entropy_N[here], entropy_N[here])
            grad_CV = log_p_CV.exp_().mul_(-grad_C1)
            grad_CV.scatter_add_(1, index_C1, grad_C1.masked_fill(elsewhere_C[:, None], 0.0))
            if more_CV is not None:
                grad_CV.add_(more_CV)
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            grad_CV = grad_CV.masked_fill_((tokens_N[here] == IGNORE)[:, None], 0.0).to(all_ND.dtype)
            if grad_all_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_all_ND[here])
            if grad_weight_VD is not None and grad_weight_VD.dtype == grad_CV.dtype:
                grad_weight_VD.addmm_(grad_CV.t(), all_ND[here])
            elif grad_weight_VD is not None:  # the sum over chunks stays wide
                grad_weight_VD += torch.mm(grad_CV.t(), all_ND[here])
        own_ND = None if grad_all_ND is None else scattered(grad_all_ND, 0, parts, comm, f"{what}, gradient of hidden states")
        return own_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), *(None,) * 7
