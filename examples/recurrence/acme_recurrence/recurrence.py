"""The gated linear recurrence. B rows, S tokens, H heads, D head dim, C tokens of a chunk.

    M_t = a_t M_(t-1) + k_t^T v_t,   y_t = q_t M_t,   0 < a_t <= 1,   M = 0 before a document's first token

A run of tokens takes a state M to A M + N, with A the product of its gates (0 where a document begins within it) and N what it leaves of nothing. Two runs, one
after the other: A' A and A' N + N'. That (A, N) is a carry, and combining carries is associative.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""Tokens that are computed as one matrix product; between chunks the state is passed on."""

Carry = tuple[Tensor, Tensor]
"""gates_BH, state_BHDD."""


class GatedRecurrence:
    """What a context calls to run the recurrence, and what it needs to run it in parts (`SequenceContext.recurrent`)."""

    def __call__(
        self,
        q_BSHD: Tensor,
        k_BSHD: Tensor,
        v_BSHD: Tensor,
        decay_BSH: Tensor,
        *,
        state: Tensor | None,
        documents_BS: Tensor | None,
        counts_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs [B, S, H, D] and the state at the end. `decay_BSH` is log a. `state` [B, H, D, D] comes into the first token's document. What lies behind the first
        `counts_B` tokens of a row changes nothing."""
        rows, tokens, heads, dim = q_BSHD.shape
        k_BSHD, decay_BSH, documents_BS = _real(k_BSHD, decay_BSH, documents_BS, counts_B)
        kept = q_BSHD.new_zeros(rows, heads, dim, dim) if state is None else state
        outputs = []
        for start in range(0, max(1, tokens), CHUNK):  # of no tokens the gradients are zeros, not absent
            at = slice(start, start + CHUNK)
            documents_BC = None if documents_BS is None else documents_BS[:, at]
            if documents_BS is not None and start:
                goes_on_B = documents_BS[:, start] == documents_BS[:, start - 1]
                kept = torch.where(goes_on_B[:, None, None, None], kept, 0.0)
            outputs.append(_outputs(q_BSHD[:, at], k_BSHD[:, at], v_BSHD[:, at], decay_BSH[:, at], kept, documents_BC))
            gates_BH, left_BHDD = _carry(k_BSHD[:, at], v_BSHD[:, at], decay_BSH[:, at], documents_BC)
            kept = gates_BH[..., None, None] * kept + left_BHDD
        return torch.cat(outputs, 1), kept

    def carry(
        self,
        q_BSHD: Tensor,
        k_BSHD: Tensor,
        v_BSHD: Tensor,
        decay_BSH: Tensor,
        *,
        documents_BS: Tensor | None,
        counts_B: Tensor | None = None,
    ) -> Carry:
        """What these tokens do to a state."""
        k_BSHD, decay_BSH, documents_BS = _real(k_BSHD, decay_BSH, documents_BS, counts_B)
        return _carry(k_BSHD, v_BSHD, decay_BSH, documents_BS)

    def combine(self, earlier: Carry, later: Carry) -> Carry:
        """What two neighbouring runs of tokens do together."""
        return later[0] * earlier[0], later[0][..., None, None] * earlier[1] + later[1]


def _real(k_BSHD: Tensor, decay_BSH: Tensor, documents_BS: Tensor | None, counts_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens behind a row's count made into such as write nothing, forget nothing and begin no document."""
    if counts_B is None:
        return k_BSHD, decay_BSH, documents_BS
    index_S = torch.arange(k_BSHD.shape[1], device=k_BSHD.device)
    behind_BS1 = (index_S >= counts_B[:, None])[..., None]
    if documents_BS is not None:
        documents_BS = documents_BS.gather(1, torch.minimum(index_S, (counts_B[:, None] - 1).clamp(min=0)))
    return k_BSHD.masked_fill(behind_BS1[..., None], 0.0), decay_BSH.masked_fill(behind_BS1, 0.0), documents_BS


def _carry(k_BSHD: Tensor, v_BSHD: Tensor, decay_BSH: Tensor, documents_BS: Tensor | None) -> Carry:
    remaining_BSH = (decay_BSH.sum(1, keepdim=True) - decay_BSH.cumsum(1)).exp()
    gates_BH = decay_BSH.sum(1).exp()
    if documents_BS is not None:
        last_BS = documents_BS == documents_BS[:, -1:]
        remaining_BSH = remaining_BSH * last_BS[..., None]
        gates_BH = gates_BH * last_BS.all(1)[:, None]
    return gates_BH, torch.einsum("bsh,bshd,bshe->bhde", remaining_BSH, k_BSHD, v_BSHD)


def _outputs(q_BCHD: Tensor, k_BCHD: Tensor, v_BCHD: Tensor, decay_BCH: Tensor, state_BHDD: Tensor, documents_BC: Tensor | None) -> Tensor:
    """Each token's, from the tokens of its document in the chunk and from the state."""
    total_BHC = decay_BCH.cumsum(1).transpose(1, 2)
    distance_BHCC = total_BHC[..., :, None] - total_BHC[..., None, :]
    seen_BCC = torch.ones(distance_BHCC.shape[-2:], dtype=torch.bool, device=q_BCHD.device).tril()[None]
    entering_BCH = total_BHC.transpose(1, 2).exp()
    if documents_BC is not None:
        seen_BCC = seen_BCC & (documents_BC[:, :, None] == documents_BC[:, None, :])
        entering_BCH = entering_BCH * (documents_BC == documents_BC[:, :1])[..., None]
    # Masked before the exponential: what is not seen may overflow there.
    weights_BHCC = distance_BHCC.masked_fill(~seen_BCC[:, None], float("-inf")).exp()
    scores_BHCC = torch.einsum("bchd,bthd->bhct", q_BCHD, k_BCHD) * weights_BHCC
    inside_BCHD = torch.einsum("bhct,bthd->bchd", scores_BHCC, v_BCHD)
    return inside_BCHD + entering_BCH[..., None] * torch.einsum("bchd,bhde->bche", q_BCHD, state_BHDD)
