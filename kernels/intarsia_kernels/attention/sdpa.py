"""`attention` by torch's scaled_dot_product_attention. Shape suffixes as in `intarsia.ops`; N documents' tokens one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from intarsia.ops import Packing
from intarsia.ops.attention_reference import visible
from torch import Tensor

from intarsia_kernels.attention.widths import one_width, refusal

DOCUMENTS_PER_ROW = 8
"""Up to this many documents to a row (on average) each gets a call of its own, which skips all that lies between documents; beyond, calls cost
more than a mask over the whole row."""


@one_width
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
    """As `intarsia.ops.attention`."""
    queries, keys = q_BSHD.shape[1], k_BTKD.shape[1]
    plain = documents_k_BT is None and positions_q_BS is None and positions_k_BT is None
    if plain and queries == keys and (window is None or window >= keys):
        return causal(q_BSHD, k_BTKD, v_BTKD, scale)
    compiling = torch.compiler.is_compiling()
    if packing is not None and not compiling and queries == keys and positions_q_BS is None and positions_k_BT is None:
        documents = sum(map(len, packing.lengths))
        if documents <= DOCUMENTS_PER_ROW * q_BSHD.shape[0]:
            return _by_document(q_BSHD, k_BTKD, v_BTKD, scale, window, packing)
    kept = None if packing is None or compiling else packing.prepared
    seen_B1ST = None if kept is None else kept.get(("sdpa", window, keys))
    if seen_B1ST is None:
        seen_BST = visible(queries, keys, q_BSHD.device, window, documents_q_BS, documents_k_BT, positions_q_BS, positions_k_BT)
        seen_B1ST = seen_BST[:, None]
        if kept is not None and positions_q_BS is None and positions_k_BT is None:
            kept["sdpa", window, keys] = seen_B1ST
    return _masked(q_BSHD, k_BTKD, v_BTKD, scale, seen_B1ST)


def supports(
    q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, *, softcap: float | None = None, sinks_H: Tensor | None = None, **_: Any
) -> str | None:
    """Why a call cannot be taken."""
    if softcap is not None:
        return "scaled_dot_product_attention has no softcap"
    if sinks_H is not None:
        return "scaled_dot_product_attention has no sinks"
    return refusal(q_BSHD, v_BTKD)


attention.supports = supports  # type: ignore[attr-defined]


def causal(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float) -> Tensor:
    """Causal attention where each row is one sequence."""
    q, k, v = q_BSHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)


def _masked(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scale: float, seen_B1ST: Tensor) -> Tensor:
    """Any mask. Heads of keys and values are repeated: the kernels that take a mask know no groups."""
    q, k, v = q_BSHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = seen_B1ST.expand(q.shape[0], -1, -1, -1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    # What a row that sees nothing gives differs between torch's kernels (NaN, 0, the mean); here it is 0.
    return y.masked_fill(~mask.any(-1, keepdim=True), 0.0).transpose(1, 2)


def _by_document(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, window: int | None, packing: Packing) -> Tensor:
    """One call for each run of equally long documents; rows are one long row, since a row's end is a document's end."""
    runs = list(_runs(packing))
    sizes = [count * length for count, length in runs]
    parts = (x.flatten(0, 1).split(sizes) for x in (q_BSHD, k_BSKD, v_BSKD))
    out = []
    for (count, length), q, k, v in zip(runs, *parts, strict=True):
        q, k, v = (x.unflatten(0, (count, length)) for x in (q, k, v))
        if window is None or window >= length:
            y = causal(q, k, v, scale)
        else:
            y = _masked(q, k, v, scale, visible(length, length, q.device, window, None, None, None, None)[:, None])
        out.append(y.flatten(0, 1))
    return torch.cat(out).unflatten(0, q_BSHD.shape[:2]) if len(out) > 1 else out[0].unflatten(0, q_BSHD.shape[:2])


def _runs(packing: Packing) -> Iterator[tuple[int, int]]:
    """(how many, length) of consecutive documents of equal length."""
    for length, group in itertools.groupby(itertools.chain.from_iterable(packing.lengths)):
        yield len(list(group)), length
