"""The reference of `short_conv`: a causal convolution of a few taps for each channel, as it stands before a linear recurrence.

    y_t = act( sum over j of w_(K-1-j) x_(t-j) ),   j = 0 .. K-1, x of other documents counted as 0

Shape suffixes: B rows, S tokens, C channels, K taps, E = K - 1 + S entries: past inputs, then the tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from intarsia.errors import UsageError, did_you_mean
from torch import Tensor

from intarsia_models_common.linear_attention.tokens import segments, wide

Activation = Literal["silu", "none"]


def short_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    state_BKC: Tensor | None = None,
    documents_BS: Tensor | None = None,
    counts_B: Tensor | None = None,
    activation: Activation = "silu",
) -> tuple[Tensor, Tensor]:
    """Outputs [B, S, C] and the state after them, [B, K - 1, C], both in x's dtype; sums are float32.

    The state is the last K - 1 inputs of the document that goes on, zeros where it has fewer; `state_BKC` (None: zeros) comes into the first token's document. A
    convolution begins anew where `documents_BS` (integers, None: one document) changes. `counts_B` (int64, None: all) says how many of each row's tokens are real: those behind leave
    the state as it was, and their outputs say nothing.
    """
    if activation not in ("silu", "none"):
        raise UsageError(f"short_conv: activation is {activation!r}. {did_you_mean(activation, ('silu', 'none'))}")
    past = weight_CK.shape[1] - 1
    x_BEC = _entries(x_BSC, past, state_BKC)
    segment_BS = segments(documents_BS, counts_B)
    segment_BE = None if segment_BS is None else F.pad(segment_BS, (past, 0))
    y_BSC = _ShortConv.apply(x_BEC, weight_CK, segment_BE, activation == "silu")
    return y_BSC, tail(x_BSC, state_BKC, documents_BS, counts_B, past)


def _entries(x_BSC: Tensor, past: int, state_BKC: Tensor | None) -> Tensor:
    """Past inputs, then the tokens, [B, E, C]."""
    return F.pad(x_BSC, (0, 0, past, 0)) if state_BKC is None else torch.cat((state_BKC.to(x_BSC.dtype), x_BSC), 1)


def tail(x_BSC: Tensor, state_BKC: Tensor | None, documents_BS: Tensor | None, counts_B: Tensor | None, past: int) -> Tensor:
    """The last `past` real inputs of each row's last document, zeros where it has fewer. Looks at no other tokens."""
    rows, tokens, channels = x_BSC.shape
    if tokens == 0:
        return _entries(x_BSC, past, state_BKC)
    ends_B1 = x_BSC.new_full((rows, 1), tokens, dtype=torch.long) if counts_B is None else counts_B[:, None]
    at_BK = ends_B1 - past + torch.arange(past, device=x_BSC.device)
    places_BKC = at_BK.clamp_min(0)[..., None].expand(-1, -1, channels)
    tail_BKC = x_BSC.gather(1, places_BKC).masked_fill((at_BK < 0)[..., None], 0.0)
    if state_BKC is not None:
        before_BKC = state_BKC.to(x_BSC.dtype).gather(1, (at_BK + past).clamp_max(past - 1)[..., None].expand(-1, -1, channels))
        tail_BKC = torch.where((at_BK < 0)[..., None], before_BKC, tail_BKC)
    if documents_BS is None:
        return tail_BKC
    here_BK, before_BK = (documents_BS.gather(1, (at_BK - back).clamp_min(0)) for back in (0, 1))
    begins_BK = F.pad((here_BK != before_BK)[:, 1:].long(), (0, 1))
    return tail_BKC.masked_fill((begins_BK.flip(1).cumsum(1).flip(1) > 0)[..., None], 0.0)


class _ShortConv(torch.autograd.Function):
    """Keeps the inputs alone: what lies between is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, x_BEC: Tensor, weight_CK: Tensor, segment_BE: Tensor | None, is_silu: bool) -> Tensor:
        ctx.save_for_backward(x_BEC, weight_CK, *(() if segment_BE is None else (segment_BE,)))
        ctx.is_silu = is_silu
        sums_BSC = _sums(x_BEC, weight_CK, segment_BE)
        return (sums_BSC * _sigmoid(sums_BSC) if is_silu else sums_BSC).to(x_BEC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BEC, weight_CK, *others = ctx.saved_tensors
        segment_BE = others[0] if others else None
        dsums_BSC = grads[0].to(wide(x_BEC.dtype))
        if ctx.is_silu:
            sums_BSC = _sums(x_BEC, weight_CK, segment_BE)
            gate_BSC = _sigmoid(sums_BSC)
            dsums_BSC = dsums_BSC * gate_BSC * (1 + sums_BSC * (1 - gate_BSC))
        taps, tokens = weight_CK.shape[1], dsums_BSC.shape[1]
        dx_BEC = torch.zeros_like(x_BEC, dtype=dsums_BSC.dtype)
        dweight = []
        for tap in range(taps):
            seen_BSC = _seen(dsums_BSC, segment_BE, tap, taps)
            dx_BEC[:, tap : tap + tokens] += seen_BSC * weight_CK[:, tap].to(dsums_BSC.dtype)
            dweight.append((seen_BSC * x_BEC[:, tap : tap + tokens].to(dsums_BSC.dtype)).sum((0, 1)))
        return dx_BEC.to(x_BEC.dtype), torch.stack(dweight, 1).to(weight_CK.dtype), None, None


def _sigmoid(x: Tensor) -> Tensor:
    # torch's own float32 sigmoid on a CPU depends, in its last bit, on how many elements there are; its exponential does not.
    return 1 / (1 + (-x).exp())


def _sums(x_BEC: Tensor, weight_CK: Tensor, segment_BE: Tensor | None) -> Tensor:
    taps = weight_CK.shape[1]
    tokens = x_BEC.shape[1] - taps + 1
    weight_KC = weight_CK.t().to(wide(x_BEC.dtype))
    sums_BSC = x_BEC[:, taps - 1 :] * weight_KC[-1]
    for tap in range(taps - 1):
        sums_BSC += _seen(x_BEC[:, tap : tap + tokens].to(weight_KC.dtype), segment_BE, tap, taps) * weight_KC[tap]
    return sums_BSC


def _seen(x_BSC: Tensor, segment_BE: Tensor | None, tap: int, taps: int) -> Tensor:
    """What stands at tokens whose entry at `tap` is of their own document; 0 elsewhere."""
    if segment_BE is None or tap == taps - 1:
        return x_BSC
    is_other_BS = segment_BE[:, tap : tap + x_BSC.shape[1]] != segment_BE[:, taps - 1 :]
    return x_BSC.masked_fill(is_other_BS[..., None], 0.0)
