"""The operator `paged_attention`: attention of new tokens over caches that lie in blocks. Shape suffixes: N new tokens in a line, R requests, S new tokens of a request, T entries, W blocks of a request,
H query heads, K key/value heads, D head dim."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from intarsia import ops
from intarsia.errors import UsageError
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Paged:
    """Where requests' new tokens lie in the line, and where their entries lie in caches [blocks, size, ...]. Stability: provisional.

    On the device, int32: entry t of request r lies in block `tables_RW[r, t // size]` at t % size (behind a request's own blocks stands anything that is a block). Its new tokens are `counts_R[r]` (0: it is
    left out), from `firsts_R[r]` of the line on; the first has position `positions_R[r]`, and token i sees entries 0 to `positions_R[r] + i`, which are in the caches already.

    On the host: `queries` is at least every count, `size` is the caches'. `host_counts` and `host_positions` repeat what is on the device, and then requests lie one behind the other in the line; a
    reference groups by them, a kernel never reads them. Without them and with `queries` 1 nothing waits for the device, whatever implementation runs.

    `narrow` lets the reference leave out blocks that lie before a window (which gives other shapes, and other bits where those depend on shapes). `prepared` keeps what an implementation makes of all this, for
    all layers, by its own keys.
    """

    tables_RW: Tensor
    firsts_R: Tensor
    counts_R: Tensor
    positions_R: Tensor
    queries: int
    size: int
    host_counts: Sequence[int] | None = None
    host_positions: Sequence[int] | None = None
    narrow: bool = True
    prepared: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def to(self, device: str | torch.device) -> Paged:
        """The same on a device."""
        tables_RW, firsts_R, counts_R, positions_R = (
            x.to(device) for x in (self.tables_RW, self.firsts_R, self.counts_R, self.positions_R)
        )
        return Paged(
            tables_RW, firsts_R, counts_R, positions_R, self.queries, self.size, self.host_counts, self.host_positions, self.narrow
        )


def paged(
    tables: Sequence[Sequence[int]],
    counts: Sequence[int],
    positions: Sequence[int],
    size: int,
    *,
    device: str | torch.device = "cpu",
    width: int = 0,
    narrow: bool = True,
) -> Paged:
    """A `Paged` of lists: each request's blocks, how many new tokens it has and the first one's position; requests lie one behind the other. Tables are as wide as the longest, or `width`.
    UsageError where lists do not fit together or a request has fewer blocks than entries."""
    if not len(tables) == len(counts) == len(positions):
        raise UsageError(f"{len(tables)} tables, {len(counts)} counts and {len(positions)} positions do not belong to as many requests.")
    for number, (table, count, position) in enumerate(zip(tables, counts, positions, strict=True)):
        if count and len(table) * size < position + count:
            raise UsageError(
                f"Request {number} has {position + count} entries, and {len(table)} blocks of {size} hold {len(table) * size}. Give it all of its blocks."
            )
    wide = max((len(table) for table in tables), default=0)
    if width and width < wide:
        raise UsageError(f"width is {width}, and a request has {wide} blocks.")
    wide = width or wide
    tables_RW = torch.tensor([[*table, *[0] * (wide - len(table))] for table in tables], dtype=torch.int32).view(len(tables), wide)
    line = [list(itertools.accumulate(counts, initial=0))[:-1], list(counts), list(positions)]
    firsts_R, counts_R, positions_R = torch.tensor(line, dtype=torch.int32).to(device).unbind()
    most = max(counts, default=0)
    return Paged(tables_RW.to(device), firsts_R, counts_R, positions_R, most, size, tuple(counts), tuple(positions), narrow)


def reference(
    q_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Paged,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention of N queries in a line over `keys` [blocks, size, K, D] and `values` [blocks, size, K, Dv] as `where` says: [N, H, Dv] in the queries' dtype.

    Each request's result is that of `intarsia.ops.attention` over its own entries, of which a query sees those before it and its own (of a `window` the last ones). What stands in the caches behind a request's
    last entry must be finite here, and is not read by kernels. Rows of the line that are no request's hold anything. Not differentiable by kernels.

    Here requests with equally many new tokens, one behind the other, are one call of what is in force for `attention`, over a copy of their entries.
    """
    settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": sinks_H}
    if where.host_counts is None and where.queries == 1:
        return _single(q_NHD, keys, values, where, settings)
    out, end = [], 0
    for group in _groups(where):
        q_RSHD = q_NHD[group.first : group.last].unflatten(0, (-1, group.tokens))
        k_RTKD, positions_RT = group.read(keys, window)
        v_RTKD, _ = group.read(values, window)
        if group.fresh:  # its new tokens are all that there is
            k_RTKD, v_RTKD, mask = k_RTKD[:, : group.tokens], v_RTKD[:, : group.tokens], {}
        else:
            mask = {"positions_q_BS": group.positions_RS, "positions_k_BT": positions_RT}
        out.append(ops.attention(q_RSHD, k_RTKD, v_RTKD, **settings, **mask).flatten(0, 1))
        end = group.last
    if end < q_NHD.shape[0] or not out:
        out.append(q_NHD.new_zeros(q_NHD.shape[0] - end, q_NHD.shape[1], values.shape[-1]))
    return out[0] if len(out) == 1 else torch.cat(out)


def _single(q_NHD: Tensor, keys: Tensor, values: Tensor, where: Paged, settings: dict[str, Any]) -> Tensor:
    """Requests of at most one new token, of which the host knows nothing: all entries that their tables have room for are looked at."""
    tokens = q_NHD.shape[0]
    firsts_R = where.firsts_R.clamp(max=max(0, tokens - 1))
    k_RTKD, v_RTKD = (_entries(cache, where.tables_RW) for cache in (keys, values))
    positions_RT = torch.arange(k_RTKD.shape[1], device=q_NHD.device)[None]
    mask = {"positions_q_BS": where.positions_R.long()[:, None], "positions_k_BT": positions_RT}
    y_RHD = ops.attention(q_NHD.index_select(0, firsts_R)[:, None], k_RTKD, v_RTKD, **settings, **mask)[:, 0]
    # Requests that are left out write into a row behind the line.
    to_R = torch.where(where.counts_R > 0, where.firsts_R, tokens).long()
    return y_RHD.new_zeros(tokens + 1, *y_RHD.shape[1:]).index_copy_(0, to_R, y_RHD)[:tokens]


@dataclasses.dataclass(frozen=True)
class _Group:
    """Requests with equally many new tokens, `first` to `last` of the line. `fresh`: nothing was there before."""

    first: int
    last: int
    tokens: int
    fresh: bool
    narrow: bool
    size: int
    positions_RS: Tensor
    tables_RW: Tensor
    kept: dict[int | None, tuple[Tensor, Tensor]]

    def read(self, cache: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Entries [R, T, ...] and their positions [R or 1, T]."""
        if window not in self.kept:
            self.kept[window] = self._blocks(window)
        blocks_RW, positions_RT = self.kept[window]
        return _entries(cache, blocks_RW), positions_RT

    def _blocks(self, window: int | None) -> tuple[Tensor, Tensor]:
        width, device = self.tables_RW.shape[1], self.tables_RW.device
        offsets_T = torch.arange(self.size, device=device)
        seen = width if window is None or self.fresh else (window + self.tokens - 2) // self.size + 2
        if window is not None and self.narrow and seen < width:
            first_R1 = (self.positions_RS[:, :1] - window + 1).clamp(min=0) // self.size
            numbers_RW = first_R1 + torch.arange(seen, device=device)
            blocks_RW = self.tables_RW.gather(1, numbers_RW.clamp(max=width - 1))
        else:
            numbers_RW, blocks_RW = torch.arange(width, device=device)[None], self.tables_RW
        return blocks_RW, (numbers_RW[..., None] * self.size + offsets_T).flatten(1)


def _groups(where: Paged) -> list[_Group]:
    if "groups" not in where.prepared:
        where.prepared["groups"] = list(_grouped(where))
    return where.prepared["groups"]


def _grouped(where: Paged) -> Iterator[_Group]:
    """Requests as they lie: those that are alike and stand side by side are a group."""
    counts = where.counts_R.tolist() if where.host_counts is None else where.host_counts
    positions = where.positions_R.tolist() if where.host_positions is None else where.host_positions
    row = first = 0
    for (fresh, tokens), alike in itertools.groupby(zip(positions, counts, strict=True), lambda pair: (pair[0] == 0, pair[1])):
        members = list(alike)
        rows, row = slice(row, row + len(members)), row + len(members)
        if not tokens:
            continue
        last = first + tokens * len(members)
        width = -(-(max(position for position, _ in members) + tokens) // where.size)
        positions_RS = where.positions_R[rows, None].long() + torch.arange(tokens, device=where.positions_R.device)
        yield _Group(first, last, tokens, fresh, where.narrow, where.size, positions_RS, where.tables_RW[rows, :width], {})
        first = last


def _entries(cache: Tensor, blocks_RW: Tensor) -> Tensor:
    return cache.index_select(0, blocks_RW.flatten()).unflatten(0, blocks_RW.shape).flatten(1, 2)


# As invariant as what is in force for `attention`, which invariant mode sees to: the reference runs that.
paged_attention = ops.Operator("paged_attention", reference, "other", invariant=True)
