"""`segment_attention` by torch's variable-length flash attention: all segments in one launch. N rows, H heads, D width of a head."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from intarsia_kernels.attention.varlen import PARAMETERS


def segment_attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, lengths: Sequence[int], *, scale: float) -> Tensor:
    """As the operator `segment_attention`."""
    starts, longest = _starts(tuple(lengths), q_NHD.device)
    settings: dict[str, Any] = {"window_size": (-1, -1)} if "window_size" in PARAMETERS else {}
    if "scale" in PARAMETERS:
        settings["scale"] = scale
    y_NHD: Any = varlen_attn(q_NHD, k_NHD, v_NHD, starts, starts, longest, longest, **settings)
    return y_NHD


def supports(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, lengths: Sequence[int], *, scale: float) -> str | None:
    """Why a call cannot be taken."""
    width = q_NHD.shape[-1]
    if not any(lengths):
        return "there are no rows"
    if width % 8 or width > 256 or v_NHD.shape[-1] != width:
        return "flash attention takes head dims that are multiples of 8, up to 256, the same for values"
    if "scale" not in PARAMETERS and scale != width**-0.5:
        return "this torch's varlen_attn has no scale of one's own"
    return None


segment_attention.supports = supports  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=16)
def _starts(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Where segments begin and the last ends, int32, and the longest one: made once for all layers of a batch. Also usable where gradients are asked for later."""
    with torch.inference_mode(False):
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device), max(lengths)
