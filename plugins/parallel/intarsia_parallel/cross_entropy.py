"""Cross-entropy with the vocabulary shared out. N tokens, C tokens of a chunk, D model width, V vocabulary (this rank's rows of it).

As in `intarsia.ops.cross_entropy` the gradients are made in the forward pass while a chunk's logits are at hand; no rank ever has more logits than chunk x V / tp.
Of each chunk the ranks exchange the largest logit, then the sum of exponentials and the label's logit: 12 bytes for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.contracts import IGNORE
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_parallel import tokens
from intarsia_parallel.collectives import gathered, scattered


def labels_of_parts(hidden_ND: Tensor, labels_N: Tensor, comm: Communicator, name: str) -> tuple[list[int], Tensor]:
    """Rows of hidden states of each rank, and the labels in the order that these have when they are gathered: rank by rank, [B, part of S] each."""
    counts, labels_BS = _check(hidden_ND, labels_N, comm, name)
    ordered_N = torch.cat([part.flatten() for part in labels_BS.split(counts, 1)])
    return [count * labels_BS.shape[0] for count in counts], ordered_N


def own_labels(hidden_ND: Tensor, labels_N: Tensor, comm: Communicator, name: str) -> Tensor:
    """The labels of this rank's part."""
    counts, labels_BS = _check(hidden_ND, labels_N, comm, name)
    return labels_BS.split(counts, 1)[comm.rank].flatten()


def _check(hidden_ND: Tensor, labels_N: Tensor, comm: Communicator, name: str) -> tuple[list[int], Tensor]:
    counts = tokens.counts(comm)
    length = sum(counts)
    rows, rest = divmod(labels_N.numel(), length) if length else (0, 0)
    if rest or hidden_ND.shape[0] != rows * counts[comm.rank]:
        raise UsageError(
            f"The cross-entropy of {name} got {hidden_ND.shape[0]} hidden states and {labels_N.numel()} labels in a pass with rows of {length} tokens, of which rank "
            f"{comm.rank} of {comm.size} has {counts[comm.rank]}. It needs the hidden states of this rank's part of every row, and the labels of whole rows."
        )
    return counts, labels_N.view(rows, length)


def vocab_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    rows: tuple[int, int],
    parts: Sequence[int],
    comm: Communicator,
    *,
    softcap: float | None = None,
    chunk: int = 1024,
    what: str = "cross_entropy",
) -> Tensor:
    """`intarsia.ops.cross_entropy` over a group that shares out the vocabulary; the same scalar on every rank (*replicated*).

    Arguments: `hidden_ND` this rank's tokens; `weight_VD` its rows, which are `rows` (first, number) of the whole; `labels_N` all tokens' labels (int64, ids of the
    whole vocabulary, or IGNORE) in rank order; `parts` how many tokens each rank has. Gradients: of the hidden states, whole; of the own rows, whole.
    Statistics are float32 (float64 for float64). Stability: provisional.
    """
    needs = torch.is_grad_enabled()
    flags = (needs and hidden_ND.requires_grad, needs and weight_VD.requires_grad)
    return _VocabCrossEntropy.apply(hidden_ND, weight_VD, labels_N, rows, tuple(parts), comm, softcap, chunk, flags, what)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        rows: tuple[int, int],
        parts: tuple[int, ...],
        comm: Communicator,
        softcap: float | None,
        chunk: int,
        needs: tuple[bool, bool],
        what: str,
    ) -> Tensor:
        needs_hidden, needs_weight = needs
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        all_ND = gathered(hidden_ND, 0, parts, comm, f"{what}, hidden states")
        total = hidden_ND.new_zeros((), dtype=wide)
        grad_all_ND = torch.empty_like(all_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        for start in range(0, all_ND.shape[0], chunk):
            h_CD, labels_C = all_ND[start : start + chunk], labels_N[start : start + chunk]
            logits_CV = torch.mm(h_CD, weight_VD.t()).to(wide)
            slope_CV = None
            if softcap is not None:
                tanh_CV = torch.tanh(logits_CV / softcap)
                logits_CV = softcap * tanh_CV
                slope_CV = 1 - tanh_CV.square() if needs_hidden or needs_weight else None
            losses_C, grad_CV = _chunk(logits_CV, labels_C, rows, comm, what)
            total += losses_C.sum()
            if not (needs_hidden or needs_weight):
                continue
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            grad_CV = grad_CV.to(h_CD.dtype)
            if grad_all_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_all_ND[start : start + chunk])
            if grad_weight_VD is not None and grad_weight_VD.dtype == grad_CV.dtype:
                grad_weight_VD.addmm_(grad_CV.t(), h_CD)
            elif grad_weight_VD is not None:  # the sum over chunks stays wide
                grad_weight_VD += torch.mm(grad_CV.t(), h_CD)
        own_ND = None if grad_all_ND is None else scattered(grad_all_ND, 0, parts, comm, f"{what}, gradient of hidden states")
        ctx.save_for_backward(own_ND, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_hidden_ND is None else (grad_hidden_ND.to(scale.dtype) * scale).to(grad_hidden_ND.dtype),
            None if grad_weight_VD is None else (grad_weight_VD * scale).to(ctx.weight_dtype),
            *(None,) * 8,
        )


def _chunk(logits_CV: Tensor, labels_C: Tensor, rows: tuple[int, int], comm: Communicator, what: str) -> tuple[Tensor, Tensor]:
    """Losses [C], and the gradient by these logits [C, V], for which the logits are used up."""
    begin, count = rows
    ignored_C = labels_C == IGNORE
    elsewhere_C = (labels_C < begin) | (labels_C >= begin + count)
    index_C1 = (labels_C - begin).masked_fill(elsewhere_C, 0)[:, None]
    largest_C = comm.all_reduce(logits_CV.amax(-1), "max", f"{what}, largest logits")
    logits_CV = logits_CV.sub_(largest_C[:, None])
    picked_C = logits_CV.gather(1, index_C1).squeeze(1).masked_fill(elsewhere_C, 0.0)
    exponentials_CV = logits_CV.exp_()
    sums_2C = comm.all_reduce(torch.stack((exponentials_CV.sum(-1), picked_C)), "sum", f"{what}, sums of exponentials")
    losses_C = (sums_2C[0].log() - sums_2C[1]).masked_fill(ignored_C, 0.0)
    grad_CV = exponentials_CV.div_(sums_2C[0][:, None])
    grad_CV.scatter_add_(1, index_C1, torch.where(elsewhere_C, 0.0, -1.0).to(grad_CV.dtype)[:, None])
    return losses_C, grad_CV.masked_fill_(ignored_C[:, None], 0.0)
