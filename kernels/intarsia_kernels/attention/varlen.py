"""`attention` by torch's variable-length flash attention. Shape suffixes as in `intarsia.ops`; N all tokens of a batch in one line.

Rows of one document go to scaled_dot_product_attention, which has faster kernels for them (cuDNN's on Hopper: 4.8 ms against 7.1 ms for forward and
backward of 2 x 8192 tokens, 32/8 heads of 64). Those are planned anew for every shape, so that packed documents, whose lengths differ from batch to
batch, stay here.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from intarsia.ops import Packing
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from intarsia_kernels.attention.sdpa import causal
from intarsia_kernels.attention.widths import one_width, refusal

PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
"""What this torch's varlen_attn takes: windows, scale and groups came release by release."""


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
    """As `intarsia.ops.attention`, for whole rows. Documents come from `packing` as cumulative lengths; without documents each row is one."""
    rows, tokens = q_BSHD.shape[:2]
    if documents_k_BT is None and window is None:
        return causal(q_BSHD, k_BTKD, v_BTKD, scale)
    if documents_k_BT is None or packing is None:
        starts = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=q_BSHD.device)
    else:
        starts = packing.prepared["varlen"]
    named = _settings(window, q_BSHD.shape[2] != k_BTKD.shape[2], scale)
    q_NHD, k_NKD, v_NKD = q_BSHD.flatten(0, 1), k_BTKD.flatten(0, 1), v_BTKD.flatten(0, 1)
    y_NHD: Any = varlen_attn(q_NHD, k_NKD, v_NKD, starts, starts, tokens, tokens, **named)
    return y_NHD.unflatten(0, (rows, tokens))


def supports(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    documents_k_BT: Tensor | None = None,
    positions_q_BS: Tensor | None = None,
    positions_k_BT: Tensor | None = None,
    packing: Packing | None = None,
    **_: Any,
) -> str | None:
    """Why a call cannot be taken."""
    if softcap is not None or sinks_H is not None:
        return "it has no softcap and no sinks"
    if positions_q_BS is not None or positions_k_BT is not None or q_BSHD.shape[1] != k_BTKD.shape[1]:
        return "it serves whole rows, with as many keys as queries"
    if wide := refusal(q_BSHD, v_BTKD):
        return wide
    if documents_k_BT is not None and (packing is None or "varlen" not in packing.prepared):
        return "documents are given but not their lengths"
    if documents_k_BT is None and window is None:
        return None
    width = max(q_BSHD.shape[-1], v_BTKD.shape[-1])
    if width % 8:
        return "flash attention takes head dims that are multiples of 8"
    if window is not None and "window_size" not in PARAMETERS:
        return "this torch's varlen_attn has no windows"
    if "scale" not in PARAMETERS and scale != width**-0.5:
        return "this torch's varlen_attn has no scale of one's own"
    return None


def prepare(packing: Packing, windows: Sequence[int | None], documents_BS: Tensor) -> None:
    """Where each document starts, int32, padded with empty documents to a power of two, so that a compiled region meets few lengths."""
    starts = [0, *itertools.accumulate(itertools.chain.from_iterable(packing.lengths))]
    size = 1 << (len(starts) - 1).bit_length()
    starts += [starts[-1]] * (size - len(starts))
    packing.prepared["varlen"] = torch.tensor(starts, dtype=torch.int32).to(documents_BS.device, non_blocking=True)


attention.supports = supports  # type: ignore[attr-defined]
attention.prepare = prepare  # type: ignore[attr-defined]


def _settings(window: int | None, grouped: bool, scale: float) -> dict[str, Any]:
    """The arguments by which this torch's varlen_attn says causal, window, groups and scale."""
    settings: dict[str, Any] = {}
    if "window_size" in PARAMETERS:
        settings["window_size"] = (-1 if window is None else window - 1, 0)
    elif "is_causal" in PARAMETERS:
        settings["is_causal"] = True
    if "scale" in PARAMETERS:
        settings["scale"] = scale
    if "enable_gqa" in PARAMETERS:
        settings["enable_gqa"] = grouped
    return settings
