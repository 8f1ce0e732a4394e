"""`gated_delta_rule` by other packages' kernels, where they are installed: flash-linear-attention (`fla`) and Attention Gym (`attn_gym`).

Both take packed documents as offsets, whose number the host must wait for. Shape suffixes: B rows, S tokens, H heads, K key dim, V value dim, N documents of all rows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from intarsia_models_common.linear_attention.delta_rule import NORM_EPS
from intarsia_models_common.linear_attention.tokens import real, segments, silenced
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
    inputs = silenced(inputs, real(tokens, counts_B))
    offsets, until_B = _offsets(documents_BS, counts_B, rows, tokens, inputs[0].device)
    state_NHKV = None
    if state_BHKV is not None:
        zeros_NHKV = state_BHKV.new_zeros(len(offsets) - 1, *state_BHKV.shape[1:], dtype=torch.float32)
        state_NHKV = zeros_NHKV.index_copy(0, F.pad(until_B[:-1], (1, 0)), state_BHKV.float())
    y, final_NHKV = run(*(x.reshape(1, rows * tokens, *x.shape[2:]) for x in inputs), state_NHKV, offsets)
    return y.view(rows, tokens, *y.shape[2:]), final_NHKV.index_select(0, until_B - 1)


def _adapter(run: Callable[..., tuple[Tensor, Tensor]], widths: Callable[[int, int], str | None]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator by `run(q, k, v, decay, beta, state_NHKV, offsets, scale=, normalise=)`. `widths` says why keys and values of some widths cannot be taken."""

    def gated_delta_rule(
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
        inputs = (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH)
        return _by_documents(functools.partial(run, scale=scale, normalise=normalise), inputs, state_BHKV, documents_BS, counts_B)

    def supports(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, *_: Any, form: str = "chunked", **__: Any) -> str | None:
        if form != "chunked":
            return "it computes by chunks, not token by token"
        if q_BSHK.dtype not in HALVES or not q_BSHK.dtype == k_BSHK.dtype == v_BSHV.dtype:
            return "it takes queries, keys and values in bfloat16 or float16 alone"
        return widths(k_BSHK.shape[-1], v_BSHV.shape[-1]) if q_BSHK.numel() else "no tokens"

    gated_delta_rule.supports = supports  # type: ignore[attr-defined]
    return gated_delta_rule


def run_fla(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, offsets: Tensor, *, scale: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """By `fla.ops.gated_delta_rule.chunk_gated_delta_rule`: outputs, and states [N, H, K, V]."""
    found: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    named = {"scale": scale, "initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": normalise}
    y, final = found(q, k, v, decay.float(), beta, **named, cu_seqlens=offsets)
    return y, final


def _fla_refuses(keys: int, values: int) -> str | None:
    return f"keys of width {keys}; it takes up to {WIDEST}" if keys > WIDEST else fla_refuses_here()


@functools.cache
def fla_refuses_here() -> str | None:
    """Why flash-linear-attention does not go back with the Triton and the GPU of this process; None where it does, or is not installed (its entry says so)."""
    if not importlib.util.find_spec("fla") or importlib.util.find_spec("tilelang"):
        return None
    known = vars(importlib.import_module("fla.utils"))
    if known.get("IS_NVIDIA_HOPPER") and known.get("TRITON_ABOVE_3_4_0") and not known.get("TRITON_ABOVE_3_7_1", True):
        return "Triton from 3.4.0 to 3.7.0 on Hopper, with which its backward pass would be wrong; it needs 3.7.1 or tilelang"
    return None


def run_attn_gym(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, offsets: Tensor, *, scale: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """By `attn_gym.linear.chunk_gdn`, whose states are [V, K]; lengths are divided by before it."""
    found: Any = importlib.import_module("attn_gym.linear").chunk_gdn
    if normalise:
        q, k = ((x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + NORM_EPS)).to(x.dtype) for x in (q, k))
    state = None if state is None else state.mT.contiguous()
    y, final = found(q, k, v, decay, beta, state, cu_seqlens=offsets.int(), scale=scale, output_final_state=True)
    return y, final.mT


def _attn_gym_widths(keys: int, values: int) -> str | None:
    if keys == values and keys in EQUAL_WIDTHS:
        return None
    return f"keys of width {keys} and values of {values}; it takes both of {' or '.join(map(str, EQUAL_WIDTHS))}"


fla = _adapter(run_fla, _fla_refuses)
attn_gym = _adapter(run_attn_gym, _attn_gym_widths)
