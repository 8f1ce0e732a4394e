"""What routers do with scores, in whole numbers and few floats: the references of `top_experts`, `expert_weights` and `expert_counts`. N tokens, E experts, K chosen, G groups of experts."""

from __future__ import annotations

import torch
from torch import Tensor


def top_experts(scores_NE: Tensor, top_k: int, groups: int = 1, top_groups: int = 1, group_score: str = "max") -> Tensor:
    """int64 [N, K]: the experts of each token's K largest scores, the largest first, without gradient.

    With `groups` contiguous groups of equal size only experts of the best `top_groups` are chosen. A group is worth its largest score (`max`) or the sum of its two largest (`top2`).
    Which of equal scores comes first is open; experts of a token are distinct.
    """
    scores_NE = scores_NE.detach().to(torch.promote_types(scores_NE.dtype, torch.float32))
    if groups > 1:
        scores_NGe = scores_NE.unflatten(-1, (groups, -1))
        worth_NG = scores_NGe.topk(2, -1).values.sum(-1) if group_score == "top2" else scores_NGe.amax(-1)
        best_Ng = worth_NG.topk(top_groups, -1).indices
        outside_NG = torch.ones_like(worth_NG, dtype=torch.bool).scatter_(1, best_Ng, False)
        # -inf and not 0, since a score with its bias may be negative.
        scores_NE = scores_NGe.masked_fill(outside_NG[..., None], -torch.inf).flatten(1)
    return scores_NE.topk(top_k, dim=-1).indices


def expert_weights(scores_NE: Tensor, experts_NK: Tensor, normalise: bool = False, scale: float = 1.0) -> Tensor:
    """[N, K]: the scores of a token's experts, divided by their sum if `normalise`, times `scale`."""
    weights_NK = scores_NE.gather(1, experts_NK)
    if normalise:
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
    return weights_NK if scale == 1.0 else weights_NK * scale


def expert_counts(counts_E: Tensor, scores_NE: Tensor, dropped: Tensor | None = None) -> Tensor:
    """float64 [E + 3], without gradient: `counts_E`, then the number of tokens, the sum of the entropies (nats) of their scores as shares, and `dropped` (None: 0)."""
    shares_NE = scores_NE.detach().float()
    shares_NE = shares_NE / shares_NE.sum(-1, keepdim=True).clamp_min(1e-20)
    found = scores_NE.new_zeros(counts_E.shape[0] + 3, dtype=torch.float64)
    found[:-3] = counts_E
    found[-3] = scores_NE.shape[0]
    found[-2] = torch.special.entr(shares_NE).sum()
    if dropped is not None:
        found[-1] = dropped
    return found
