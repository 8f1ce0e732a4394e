"""Attention whose values are narrower or wider than its keys (latent attention), by kernels that know one head dim."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from intarsia_kernels.direct import power_of_two

WIDEST = 256
"""The widest head of flash kernels. Beyond it padding buys nothing."""


def columns(width: int) -> int:
    """Of a Triton kernel's tile for heads of this width. Not 16: Triton 3.6 gets tiles of 16 columns wrong on Hopper, where 64 rows or more are multiplied by values that it does not copy ahead (heads of 24 and 8)."""
    return max(32, power_of_two(width))


def one_width(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`attention` for any widths: zeros behind the narrower side change neither scores nor the other columns of the result."""

    @functools.wraps(attention)
    def padded(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, **settings: Any) -> Tensor:
        keys, values = q_BSHD.shape[-1], v_BTKD.shape[-1]
        if keys == values:
            return attention(q_BSHD, k_BTKD, v_BTKD, **settings)
        if values < keys:
            return attention(q_BSHD, k_BTKD, F.pad(v_BTKD, (0, keys - values)), **settings)[..., :values]
        return attention(F.pad(q_BSHD, (0, values - keys)), F.pad(k_BTKD, (0, values - keys)), v_BTKD, **settings)

    return padded


def refusal(q_BSHD: Tensor, v_BTKD: Tensor) -> str | None:
    """Why a call's widths cannot be taken."""
    keys, values = q_BSHD.shape[-1], v_BTKD.shape[-1]
    return f"values have another head dim than keys, and one is above {WIDEST}" if keys != values and max(keys, values) > WIDEST else None
