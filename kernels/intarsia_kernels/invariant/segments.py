"""A call of attention as lines of tokens and segments of them, for kernels of a GPU. B rows, S queries, T keys.

A segment is one document of one row: consecutive queries and consecutive keys, both in the order of their positions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NoReturn

import torch
from intarsia.errors import UsageError
from intarsia.ops import Packing
from torch import Tensor

from intarsia_kernels.invariant.masks import LastMasks


@dataclasses.dataclass(frozen=True)
class Segments:
    """Where segments lie. `table` is int32 [segments, 6]: first query, how many, the first one's position; first key, how many, the first one's position.

    `order_BT` (None: as they are) is the order in which keys of each row have to be laid for that. `queries` and `keys` are the most of any segment. `whole`: segments
    lie one behind the other and cover both lines, each of as many queries as keys.
    """

    table: Tensor
    order_BT: Tensor | None
    queries: int
    keys: int
    whole: bool = False

    def line(self, x_BTKD: Tensor) -> Tensor:
        """Keys or values in a line: [B T, K, D]."""
        if self.order_BT is not None:
            x_BTKD = x_BTKD.gather(1, self.order_BT[:, :, None, None].expand(-1, -1, *x_BTKD.shape[2:]))
        return x_BTKD.reshape(-1, *x_BTKD.shape[2:])


def of_lengths(lengths: Sequence[Sequence[int]], device: torch.device) -> Segments:
    """Packed rows whose documents' lengths the host knows."""
    sizes = list(itertools.chain.from_iterable(lengths))
    starts = itertools.accumulate(sizes, initial=0)
    rows = [(start, size, 0, start, size, 0) for start, size in zip(starts, sizes, strict=False) if size]
    return Segments(torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True), None, max(sizes), max(sizes), True)


_last: LastMasks[Segments] = LastMasks()


def segments(
    rows: int,
    queries: int,
    keys: int,
    device: torch.device,
    documents_q_BS: Tensor | None,
    documents_k_BT: Tensor | None,
    positions_q_BS: Tensor | None,
    positions_k_BT: Tensor | None,
    packing: Packing | None,
) -> Segments:
    """The segments of a call of `intarsia.ops.attention`. UsageError for masks that they cannot say. Masks without a packing are looked at on the host."""
    if positions_q_BS is None and positions_k_BT is None and documents_k_BT is None:
        table = [(b * queries, queries, keys - queries, b * keys, keys, 0) for b in range(rows)]
        return Segments(torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True), None, queries, keys, queries == keys)
    if packing is not None and positions_q_BS is None and positions_k_BT is None and queries == keys:
        kept = packing.prepared
        if ("segments", device) not in kept:
            kept["segments", device] = of_lengths(packing.lengths, device)
        return kept["segments", device]
    masks = (documents_q_BS, documents_k_BT, positions_q_BS, positions_k_BT)
    return _last.get((rows, queries, keys, device), masks, lambda: _of_masks(rows, queries, keys, device, *masks))


def _of_masks(
    rows: int,
    queries: int,
    keys: int,
    device: torch.device,
    documents_q_BS: Tensor | None,
    documents_k_BT: Tensor | None,
    positions_q_BS: Tensor | None,
    positions_k_BT: Tensor | None,
) -> Segments:
    if positions_q_BS is None and positions_k_BT is None:
        alike = documents_q_BS is not None and documents_k_BT is not None and torch.equal(documents_q_BS, documents_k_BT)
        if documents_k_BT is None or not alike or queries != keys:
            _refuse("documents of queries that are not those of the keys, without positions")
        return _of_documents(documents_k_BT.expand(rows, keys).tolist(), device)
    if documents_q_BS is not None and documents_k_BT is not None and bool((documents_q_BS != documents_q_BS[:, :1]).any()):
        _refuse("several documents in a row, with positions")
    position_k = (torch.arange(keys, device=device)[None] if positions_k_BT is None else positions_k_BT).expand(rows, keys)
    position_q = (torch.arange(keys - queries, keys, device=device)[None] if positions_q_BS is None else positions_q_BS).expand(
        rows, queries
    )
    valid = torch.ones_like(position_k, dtype=torch.bool)
    if documents_k_BT is not None:
        valid = (documents_k_BT >= 0).expand(rows, keys)
        if documents_q_BS is not None:
            valid = valid & (documents_k_BT == documents_q_BS[:, :1])
    far = torch.iinfo(torch.int64).max
    ranked, order_BT = torch.where(valid, position_k, far).sort(dim=1, stable=True)
    counts, first_k, first_q = valid.sum(1), ranked[:, 0], position_q[:, 0]
    steps = torch.arange(keys, device=device)
    inside = steps < counts[:, None]
    as_they_are = bool(((order_BT == steps) | ~inside).all())
    if bool(((ranked != first_k[:, None] + steps) & inside).any()) or bool(
        (position_q != first_q[:, None] + torch.arange(queries, device=device)).any()
    ):
        _refuse("keys or queries whose positions are not consecutive")
    row = torch.arange(rows, device=device)
    first_k = torch.where(counts > 0, first_k, 0)
    table = torch.stack((row * queries, torch.full_like(row, queries), first_q, row * keys, counts, first_k), 1).to(torch.int32)
    return Segments(table, None if as_they_are else order_BT, queries, keys)


def _of_documents(documents: Sequence[Sequence[int]], device: torch.device) -> Segments:
    table, start = [], 0
    for row in documents:
        seen: set[int] = set()
        for document, group in itertools.groupby(row):
            size = len(list(group))
            if document in seen:
                _refuse("a document in several pieces")
            seen.add(document)
            # Of a document below 0 nothing is seen.
            table.append((start, size, 0, start, size if document >= 0 else 0, 0))
            start += size
    longest = max(size for _, size, *_ in table)
    return Segments(torch.tensor(table, dtype=torch.int32).to(device), None, longest, longest)


def _refuse(what: str) -> NoReturn:
    raise UsageError(f"Invariant attention on a GPU takes no {what}. Choose another kernel, or give each document rows of its own.")
