"""Attention's reference: any mask that the signature can say, in memory bounded by chunks of queries.

Stability: provisional.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Scores [B, H, chunk, T] that may exist at once (128 MiB of float32).
SCORE_ELEMENTS = 1 << 25


@dataclasses.dataclass(eq=False)
class Packing:
    """What the host knows about packed rows, so that a kernel needs no copy from the device to find out.

    `lengths[b]` are the lengths of the documents in row b, in order, summing to S; the document tensors say the same. `prepared` is where a kernel's
    `prepare` leaves what it derives once for a batch (block masks, cumulative lengths), by its own keys.
    """

    lengths: tuple[tuple[int, ...], ...]
    prepared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def single(self) -> bool:
        """Whether no row holds more than one document, so that plain causal attention is right."""
        return all(len(row) <= 1 for row in self.lengths)


def visible(
    query_tokens: int,
    key_tokens: int,
    device: torch.device,
    window: int | None,
    documents_q_BS: Tensor | None,
    documents_k_BT: Tensor | None,
    positions_q_BS: Tensor | None,
    positions_k_BT: Tensor | None,
) -> Tensor:
    """Which key each query sees: bool [B or 1, S, T]. The definition of `attention`'s mask."""
    if positions_q_BS is None:
        positions_q_BS = torch.arange(key_tokens - query_tokens, key_tokens, device=device)[None]
    if positions_k_BT is None:
        positions_k_BT = torch.arange(key_tokens, device=device)[None]
    distance_BST = positions_q_BS[:, :, None] - positions_k_BT[:, None, :]
    seen_BST = distance_BST >= 0
    if window is not None:
        seen_BST = seen_BST & (distance_BST < window)
    if documents_k_BT is not None:
        if documents_q_BS is not None:
            seen_BST = seen_BST & (documents_q_BS[:, :, None] == documents_k_BT[:, None, :])
        seen_BST = seen_BST & (documents_k_BT >= 0)[:, None, :]
    return seen_BST


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
    """Causal softmax attention, [B, S, H, Dv] in the queries' dtype. Head h reads key/value head `h // (H / K)`.

    A token sees a key exactly when both are of the same document and `0 <= position_q - position_k` (`< window`). Without positions, queries are
    aligned with the end of the keys. `documents_k_BT < 0` marks an empty slot, seen by nobody; a query that sees nothing gives 0.
    `softcap` c makes scores `c * tanh(scores / c)`; `sinks_H` adds one logit to each head's denominator. Scores and softmax are
    in float32 or better. `packing` repeats on the host what documents say of rows with S == T; it never changes the result.
    """
    rows, queries, heads = q_BSHD.shape[:3]
    keys, kv_heads = k_BTKD.shape[1:3]
    dtype = q_BSHD.dtype if q_BSHD.dtype == torch.float64 else torch.float32
    q_BKGSD = q_BSHD.to(dtype).unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4)
    k_BKDT = k_BTKD.to(dtype).permute(0, 2, 3, 1)
    v_BKTD = v_BTKD.to(dtype).transpose(1, 2)
    sinks_KG = None if sinks_H is None else sinks_H.to(dtype).unflatten(0, (kv_heads, -1))
    chunk = max(1, min(queries, SCORE_ELEMENTS // max(1, rows * heads * keys)))
    several = chunk < queries
    # Without recomputation backward would keep every chunk's scores: all of [S, T].
    attend = functools.partial(checkpoint, _attend, use_reentrant=False) if several and torch.is_grad_enabled() else _attend
    if positions_q_BS is None:
        positions_q_BS = torch.arange(keys - queries, keys, device=q_BSHD.device)[None]
    out = []
    for start in range(0, max(1, queries), chunk):  # of no queries the gradients are zeros, not absent
        chosen = slice(start, start + chunk)
        documents = None if documents_q_BS is None else documents_q_BS[:, chosen]
        mask = (window, documents, documents_k_BT, positions_q_BS[:, chosen], positions_k_BT)
        out.append(attend(q_BKGSD[:, :, :, chosen], k_BKDT, v_BKTD, sinks_KG, scale, softcap, mask))
    y_BKGSD = torch.cat(out, 3) if several else out[0]
    return y_BKGSD.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q_BSHD.dtype)


def _attend(
    q_BKGSD: Tensor,
    k_BKDT: Tensor,
    v_BKTD: Tensor,
    sinks_KG: Tensor | None,
    scale: float,
    softcap: float | None,
    mask: tuple[Any, ...],
) -> Tensor:
    """softmax(q k^T) v of some queries over all keys; `mask` are the arguments of `visible` from `window` on."""
    groups, queries = q_BKGSD.shape[2:4]
    scores_BKGST = torch.matmul((q_BKGSD * scale).flatten(2, 3), k_BKDT).unflatten(2, (groups, queries))
    if softcap is not None:
        scores_BKGST = softcap * torch.tanh(scores_BKGST / softcap)
    seen_BST = visible(queries, k_BKDT.shape[-1], scores_BKGST.device, *mask)
    # The lowest finite number and not -inf: a row that sees nothing must give 0, not NaN, in backward as well.
    scores_BKGST = scores_BKGST.masked_fill(~seen_BST[:, None, None], torch.finfo(scores_BKGST.dtype).min)
    if sinks_KG is not None:
        sinks = sinks_KG[None, :, :, None, None].expand(*scores_BKGST.shape[:-1], 1)
        scores_BKGST = torch.cat((scores_BKGST, sinks), -1)
    weights_BKGST = torch.softmax(scores_BKGST, -1)[..., : k_BKDT.shape[-1]]
    weights_BKGST = weights_BKGST.masked_fill(~seen_BST[:, None, None], 0.0)
    return torch.matmul(weights_BKGST.flatten(2, 3), v_BKTD).unflatten(2, (groups, queries))
