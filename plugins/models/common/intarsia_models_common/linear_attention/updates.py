"""What the mixer gives to `SequenceContext.recurrent`: each update runs an operator, and says what a part of a row does to any state that comes into it.

Shape suffixes: B rows, S tokens, C channels, H heads, K taps or key dim, V value dim, X = K + V.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from intarsia_models_common.linear_attention.operators import GATED_DELTA_RULE, SHORT_CONV
from intarsia_models_common.linear_attention.short_conv import Activation, tail
from intarsia_models_common.linear_attention.tokens import segments, wide

Carry = tuple[Tensor, Tensor]


class ShortConvUpdate:
    """A part of n tokens moves past inputs n places up and puts its own behind them: its carry is (how many places, [B] int64; its own last K - 1 inputs, [B, K - 1, C], zeros where it has fewer).
    Where a document begins within the part all places are its own."""

    def __call__(
        self,
        x_BSC: Tensor,
        *,
        state: Tensor | None,
        documents_BS: Tensor | None,
        counts_B: Tensor | None = None,
        weight_CK: Tensor,
        activation: Activation = "silu",
    ) -> tuple[Tensor, Tensor]:
        """The operator `short_conv`."""
        outputs_BSC, after_BKC = SHORT_CONV(x_BSC, weight_CK, state, documents_BS, counts_B, activation)
        return outputs_BSC, after_BKC

    def carry(
        self, x_BSC: Tensor, *, documents_BS: Tensor | None, counts_B: Tensor | None = None, weight_CK: Tensor, **settings: Any
    ) -> Carry:
        """What these tokens do to past inputs."""
        rows, tokens = x_BSC.shape[:2]
        past = weight_CK.shape[1] - 1
        segment_BS = segments(documents_BS, counts_B)
        moved_B = torch.full((rows,), tokens, device=x_BSC.device) if counts_B is None else counts_B
        if segment_BS is not None:
            moved_B = torch.where(segment_BS[:, -1] > 0, past, moved_B)
        return moved_B.clamp(max=past), tail(x_BSC, None, documents_BS, counts_B, past)

    def combine(self, earlier: Carry, later: Carry) -> Carry:
        """What two neighbouring parts do together."""
        moved_B, own_BKC = later
        past = own_BKC.shape[1]
        at_BK = moved_B[:, None] + torch.arange(past, device=own_BKC.device)
        before_BKC = F.pad(earlier[1], (0, 0, 0, past)).gather(1, at_BK[..., None].expand_as(own_BKC))
        return (earlier[0] + moved_B).clamp(max=past), before_BKC + own_BKC


class DeltaRuleUpdate:
    """A part of tokens takes a state S to A S + N: its carry is (A [B, H, K, K], N [B, H, K, V]). A is 0 where a document begins within the part. Columns of a state do not
    meet, so that A is what the recurrence makes of the identity where no values are written: one run of K more columns gives both."""

    def __call__(
        self,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHV: Tensor,
        decay_BSH: Tensor,
        beta_BSH: Tensor,
        *,
        state: Tensor | None,
        documents_BS: Tensor | None,
        counts_B: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Tensor]:
        """The operator `gated_delta_rule`."""
        inputs = (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH)
        outputs_BSHV, after_BHKV = GATED_DELTA_RULE(*inputs, state, documents_BS, counts_B, **settings)
        return outputs_BSHV, after_BHKV

    def carry(
        self,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHV: Tensor,
        decay_BSH: Tensor,
        beta_BSH: Tensor,
        *,
        documents_BS: Tensor | None,
        counts_B: Tensor | None = None,
        **settings: Any,
    ) -> Carry:
        """What these tokens do to a state."""
        width = k_BSHK.shape[-1]
        rows, _, heads, values = v_BSHV.shape
        identity_KX = torch.eye(width, values + width, dtype=wide(v_BSHV.dtype), device=v_BSHV.device).roll(values, 1)
        v_BSHX = F.pad(v_BSHV, (0, width))
        state_BHKX = identity_KX.expand(rows, heads, -1, -1)
        # Queries have no part in it, and no gradient from it.
        inputs = (k_BSHK.detach(), k_BSHK, v_BSHX, decay_BSH, beta_BSH)
        _, after_BHKX = GATED_DELTA_RULE(*inputs, state_BHKX, documents_BS, counts_B, **settings)
        own_BHKV, kept_BHKK = after_BHKX.split((values, width), -1)
        return kept_BHKK.contiguous(), own_BHKV.contiguous()

    def combine(self, earlier: Carry, later: Carry) -> Carry:
        """What two neighbouring parts do together."""
        return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]
