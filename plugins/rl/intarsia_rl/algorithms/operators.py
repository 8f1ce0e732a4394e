"""The operator of policy losses. Shape suffixes: N tokens, D model width, V vocabulary."""

from __future__ import annotations

import torch
from intarsia import ops
from intarsia.contracts import IGNORE
from intarsia.ops import Operator
from torch import Tensor


def reference(
    hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, *, softcap: float | None = None, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """(log-probability [N], entropy [N] without gradient), float32, in nats, of `softmax(hidden @ weight^T)`; both 0 where the token is IGNORE.

    `softcap` c makes the logits z `c * tanh(z / c)`. The logits of `chunk` tokens are there at once.
    """
    chosen, entropies = [], []
    for start in range(0, hidden_ND.shape[0], chunk):
        tokens = tokens_N[start : start + chunk]
        logits_NV = ops.linear(hidden_ND[start : start + chunk], weight_VD).float()
        logits_NV = logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)
        log_p_NV = logits_NV.log_softmax(-1)
        ignored_N = tokens == IGNORE
        index_N1 = tokens.masked_fill(ignored_N, 0)[:, None]
        chosen.append(log_p_NV.gather(1, index_N1).squeeze(1).masked_fill(ignored_N, 0.0))
        fixed_NV = log_p_NV.detach()
        entropies.append(-(fixed_NV.exp() * fixed_NV).sum(-1).masked_fill(ignored_N, 0.0))
    if not chosen:
        nothing = hidden_ND.sum(-1).float()
        return nothing, nothing.detach()
    return torch.cat(chosen), torch.cat(entropies)


token_log_probs = Operator("token_log_probs", reference, "other", invariant=False)
