"""Softmax attention of segments of queries over segments of keys, with the log-sum-exp by which results over different keys are merged.

B rows, S queries and T keys that are here, H query heads, K key/value heads, G segments of one shape, R = H / K, D head dims.

    o = sum_j p_j v_j / sum_j p_j,   l = log sum_j p_j,   p_j = exp(s_j)
    over two sets of keys:  l = log(exp l1 + exp l2),  o = o1 exp(l1 - l) + o2 exp(l2 - l)

Given the o and l of all keys, the gradients through one set need nothing of the others: p_j = exp(s_j - l), ds_j = p_j (dp_j - dy . o).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from intarsia.ops.attention_reference import SCORE_ELEMENTS
from torch import Tensor

from intarsia_parallel.context.plan import Segment
from intarsia_parallel.context.transfer import on_device


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `SequenceContext.softmax` was asked for."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept."""
    return dtype if dtype == torch.float64 else torch.float32


class Merged:
    """Outputs [B, S, H, Dv] and log-sum-exps [B, S, H] over the keys met so far."""

    def __init__(self, q_BSHD: Tensor, value_dim: int) -> None:
        dtype = wide(q_BSHD.dtype)
        self.out = q_BSHD.new_zeros(*q_BSHD.shape[:3], value_dim, dtype=dtype)
        self.lse = q_BSHD.new_full(q_BSHD.shape[:3], float("-inf"), dtype=dtype)

    def add(self, at: tuple[slice | int, slice], out: Tensor, lse: Tensor) -> None:
        """Queries `at` have met further keys, with this result."""
        before = self.lse[at]
        after = torch.logaddexp(before, lse)
        # Both are views: what is written is kept.
        self.out[at].mul_((before - after).exp()[..., None]).add_(out * (lse - after).exp()[..., None])
        before.copy_(after)


class Block:
    """Segments over one block of keys, prepared once for a batch and used by every layer. All segments have one window."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)
        self._groups = _groups(self.segments)
        self._packs: dict[torch.device, list[_Pack]] = {}

    def forward(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, settings: Settings, merged: Merged) -> None:
        """Add this block's keys to `merged`."""
        if not self.segments:
            return
        if flash_obstacle(q_BSHD, k_BTKD, v_BTKD, settings) is None:
            for pack in self._packed(q_BSHD.device, settings.window):
                pack.forward(q_BSHD, k_BTKD, v_BTKD, settings, merged)
            return
        for group in self._groups:
            for part in group.parts(q_BSHD.shape[2]):
                part.forward(q_BSHD, k_BTKD, v_BTKD, settings, merged)

    def backward(
        self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, settings: Settings, result: Result, dq_BSHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of this block's keys and values; those of the queries are added to `dq_BSHD`. All in `wide` dtypes."""
        dk, dv = (x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (k_BTKD, v_BTKD))
        if not self.segments:
            return dk, dv
        if flash_obstacle(q_BSHD, k_BTKD, v_BTKD, settings) is None:
            for pack in self._packed(q_BSHD.device, settings.window):
                pack.backward(q_BSHD, k_BTKD, v_BTKD, settings, result, (dq_BSHD, dk, dv))
            return dk, dv
        for group in self._groups:
            for part in group.parts(q_BSHD.shape[2]):
                part.backward(q_BSHD, k_BTKD, v_BTKD, settings, result, (dq_BSHD, dk, dv))
        return dk, dv

    def _packed(self, device: torch.device, window: int | None) -> list[_Pack]:
        if device not in self._packs:
            self._packs[device] = _packs(self.segments, device, window)
        return self._packs[device]


class Result:
    """What backward knows of the queries: outputs (in their dtype), log-sum-exps [B, S, H] over all keys, the outputs' gradient, and their products."""

    def __init__(self, out_BSHD: Tensor, lse_BSH: Tensor, dout_BSHD: Tensor) -> None:
        self.out, self.lse, self.dout = out_BSHD, lse_BSH, dout_BSHD

    @functools.cached_property
    def delta(self) -> Tensor:
        """The products, where somebody asks for them."""
        return (self.dout.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(-1)


# ---------------------------------------------------------------- by plain matrix products


@dataclasses.dataclass(frozen=True)
class _Group:
    """Segments of one shape: queries [query, query + queries) of `rows[g]` over keys [key, key + keys), as batched products."""

    queries: int
    keys: int
    lead: int
    rows: tuple[int, ...]
    query: tuple[int, ...]
    key: tuple[int, ...]

    def parts(self, heads: int) -> Iterator[_Group]:
        """The same in parts whose scores are bounded in memory. Fewer queries of a segment stand `lead` further on, or less."""
        chunk = max(1, min(self.queries, SCORE_ELEMENTS // max(1, len(self.rows) * heads * self.keys)))
        for start in range(0, self.queries, chunk):
            count = min(chunk, self.queries - start)
            lead = self.lead - (self.queries - start - count)
            yield dataclasses.replace(self, queries=count, lead=lead, query=tuple(a + start for a in self.query))

    def forward(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, settings: Settings, merged: Merged) -> None:
        q_GKRSD, k_GK1TD, v_GK1TD = self._read(q_BSHD, k_BTKD, v_BTKD)
        scores_GKRST, _ = self._scores(q_GKRSD, k_GK1TD, settings)
        lse_GKRS = torch.logsumexp(scores_GKRST, -1)
        p_GKRST = (scores_GKRST - lse_GKRS[..., None]).exp()
        out_GSHD = (p_GKRST @ v_GK1TD).permute(0, 3, 1, 2, 4).flatten(2, 3)
        lse_GSH = lse_GKRS.permute(0, 3, 1, 2).flatten(2, 3)
        for g, at in self._places(q_BSHD.shape[0], self.query, self.queries):
            merged.add(at, out_GSHD[g], lse_GSH[g])

    def backward(
        self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, settings: Settings, result: Result, sums: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        q_GKRSD, k_GK1TD, v_GK1TD = self._read(q_BSHD, k_BTKD, v_BTKD)
        kv_heads = k_BTKD.shape[2]
        dout_GKRSD = _grouped(self._take(result.dout, self.query, self.queries), kv_heads).to(result.lse.dtype)
        lse_GKRS = _grouped(self._take(result.lse, self.query, self.queries)[..., None], kv_heads)[..., 0]
        delta_GKRS = _grouped(self._take(result.delta, self.query, self.queries)[..., None], kv_heads)[..., 0]
        scores_GKRST, slope = self._scores(q_GKRSD, k_GK1TD, settings)
        p_GKRST = (scores_GKRST - lse_GKRS[..., None]).exp()
        dv_GKTD = p_GKRST.flatten(2, 3).transpose(-1, -2) @ dout_GKRSD.flatten(2, 3)
        ds_GKRST = p_GKRST * (dout_GKRSD @ v_GK1TD.transpose(-1, -2) - delta_GKRS[..., None]) * settings.scale
        if slope is not None:
            ds_GKRST = ds_GKRST * slope
        dq_GSHD = (ds_GKRST @ k_GK1TD).permute(0, 3, 1, 2, 4).flatten(2, 3)
        dk_GKTD = ds_GKRST.flatten(2, 3).transpose(-1, -2) @ q_GKRSD.flatten(2, 3)
        dq, dk, dv = sums
        rows = q_BSHD.shape[0]
        for g, at in self._places(rows, self.query, self.queries):
            dq[at] += dq_GSHD[g]
        for g, at in self._places(rows, self.key, self.keys):
            dk[at] += dk_GKTD[g].transpose(-3, -2)
            dv[at] += dv_GKTD[g].transpose(-3, -2)

    def _read(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = wide(q_BSHD.dtype)
        q_GKRSD = _grouped(self._take(q_BSHD, self.query, self.queries), k_BTKD.shape[2]).to(dtype)
        k_GK1TD, v_GK1TD = (self._take(x, self.key, self.keys).transpose(1, 2)[:, :, None].to(dtype) for x in (k_BTKD, v_BTKD))
        return q_GKRSD, k_GK1TD, v_GK1TD

    def _scores(self, q_GKRSD: Tensor, k_GK1TD: Tensor, settings: Settings) -> tuple[Tensor, Tensor | None]:
        """Scores, -inf where a key is not seen, and the softcap's derivative (None: there is none)."""
        scores_GKRST = (q_GKRSD * settings.scale) @ k_GK1TD.transpose(-1, -2)
        slope = None
        if settings.softcap is not None:
            bent_GKRST = torch.tanh(scores_GKRST / settings.softcap)
            scores_GKRST, slope = settings.softcap * bent_GKRST, 1 - bent_GKRST.square()
        nearest, farthest = self.lead - self.queries + 1, self.lead + self.keys - 1
        if nearest < 0 or (settings.window is not None and farthest >= settings.window):
            index_S = torch.arange(self.lead - self.queries + self.keys, self.lead + self.keys, device=scores_GKRST.device)
            distance_ST = index_S[:, None] - torch.arange(self.keys, device=scores_GKRST.device)
            hidden_ST = distance_ST < 0 if settings.window is None else (distance_ST < 0) | (distance_ST >= settings.window)
            scores_GKRST = scores_GKRST.masked_fill(hidden_ST, float("-inf"))
        return scores_GKRST, slope

    def _take(self, x: Tensor, starts: tuple[int, ...], count: int) -> Tensor:
        """[G, count, ...]."""
        if self._is_whole(x.shape[0], starts):
            return x[:, starts[0] : starts[0] + count]
        return torch.stack([x[row, start : start + count] for row, start in zip(self.rows, starts, strict=True)])

    def _places(self, rows: int, starts: tuple[int, ...], count: int) -> Iterator[tuple[Any, tuple[Any, slice]]]:
        """(which of the group, where in a tensor of all rows)."""
        if self._is_whole(rows, starts):
            yield slice(None), (slice(None), slice(starts[0], starts[0] + count))
            return
        for g, (row, start) in enumerate(zip(self.rows, starts, strict=True)):
            yield g, (row, slice(start, start + count))

    def _is_whole(self, rows: int, starts: tuple[int, ...]) -> bool:
        return self.rows == tuple(range(rows)) and len(set(starts)) == 1


def _groups(segments: Sequence[Segment]) -> list[_Group]:
    shapes: dict[tuple[int, int, int], list[Segment]] = {}
    for segment in segments:
        shapes.setdefault((segment.queries, segment.keys, segment.lead), []).append(segment)
    return [
        _Group(*shape, tuple(s.row for s in same), tuple(s.query for s in same), tuple(s.key for s in same))
        for shape, same in shapes.items()
    ]


def _grouped(x_GSHD: Tensor, kv_heads: int) -> Tensor:
    """[G, K, R, S, D]: query heads by the key/value head that they read."""
    return x_GSHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)


# ---------------------------------------------------------------- by torch's flash attention

_flash_forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
_flash_backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward.default


def flash_obstacle(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, settings: Settings) -> str | None:
    """Why torch's flash attention cannot take a call."""
    if q_BSHD.device.type != "cuda":
        return "it needs a CUDA device"
    if q_BSHD.dtype not in (torch.bfloat16, torch.float16) or {k_BTKD.dtype, v_BTKD.dtype} != {q_BSHD.dtype}:
        return "it takes bfloat16 or float16, the same for all"
    if settings.softcap is not None:
        return "it has no softcap"
    if v_BTKD.shape[-1] > q_BSHD.shape[-1]:
        return "values have a larger head dim than keys"
    if q_BSHD.shape[-1] % 8 or q_BSHD.shape[-1] > 256:
        return "it takes head dims that are multiples of 8, up to 256"
    return None


@dataclasses.dataclass(frozen=True)
class _Pack:
    """Segments of one lead, one after the other, as flash attention takes them. `queries` and `keys` are (row, start, stop) of what is packed,
    `starts` cumulative lengths (int32, on the device), `most` the longest, `left` and `right` the window as counted from the last query and key."""

    queries: tuple[tuple[int, int, int], ...]
    keys: tuple[tuple[int, int, int], ...]
    starts: tuple[Tensor, Tensor]
    most: tuple[int, int]
    left: int
    right: int

    def forward(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, settings: Settings, merged: Merged) -> None:
        q, k, v = _packed(q_BSHD, self.queries), _packed(k_BTKD, self.keys), _packed(v_BTKD, self.keys, k_BTKD.shape[-1])
        out, lse, *_ = _flash_forward(q, k, v, *self.starts, *self.most, 0.0, False, False, scale=settings.scale, **self._window())
        lse_NH = lse.transpose(0, 1)
        at = 0
        for row, start, stop in self.queries:
            merged.add((row, slice(start, stop)), out[at : at + stop - start, :, : v_BTKD.shape[-1]], lse_NH[at : at + stop - start])
            at += stop - start

    def backward(
        self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, settings: Settings, result: Result, sums: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        dim = q_BSHD.shape[-1]
        q, out, dout = (_packed(x, self.queries, dim) for x in (q_BSHD, result.out, result.dout))
        k, v = _packed(k_BTKD, self.keys), _packed(v_BTKD, self.keys, dim)
        lse_HN = _packed(result.lse, self.queries).transpose(0, 1).contiguous()
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout's generator, which is not used
        grads = _flash_backward(
            *(dout, q, k, v, out, lse_HN, *self.starts, *self.most, 0.0, False, state, state[:0]), scale=settings.scale, **self._window()
        )
        for total, grad, places in zip(sums, grads, (self.queries, self.keys, self.keys), strict=True):
            at = 0
            for row, start, stop in places:
                total[row, start:stop] += grad[at : at + stop - start, :, : total.shape[-1]]
                at += stop - start

    def _window(self) -> dict[str, int]:
        return {"window_size_left": self.left, "window_size_right": self.right}


def _packs(segments: Sequence[Segment], device: torch.device, window: int | None) -> list[_Pack]:
    """One for all segments in which everything is seen, then one for each lead. The kernel counts the window from the last query and the last key, and no further
    to the right than the longest run of keys is long: enough where queries are not more than keys."""
    leads: dict[int | None, list[Segment]] = {}
    for segment in segments:
        leads.setdefault(None if segment.is_full(window) else segment.lead, []).append(segment)
    packs = []
    for lead, same in leads.items():
        queries = _runs([(s.row, s.query, s.query + s.queries) for s in same])
        keys = _runs([(s.row, s.key, s.key + s.keys) for s in same])
        lengths = [s.queries for s in same], [s.keys for s in same]
        first, second = (on_device([0, *itertools.accumulate(each)], torch.int32, device) for each in lengths)
        left = -1 if window is None or lead is None else window - 1 - lead
        packs.append(_Pack(queries, keys, (first, second), (max(lengths[0]), max(lengths[1])), left, 0 if lead == 0 else -1))
    return packs


def _runs(places: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """The same with neighbours joined."""
    runs: list[tuple[int, int, int]] = []
    for row, start, stop in places:
        if runs and runs[-1][0] == row and runs[-1][2] == start:
            runs[-1] = (row, runs[-1][1], stop)
        else:
            runs.append((row, start, stop))
    return tuple(runs)


def _packed(x_BS: Tensor, places: Sequence[tuple[int, int, int]], dim: int | None = None) -> Tensor:
    """[N, ...], contiguous. Zeros fill the last dimension up to `dim`: narrower values have the same attention and no other gradient."""
    if len(places) == 1:
        row, start, stop = places[0]
        x_N = x_BS[row, start:stop]
    elif list(places) == [(row, 0, x_BS.shape[1]) for row in range(x_BS.shape[0])]:
        x_N = x_BS.flatten(0, 1)
    else:
        x_N = torch.cat([x_BS[row, start:stop] for row, start, stop in places])
    return x_N.contiguous() if dim is None or dim == x_N.shape[-1] else F.pad(x_N, (0, dim - x_N.shape[-1]))
