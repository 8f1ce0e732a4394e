"""The libraries' own kernels on a GPU, held to one order of sums: cuBLAS without a workspace, flash attention over packed keys without splits. Shape suffixes as in `intarsia.ops`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from intarsia.errors import UsageError
from intarsia.ops import Packing
from torch import Tensor

from intarsia_kernels.attention.widths import one_width
from intarsia_kernels.invariant.segments import Segments, segments

WORKSPACE, NONE = "CUBLAS_WORKSPACE_CONFIG", ":0:0"


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `intarsia.ops.linear`. Without a workspace cuBLAS cannot split a sum; it reads the variable at its first product, so that it must be set before the process starts. UsageError otherwise."""
    if os.environ.get(WORKSPACE) != NONE:
        raise UsageError(
            f"linear/unsplit needs {WORKSPACE}={NONE} in the environment from the process's start (it is {os.environ.get(WORKSPACE)!r}): otherwise cuBLAS splits sums by the number of rows. "
            "Set it for every process of the run, or choose kernels.linear=ascending."
        )
    return F.linear(x_NI, weight_OI, bias_O)


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
    """As `intarsia.ops.attention`, by variable-length flash attention always. UsageError for softcap, sinks, and masks that segments cannot say.

    It is told of at least 2 queries to a segment: told of 1, it packs the heads of a group and may split keys, which gives other bits. Its gradient by queries does not repeat exactly
    from about 1000 tokens on.
    """
    from intarsia_kernels.attention.varlen import _settings, varlen_attn

    if softcap is not None or sinks_H is not None:
        raise UsageError("attention/unsplit has no softcap and no sinks. Choose kernels.attention=blocks.")
    rows, queries = q_BSHD.shape[:2]
    where = segments(rows, queries, k_BTKD.shape[1], q_BSHD.device, documents_q_BS, documents_k_BT, positions_q_BS, positions_k_BT, packing)
    starts_q, starts_k, chosen = _seen(where)
    k, v = (where.line(x) if chosen is None else where.line(x).index_select(0, chosen) for x in (k_BTKD, v_BTKD))
    named = _settings(window, q_BSHD.shape[2] != k_BTKD.shape[2], scale)
    y_NHD: Any = varlen_attn(q_BSHD.flatten(0, 1), k, v, starts_q, starts_k, max(2, where.queries), max(2, where.keys), **named)
    return y_NHD.unflatten(0, (rows, queries))


def _seen(where: Segments) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where each segment's queries and keys begin (int32, with the end), and which keys of the line its last query sees, where that is not all of them."""
    _, count_q, position_q, first_k, count_k, position_k = where.table.long().unbind(1)
    ends = torch.minimum(count_k, (position_q + count_q - position_k).clamp_min(0))
    starts_q = F.pad(count_q.cumsum(0), (1, 0)).to(torch.int32)
    starts_k = F.pad(ends.cumsum(0), (1, 0)).to(torch.int32)
    if bool((first_k == starts_k[:-1]).all()) and bool((ends == count_k).all()):
        return starts_q, starts_k, None
    offsets = torch.arange(int(starts_k[-1]), device=where.table.device)
    segment = torch.repeat_interleave(torch.arange(ends.numel(), device=offsets.device), ends)
    return starts_q, starts_k, first_k[segment] + offsets - starts_k[:-1].long()[segment]
