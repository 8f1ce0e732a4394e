"""`gated_delta_rule` by other packages' kernels, where they are installed: flash-linear-attention (`fla`) and Attention Gym (`attn_gym`).

Both take packed documents as offsets, whose number the host must wait for. Shape suffixes: B rows, S tokens, H heads, K key dim, V value dim, N documents of all rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from intarsia_models_common.linear_attention.delta_rule import NORM_EPS
from intarsia_models_common.linear_attention.tokens import real, segments
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
WIDEST = 256
"""Of keys, for `fla`."""
EQUAL_WIDTHS = (64, 128)
"""Of keys and values alike, for `attn_gym`."""


def _offsets(documents_BS: Tensor | None, counts_B: Tensor | None, rows: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where documents begin in all rows one after the other, with the end [N + 1], and how many have begun by each row's end [B]. Waits for the device where documents are known."""
    segment_BS = segments(documents_BS, counts_B)
    if segment_BS is None:
        return torch.arange(rows + 1, device=device) * tokens, torch.arange(1, rows + 1, device=device)
    begins_BS = F.pad(segment_BS[:, 1:] != segment_BS[:, :-1], (1, 0), value=True)
    starts_N = begins_BS.flatten().nonzero().flatten()
    return F.pad(starts_N, (0, 1), value=rows * tokens), begins_BS.sum(1).cumsum(0)


def _by_documents(
    run: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    state_BHKV: Tensor | None,
    documents_BS: Tensor | None,
    counts_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`run(q, k, v, decay, beta, state_NHKV, offsets)` of one row that holds all rows' documents."""
    rows, tokens = inputs[0].shape[:2]
    real_BS = real(tokens, counts_B)
    if real_BS is not None:
        q, k, v, decay, beta = inputs
        hidden_BS1 = ~real_BS[..., None]
        q, k, v = (x.masked_fill(hidden_BS1[..., None], 0.0) for x in (q, k, v))
        inputs = (q, k, v, decay.masked_fill(hidden_BS1, 0.0), beta.masked_fill(hidden_BS1, 0.0))
    offsets, until_B = _offsets(documents_BS, counts_B, rows, tokens, inputs[0].device)
    state_NHKV = None
    if state_BHKV is not None:
        zeros_NHKV = state_BHKV.new_zeros(len(offsets) - 1, *state_BHKV.shape[1:], dtype=torch.float32)
        state_NHKV = zeros_NHKV.index_copy(0, F.pad(until_B[:-1], (1, 0)), state_BHKV.float())
    y, final_NHKV = run(*(x.reshape(1, rows * tokens, *x.shape[2:]) for x in inputs), state_NHKV, offsets)
    return y.view(rows, tokens, *y.shape[2:]), final_NHKV.index_select(0, until_B - 1)


def _refused(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, form: str) -> str | None:
    if form != "chunked":
        return "it computes by chunks, not token by token"
    if q_BSHK.dtype not in HALVES or not q_BSHK.dtype == k_BSHK.dtype == v_BSHV.dtype:
        return "it takes queries, keys and values in bfloat16 or float16 alone"
    return None if q_BSHK.numel() else "no tokens"


def fla(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BS: Tensor | None = None,
    counts_B: Tensor | None = None,
    *,
    scale: float,
    normalise: bool,
    chunk: int = 64,
    form: Literal["chunked", "recurrent"] = "chunked",
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the operator `gated_delta_rule`, by `fla.ops.gated_delta_rule.chunk_gated_delta_rule`."""
    found: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, decay, beta, state, offsets = inputs
        named = {"scale": scale, "initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": normalise}
        return found(q, k, v, decay.float(), beta, **named, cu_seqlens=offsets)

    return _by_documents(run, (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH), state_BHKV, documents_BS, counts_B)


def attn_gym(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BS: Tensor | None = None,
    counts_B: Tensor | None = None,
    *,
    scale: float,
    normalise: bool,
    chunk: int = 64,
    form: Literal["chunked", "recurrent"] = "chunked",
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the operator `gated_delta_rule`, by `attn_gym.linear.chunk_gdn`, whose states are [V, K]; lengths are divided by before it."""
    found: Any = importlib.import_module("attn_gym.linear").chunk_gdn
    if normalise:
        q_BSHK, k_BSHK = (
            (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + NORM_EPS)).to(x.dtype) for x in (q_BSHK, k_BSHK)
        )

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, decay, beta, state, offsets = inputs
        state = None if state is None else state.mT.contiguous()
        y, final = found(q, k, v, decay, beta, state, cu_seqlens=offsets.int(), scale=scale, output_final_state=True)
        return y, final.mT

    return _by_documents(run, (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH), state_BHKV, documents_BS, counts_B)


def _fla_supports(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, *_: Any, form: str = "chunked", **__: Any) -> str | None:
    """Why a call cannot be taken."""
    if k_BSHK.shape[-1] > WIDEST:
        return f"keys of width {k_BSHK.shape[-1]}; it takes up to {WIDEST}"
    return _refused(q_BSHK, k_BSHK, v_BSHV, form)


def _attn_gym_supports(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, *_: Any, form: str = "chunked", **__: Any) -> str | None:
    """Why a call cannot be taken."""
    if k_BSHK.shape[-1] != v_BSHV.shape[-1] or k_BSHK.shape[-1] not in EQUAL_WIDTHS:
        return f"keys of width {k_BSHK.shape[-1]} and values of {v_BSHV.shape[-1]}; it takes both of {' or '.join(map(str, EQUAL_WIDTHS))}"
    return _refused(q_BSHK, k_BSHK, v_BSHV, form)


fla.supports = _fla_supports  # type: ignore[attr-defined]
attn_gym.supports = _attn_gym_supports  # type: ignore[attr-defined]
