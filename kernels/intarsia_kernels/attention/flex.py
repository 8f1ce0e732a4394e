"""`attention` by torch's flex_attention. Shape suffixes as in `intarsia.ops`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from intarsia.ops import Packing
from torch import Tensor
from torch.nn.attention import flex_attention as flex

SHORT = 128
"""Rows of fewer queries go to a kernel for decoding, where torch finds no tiles for some lengths (97, say): an error."""


def attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    documents_q_BS: Tensor | None = None,
    documents_k_BT: Tensor | None = None,
    positions_q_BS: Tensor | None = None,
    positions_k_BT: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """As `intarsia.ops.attention`. The block mask of a packed batch is the one that `prepare` made, else made here."""
    mask = None if packing is None else packing.prepared.get(("flex", window))
    if mask is None:
        mask = _block_mask(q_BSHD.shape[0], q_BSHD.shape[1], window, documents_k_BT, q_BSHD.device)
    run: Any = flex.flex_attention if torch.compiler.is_compiling() else _compiled()
    named: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": q_BSHD.shape[2] != k_BTKD.shape[2]}
    if q_BSHD.shape[1] < SHORT:
        named["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if softcap is not None:
        named["score_mod"] = _softcap(softcap)
    q, k, v = q_BSHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
    if sinks_H is None:
        return run(q, k, v, **named).transpose(1, 2)
    y_BHSD, lse_BHS = _with_lse(run, q, k, v, named)
    # A sink adds exp(sink) to the denominator exp(lse): the outputs shrink by exp(lse) / (exp(lse) + exp(sink)).
    keep_BHS = torch.sigmoid(lse_BHS - sinks_H.to(lse_BHS.dtype)[None, :, None])
    return (y_BHSD * keep_BHS[..., None].to(y_BHSD.dtype)).transpose(1, 2)


def supports(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    positions_q_BS: Tensor | None = None,
    positions_k_BT: Tensor | None = None,
    **_: Any,
) -> str | None:
    """Why a call cannot be taken."""
    if positions_q_BS is not None or positions_k_BT is not None:
        return "positions would need a block mask for each call"
    if q_BSHD.shape[1] != k_BTKD.shape[1]:
        return "it serves whole rows, with as many keys as queries"
    return None


def prepare(packing: Packing, windows: Sequence[int | None], documents_BS: Tensor) -> None:
    """Make the block mask of each window once for a batch."""
    for window in windows:
        rows, tokens = documents_BS.shape
        packing.prepared["flex", window] = _block_mask(rows, tokens, window, documents_BS, documents_BS.device)


attention.supports = supports  # type: ignore[attr-defined]
attention.prepare = prepare  # type: ignore[attr-defined]


def _block_mask(rows: int, tokens: int, window: int | None, documents_BS: Tensor | None, device: torch.device) -> Any:
    if documents_BS is None:
        return _causal_mask(tokens, window, str(device))

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query >= key) if window is None else (query >= key) & (query - key < window)
        return near & (documents_BS[b, query] == documents_BS[b, key]) & (documents_BS[b, key] >= 0)

    return flex.create_block_mask(seen, rows, None, tokens, tokens, device=device)


@functools.lru_cache(maxsize=16)
def _causal_mask(tokens: int, window: int | None, device: str) -> Any:
    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) if window is None else (query >= key) & (query - key < window)

    return flex.create_block_mask(seen, None, None, tokens, tokens, device=device)


@functools.lru_cache(maxsize=16)
def _softcap(cap: float) -> Callable[..., Tensor]:
    def modify(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return modify


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Uncompiled, flex_attention makes the whole matrix of scores."""
    return torch.compile(flex.flex_attention, dynamic=False)


def _with_lse(run: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if hasattr(flex, "AuxRequest"):
        y, aux = run(q, k, v, return_aux=flex.AuxRequest(lse=True), **named)
        return y, aux.lse
    return run(q, k, v, return_lse=True, **named)
