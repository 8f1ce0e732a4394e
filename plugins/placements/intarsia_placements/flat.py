"""`flat`: the bucket's elements, laid end to end in member order and each member row-major, are cut into even ranges.

Border r of T elements over R ranks lies at r * T // R, so that shares differ by at most one element and a gather in rank order is the bucket
itself. In a member with a tile a border moves to the nearest border between whole rows of tiles (the tile's size along dimension 0, times
everything in the other dimensions); such members make shares uneven by up to one row of tiles. Rank-0 members have one element and are never cut.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from intarsia.layout import Box, Member, Partition, Region, range_boxes

from intarsia_placements.config import Flat


def bucket_borders(members: Sequence[Member], ranks: int, snap: Callable[[Member, int], int]) -> list[tuple[int, ...]]:
    """For each member the ranks + 1 borders, counted in its own elements, that even ranges of the whole bucket make in it.

    `snap(member, border)` moves a border to where the member may be cut; it must keep order, 0 and the member's end.
    """
    begins = [0, *accumulate(member.numel for member in members)]
    borders: list[list[int]] = [[0] for _ in members]
    for rank in range(1, ranks):
        target = rank * begins[-1] // ranks
        # Members before the one that holds the target are wholly left of the border, those after it wholly right.
        cut = bisect_right(begins, target) - 1
        for index, member in enumerate(members):
            inside = member.numel if index < cut else 0
            borders[index].append(snap(member, target - begins[index]) if index == cut else inside)
    return [(*found, member.numel) for found, member in zip(borders, members, strict=True)]


class FlatPlacement:
    """Cuts the bucket into even ranges of elements."""

    name = "flat"
    accepts: Literal["box", "region"] = "region"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        regions: list[tuple[Region, ...]] = []
        for member, borders in zip(members, bucket_borders(members, ranks, _snap), strict=True):
            whole = Box.whole(member.shape)
            regions.append(tuple(range_boxes(whole, begin, end - begin) for begin, end in pairwise(borders)))
        return Partition(tuple(members), ranks, tuple(regions))


def _snap(member: Member, border: int) -> int:
    if not member.tile:
        return border
    row = member.tile[0] * math.prod(member.shape[1:])
    low = border // row * row
    high = min(low + row, member.numel)
    return low if border - low < high - border else high


def build(config: Flat) -> FlatPlacement:
    """The placement of `config`."""
    return FlatPlacement()
