"""Where the tokens of a call of attention lie in tiles at absolute positions. B rows, S queries, T keys.

A *segment* is one document of one row (or the whole row where there are no documents). Its keys lie in blocks of 32 and its queries in tiles of 16, by their position
in the document and by nothing else: whether they came packed, padded, in pages or one at a time. Blocks of all segments stand one after another, behind them one empty block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NoReturn

import torch
from intarsia.errors import UsageError
from torch import Tensor

QUERIES, KEYS = 16, 32
"""Positions of a tile of queries and of a block of keys."""


@dataclasses.dataclass(frozen=True)
class Places:
    """The layout of one call. n tiles in descending order of their number within their segment, b blocks.

    `key_from` and `key_to` say which of the B T keys lies where in the b + 1 blocks, `query_from` and `query_to` which of the B S queries lies where in the n tiles. `numbers` are the
    tiles' numbers within their segments, on the host; `first_n` and `count_n` their segment's first block and how many it has. `holes`: some block before a tile's own lacks keys.
    """

    key_from: Tensor
    key_to: Tensor
    query_from: Tensor
    query_to: Tensor
    numbers: tuple[int, ...]
    numbers_n: Tensor
    first_n: Tensor
    count_n: Tensor
    blocks: int
    present: Tensor
    holes: bool

    def range_of(self, block: int, window: int | None) -> tuple[int, int]:
        """The tiles that see something of their segment's block of this number: from, to."""
        end = _count_at_least(self.numbers, block * KEYS // QUERIES)
        if window is None:
            return 0, end
        return _count_at_least(self.numbers, (block * KEYS + KEYS - 1 + window - 1) // QUERIES + 1), end

    def longest(self) -> int:
        """How many blocks any tile looks at."""
        return self.numbers[0] * QUERIES // KEYS + 1 if self.numbers else 0

    def block_of(self, block: int, start: int, end: int) -> Tensor:
        """For tiles `start` to `end`: where their segment's block of this number stands; the empty one where it has none."""
        return torch.where(self.count_n[start:end] > block, self.first_n[start:end] + block, self.blocks)

    def seen(self, block: int, start: int, end: int, where: Tensor, window: int | None) -> Tensor:
        """Which keys of the block each query of tiles `start` to `end` sees: bool [tiles, 16, 32]."""
        device = where.device
        position_q = self.numbers_n[start:end, None] * QUERIES + torch.arange(QUERIES, device=device)
        distance = position_q[:, :, None] - torch.arange(block * KEYS, (block + 1) * KEYS, device=device)
        seen = (distance >= 0) & self.present.view(-1, KEYS).index_select(0, where)[:, None, :]
        return seen if window is None else seen & (distance < window)


def _count_at_least(descending: Sequence[int], least: int) -> int:
    low, high = 0, len(descending)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if descending[middle] >= least else (low, middle)
    return low


def places(
    rows: int,
    queries: int,
    keys: int,
    device: torch.device,
    documents_q_BS: Tensor | None,
    documents_k_BT: Tensor | None,
    positions_q_BS: Tensor | None,
    positions_k_BT: Tensor | None,
) -> Places:
    """The layout of a call of `intarsia.ops.attention`. Raises UsageError where two keys, or two queries, of a document have one position: tiles cannot hold both."""
    row_B1 = torch.arange(rows, device=device)[:, None]
    segment_q, segment_k = row_B1.expand(rows, queries), row_B1.expand(rows, keys)
    valid_k = torch.ones((rows, keys), dtype=torch.bool, device=device)
    if documents_k_BT is not None:
        valid_k = (documents_k_BT >= 0).expand(rows, keys)
        if documents_q_BS is not None:
            largest = max(int(each.max()) if each.numel() else 0 for each in (documents_q_BS, documents_k_BT)) + 2
            segment_k = row_B1 * largest + documents_k_BT
            # Documents below 0 hold no key that is seen; their queries look for a number that no key has.
            segment_q = torch.where(documents_q_BS >= 0, row_B1 * largest + documents_q_BS, -1)
    key_from = valid_k.flatten().nonzero().squeeze(1)
    names, segment_m = torch.unique(segment_k.flatten()[key_from], return_inverse=True)
    position_k = torch.arange(keys, device=device).expand(rows, keys) if positions_k_BT is None else positions_k_BT.expand(rows, keys)
    position_q = torch.arange(keys - queries, keys, device=device).expand(rows, queries)
    position_q = position_q if positions_q_BS is None else positions_q_BS.expand(rows, queries)
    position_m = position_k.flatten()[key_from].long()
    lowest_s = torch.full(names.shape, torch.iinfo(torch.int64).max, device=device).scatter_reduce_(0, segment_m, position_m, "amin")
    if positions_q_BS is not None or positions_k_BT is not None:
        lowest_s = lowest_s.div(KEYS, rounding_mode="floor") * KEYS  # positions are absolute: blocks begin where they always do
    elif documents_k_BT is None:
        lowest_s = torch.zeros_like(lowest_s)
    position_m = position_m - lowest_s[segment_m]
    count_s = torch.zeros_like(lowest_s).scatter_reduce_(0, segment_m, position_m.div(KEYS, rounding_mode="floor") + 1, "amax")
    first_s = count_s.cumsum(0) - count_s
    blocks = int(count_s.sum())
    key_to = first_s[segment_m] * KEYS + position_m
    present = torch.zeros((blocks + 1) * KEYS, dtype=torch.bool, device=device)
    present[key_to] = True
    if int(present.sum()) != key_to.numel():
        _refuse("keys")

    query_from, segment_p = _queries_with_keys(segment_q.flatten(), names)
    position_p = position_q.flatten()[query_from].long() - lowest_s[segment_p]
    after = position_p >= 0
    query_from, segment_p, position_p = query_from[after], segment_p[after], position_p[after]
    # Tiles by descending number: those that see a block are then neighbours.
    number_p = position_p.div(QUERIES, rounding_mode="floor")
    segments = max(1, names.numel())
    most = int(number_p.max()) if number_p.numel() else 0
    codes, tile_p = torch.unique((most - number_p) * segments + segment_p, return_inverse=True)
    numbers_n, segment_n = most - codes.div(segments, rounding_mode="floor"), codes % segments
    query_to = tile_p * QUERIES + position_p % QUERIES
    if torch.unique(query_to).numel() != query_to.numel():
        _refuse("queries")
    full = present.view(-1, KEYS).all(1)[:blocks]
    lacking = torch.cat((torch.zeros(1, dtype=torch.int64, device=device), (~full).cumsum(0)))
    before = torch.minimum(numbers_n * QUERIES // KEYS, count_s[segment_n])
    holes = bool((lacking[first_s[segment_n] + before] != lacking[first_s[segment_n]]).any()) or bool(
        (before < numbers_n * QUERIES // KEYS).any()
    )
    numbers = tuple(numbers_n.tolist())
    return Places(
        key_from, key_to, query_from, query_to, numbers, numbers_n, first_s[segment_n], count_s[segment_n], blocks, present, holes
    )


def _queries_with_keys(segment_q: Tensor, names: Tensor) -> tuple[Tensor, Tensor]:
    """Which queries' segments have keys, and their numbers."""
    if not names.numel():
        nothing = segment_q.new_zeros(0)
        return nothing, nothing
    found = torch.searchsorted(names, segment_q.contiguous()).clamp_max(names.numel() - 1)
    query_from = (names[found] == segment_q).nonzero().squeeze(1)
    return query_from, found[query_from]


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"attention/tiled: two {what} of one document have the same position, and a tile has one place for each. Give each its own document, or choose another kernel."
    )
