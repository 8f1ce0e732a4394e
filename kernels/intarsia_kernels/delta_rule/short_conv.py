"""`short_conv` in Triton: inputs are read once forward; once, with the outputs' gradients, backward.

    y_t = act(s_t),  s_t = sum over j of w_(K-1-j) x_(t-j), x of other documents 0;   ds = dy act'(s);   dx_t = sum over j of w_(K-1-j) ds_(t+j);   dw_(K-1-j) = sum over t of ds_t x_(t-j)

Backward walks along the tokens with the last K - 1 inputs and the gradients that are not complete yet in registers, so that s is computed once. Gradients of weights are summed by pieces of
`LENGTH` tokens, then over pieces in order: no atomics.

Shape suffixes: B rows, S tokens, C channels, K taps, P pieces.
"""

# Triton compiles sums of tuples, and no unpacking of them, and their lengths are its constants.
# ruff: noqa: RUF005
# mypy: disable-error-code=assignment
from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from intarsia_models_common.linear_attention.short_conv import tail
from torch import Tensor

from intarsia_kernels.delta_rule.prepare import limit_of
from intarsia_kernels.direct import direct_op, wrap_triton

ROWS, FORWARD_CHANNELS, FORWARD_WARPS = 32, 128, 4
"""Tokens and channels of a program, forward, and its warps."""
LENGTH, CHANNELS, WARPS = 256, 256, 1
"""The same, backward."""
MOST_TAPS = 8


@triton.jit
def _begins(documents_pointer, row, token, limit, tokens, DOCUMENTS: tl.constexpr):
    """Whether a token's document is another than that of the token before it in the row."""
    if DOCUMENTS:
        inside = (token > 0) & (token < limit)
        place = row.to(tl.int64) * tokens + token
        here = tl.load(documents_pointer + place, mask=inside, other=0)
        begins = here != tl.load(documents_pointer + place - 1, mask=inside, other=0)
    else:
        begins = token < -tokens
    return begins


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x_pointer, weight_pointer, state_pointer, documents_pointer, counts_pointer, y_pointer, tokens, channels,
    TAPS: tl.constexpr, SILU: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr, COUNTS: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(tokens, ROWS)
    row = tl.program_id(0) // pieces
    token = (tl.program_id(0) - row * pieces) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask_C = channel < channels
    limit = limit_of(counts_pointer, row, tokens, COUNTS)
    first = row.to(tl.int64) * tokens
    sums = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    same = token < tokens
    for j in tl.static_range(TAPS):
        source = token - j
        if j > 0:
            same = same & ~_begins(documents_pointer, row, source + 1, limit, tokens, DOCUMENTS)
        weight = tl.load(weight_pointer + channel * TAPS + TAPS - 1 - j, mask=mask_C, other=0.0).to(tl.float32)
        mask = (same & (source >= 0))[:, None] & mask_C[None, :]
        x = tl.load(x_pointer + (first + source)[:, None] * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        if STATE and j > 0:
            past = (row.to(tl.int64) + 1) * (TAPS - 1) + source
            mask = (same & (source < 0))[:, None] & mask_C[None, :]
            x += tl.load(state_pointer + past[:, None] * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += x * weight[None, :]
    if SILU:
        sums *= tl.sigmoid(sums)
    to = y_pointer + (first + token)[:, None] * channels + channel[None, :]
    tl.store(to, sums.to(y_pointer.dtype.element_ty), mask=(token < tokens)[:, None] & mask_C[None, :])


@triton.jit
def _step(x, window, pending, dweights, weights, dy, age, counted, TAPS: tl.constexpr, SILU: tl.constexpr):
    """One token: its sum, what it adds to gradients; the oldest gradient is complete then. `window`: inputs, the newest first; `pending` likewise."""
    inputs = (x,) + window
    sums = x * weights[0]
    for j in tl.static_range(1, TAPS):
        sums += tl.where(age >= j, inputs[j], 0.0) * weights[j]
    if SILU:
        gate = tl.sigmoid(sums)
        dy *= gate * (1.0 + sums * (1.0 - gate))
    grown, summed = (dy * weights[0],), (dweights[0] + tl.where(counted, dy, 0.0) * x,)
    for j in tl.static_range(1, TAPS):
        seen = tl.where(age >= j, dy, 0.0)
        grown = grown + (pending[j - 1] + seen * weights[j],)
        summed = summed + (dweights[j] + tl.where(counted, seen, 0.0) * inputs[j],)
    kept, left = (), ()
    for j in tl.static_range(TAPS - 1):
        kept, left = kept + (inputs[j],), left + (grown[j],)
    return grown[TAPS - 1], kept, left, summed


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    dy_pointer, x_pointer, weight_pointer, state_pointer, documents_pointer, counts_pointer, dx_pointer, dweight_pointer, dstate_pointer,
    tokens, channels,
    TAPS: tl.constexpr, SILU: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr, COUNTS: tl.constexpr, LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(tokens, LENGTH)
    row = tl.program_id(0) // pieces
    first = (tl.program_id(0) - row * pieces) * LENGTH
    stop = tl.minimum(first + LENGTH, tokens)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask_C = channel < channels
    limit = limit_of(counts_pointer, row, tokens, COUNTS)
    offset = row.to(tl.int64) * tokens * channels + channel
    x_row, dy_row, dx_row = x_pointer + offset, dy_pointer + offset, dx_pointer + offset
    past = (row.to(tl.int64) + 1) * (TAPS - 1) * channels + channel
    weights, window, pending, dweights = (), (), (), ()
    for j in tl.static_range(TAPS):
        weights = weights + (tl.load(weight_pointer + channel * TAPS + TAPS - 1 - j, mask=mask_C, other=0.0).to(tl.float32),)
        dweights = dweights + (tl.zeros([CHANNELS], dtype=tl.float32),)
    for _j in tl.static_range(TAPS - 1):
        window, pending = window + (tl.zeros([CHANNELS], dtype=tl.float32),), pending + (tl.zeros([CHANNELS], dtype=tl.float32),)
    age = tl.zeros([], dtype=tl.int32) + TAPS
    for number in range(stop - first + 2 * (TAPS - 1)):
        token = first - (TAPS - 1) + number
        wide = first.to(tl.int64) - (TAPS - 1) + number
        age = tl.where(_begins(documents_pointer, row, token, limit, tokens, DOCUMENTS), 0, age + 1)
        x = tl.load(x_row + wide * channels, mask=mask_C & (token >= 0) & (token < tokens), other=0.0).to(tl.float32)
        if STATE:
            x += tl.load(state_pointer + past + wide * channels, mask=mask_C & (token < 0), other=0.0).to(tl.float32)
        dy = tl.load(dy_row + wide * channels, mask=mask_C & (token >= first) & (token < tokens), other=0.0).to(tl.float32)
        dx, window, pending, dweights = _step(x, window, pending, dweights, weights, dy, age, token < stop, TAPS, SILU)
        done = wide - (TAPS - 1)
        tl.store(dx_row + done * channels, dx.to(dx_pointer.dtype.element_ty), mask=mask_C & (done >= first) & (done < stop))
        if STATE:
            to = dstate_pointer + past + done * channels
            tl.store(to, dx.to(dstate_pointer.dtype.element_ty), mask=mask_C & (first == 0) & (done < 0) & (done >= -(TAPS - 1)))
    to = dweight_pointer + (tl.program_id(0).to(tl.int64) * channels + channel) * TAPS
    for j in tl.static_range(TAPS):
        tl.store(to + TAPS - 1 - j, dweights[j], mask=mask_C)


@direct_op("intarsia::short_conv_forward")
def short_conv_forward(
    x_BSC: Tensor, weight_CK: Tensor, state_BKC: Tensor | None, documents_BS: Tensor | None, counts_B: Tensor | None, silu: bool
) -> Tensor:
    """y [B, S, C]."""
    y_BSC = torch.empty_like(x_BSC)
    rows, tokens, channels = x_BSC.shape
    wrap_triton(_forward)[(rows * triton.cdiv(tokens, ROWS), triton.cdiv(channels, FORWARD_CHANNELS))](
        x_BSC, weight_CK, state_BKC, documents_BS, counts_B, y_BSC, tokens, channels,
        TAPS=weight_CK.shape[1], SILU=silu, STATE=state_BKC is not None, DOCUMENTS=documents_BS is not None, COUNTS=counts_B is not None,
        ROWS=ROWS, CHANNELS=FORWARD_CHANNELS, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return y_BSC


@direct_op("intarsia::short_conv_backward")
def short_conv_backward(
    dy_BSC: Tensor,
    x_BSC: Tensor,
    weight_CK: Tensor,
    state_BKC: Tensor | None,
    documents_BS: Tensor | None,
    counts_B: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx; dw by pieces [P, C, K] float32; and the gradient of the state ([0] without one)."""
    rows, tokens, channels = x_BSC.shape
    pieces = rows * triton.cdiv(tokens, LENGTH)
    dx_BSC = torch.empty_like(x_BSC)
    dweight_PCK = weight_CK.new_empty(pieces, *weight_CK.shape, dtype=torch.float32)
    dstate_BKC = x_BSC.new_empty(0) if state_BKC is None else torch.empty_like(state_BKC)
    wrap_triton(_backward)[(pieces, triton.cdiv(channels, CHANNELS))](
        dy_BSC, x_BSC, weight_CK, state_BKC, documents_BS, counts_B, dx_BSC, dweight_PCK, dstate_BKC, tokens, channels,
        TAPS=weight_CK.shape[1], SILU=silu, STATE=state_BKC is not None, DOCUMENTS=documents_BS is not None, COUNTS=counts_B is not None,
        LENGTH=LENGTH, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
    return dx_BSC, dweight_PCK, dstate_BKC


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSC: Tensor,
        weight_CK: Tensor,
        state_BKC: Tensor | None,
        documents_BS: Tensor | None,
        counts_B: Tensor | None,
        silu: bool,
    ) -> Tensor:
        x_BSC, weight_CK = x_BSC.contiguous(), weight_CK.contiguous()
        kept = (x_BSC, weight_CK, *(None if x is None else x.contiguous() for x in (state_BKC, documents_BS, counts_B)))
        ctx.save_for_backward(*kept)
        ctx.silu = silu
        return short_conv_forward(*kept, silu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BSC, weight_CK, state_BKC, documents_BS, counts_B = ctx.saved_tensors
        dx_BSC, dweight_PCK, dstate_BKC = short_conv_backward(
            grads[0].contiguous(), x_BSC, weight_CK, state_BKC, documents_BS, counts_B, ctx.silu
        )
        return dx_BSC, dweight_PCK.sum(0).to(weight_CK.dtype), None if state_BKC is None else dstate_BKC, None, None, None


def short_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    state_BKC: Tensor | None = None,
    documents_BS: Tensor | None = None,
    counts_B: Tensor | None = None,
    activation: Literal["silu", "none"] = "silu",
) -> tuple[Tensor, Tensor]:
    """As the operator `short_conv`."""
    state = None if state_BKC is None else state_BKC.to(x_BSC.dtype)
    y_BSC = _ShortConv.apply(x_BSC, weight_CK, state, documents_BS, counts_B, activation == "silu")
    return y_BSC, tail(x_BSC, state_BKC, documents_BS, counts_B, weight_CK.shape[1] - 1)


def supports(
    x_BSC: Tensor,
    weight_CK: Tensor,
    state_BKC: Tensor | None = None,
    documents_BS: Tensor | None = None,
    counts_B: Tensor | None = None,
    activation: str = "silu",
) -> str | None:
    """Why a call cannot be taken."""
    if activation not in ("silu", "none"):
        return f"activation {activation!r}"
    if torch.float64 in (x_BSC.dtype, weight_CK.dtype):
        return "it computes in float32"
    if not 2 <= weight_CK.shape[1] <= MOST_TAPS:
        return f"{weight_CK.shape[1]} taps; it takes 2 to {MOST_TAPS}"
    return None if x_BSC.numel() else "no tokens"


short_conv.supports = supports  # type: ignore[attr-defined]
