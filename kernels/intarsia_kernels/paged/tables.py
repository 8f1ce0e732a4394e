"""What both kernels have in common: reading entries through tables, and which calls they take. Shape suffixes: N tokens in a line, R requests, W blocks of a request, K key/value heads, D head dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.attention.widths import WIDEST, columns

REQUESTS = 4096
"""The most of a call: a program adds up what all requests have to do."""


@triton.jit
def _numbers(table_pointer, position, inside, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """The blocks in which entries at these positions lie."""
    if MASKED:
        return tl.load(table_pointer + position // SIZE, mask=inside, other=0)
    return tl.load(table_pointer + position // SIZE)


@triton.jit
def _places(number, position, block_stride, stride, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Where they begin in a cache. Offsets of 64 bits only where 32 are too few: addresses are most of what a decoding program computes."""
    if WIDE:
        number = number.to(tl.int64)
    return number * block_stride + (position % SIZE) * stride


@triton.jit
def _entries(cache_pointer, place, inside, offsets, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Entries of one head, [keys, BLOCK]: zeros outside."""
    pointers = cache_pointer + place[:, None] + offsets[None, :]
    if MASKED:
        if WIDTH == BLOCK:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        return tl.load(pointers, mask=inside[:, None] & (offsets < WIDTH)[None, :], other=0.0)
    if WIDTH == BLOCK:
        return tl.load(pointers)
    return tl.load(pointers, mask=(offsets < WIDTH)[None, :], other=0.0)


def kernel(attend: Callable[..., Tensor], doc: str) -> Callable[..., Tensor]:
    """`attend`, which takes tensors and numbers alone, by the operator's signature."""

    def paged_attention(
        q_NHD: Tensor,
        keys: Tensor,
        values: Tensor,
        where: Any,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        q_NHD = q_NHD if q_NHD.stride(-1) == 1 else q_NHD.contiguous()
        tables = (where.tables_RW, where.firsts_R, where.counts_R, where.positions_R)
        return attend(q_NHD, keys, values, sinks_H, *tables, scale, window, softcap, where.queries, where.size)

    paged_attention.__doc__ = doc
    paged_attention.supports = supports  # type: ignore[attr-defined]
    return paged_attention


def supports(q_NHD: Tensor, keys: Tensor, values: Tensor, where: Any, **settings: Any) -> str | None:
    """Why the reference has to take a call."""
    if q_NHD.dtype != keys.dtype or q_NHD.dtype != values.dtype:
        return f"queries are {q_NHD.dtype}, and the caches {keys.dtype} and {values.dtype}"
    if max(keys.shape[-1], values.shape[-1]) > WIDEST:
        return f"a head is wider than {WIDEST}"
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        return "numbers of an entry do not lie one behind the other"
    if where.tables_RW.shape[0] > REQUESTS:
        return f"there are more than {REQUESTS} requests"
    if torch.is_grad_enabled() and (q_NHD.requires_grad or keys.requires_grad or values.requires_grad):
        return "gradients are asked for"
    return None


def _reach(cache: Tensor) -> int:
    """The elements from a cache's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))


def named(
    q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, window: int | None, size: int
) -> dict[str, Any]:
    """Arguments that all kernels share."""
    return {
        "scale": scale * 1.4426950408889634,
        # Scores are capped before they are scaled, as in `intarsia_kernels.invariant.blocks`.
        "softcap": 1.0 if softcap is None else softcap / scale,
        "window": window or 0,
        "q_stride": q_NHD.stride(0),
        "q_head": q_NHD.stride(1),
        "k_block": keys.stride(0),
        "k_stride": keys.stride(1),
        "k_head": keys.stride(2),
        "v_block": values.stride(0),
        "v_stride": values.stride(1),
        "v_head": values.stride(2),
        "D": keys.shape[3],
        "DV": values.shape[3],
        "BLOCK_D": columns(keys.shape[3]),
        "BLOCK_DV": columns(values.shape[3]),
        "SIZE": size,
        "WIDE": max(_reach(keys), _reach(values)) >= 2**31,
        "KV_HEADS": keys.shape[2],
        "GROUPS": q_NHD.shape[1] // keys.shape[2],
        "HAS_SOFTCAP": softcap is not None,
        "HAS_WINDOW": window is not None,
        "PRECISION": "ieee",
    }
