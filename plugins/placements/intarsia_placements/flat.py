"""`flat`: the bucket's elements, laid end to end in member order and each member row-major, are cut into even ranges.

They are cut in units of `unit` elements that are counted from each member's beginning (a member's last one may be short), so that every range begins where aligned
memory does. n units over R ranks: each gets ceil(n / R) until none is left, so that only the last rank that has any can have fewer, and a gather in rank order is
the bucket itself. In a member with a tile a border moves to the nearest border between whole rows of tiles (the tile's size along dimension 0, times
everything in the other dimensions); such members make shares uneven by up to one row of tiles. Rank-0 members have one element and are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from intarsia.errors import UsageError
from intarsia.layout import Box, Member, Partition, Region, range_boxes

from intarsia_placements.borders import bucket_borders
from intarsia_placements.config import Flat


class FlatPlacement:
    """Cuts the bucket into even ranges of elements."""

    accepts: Literal["box", "region"] = "region"
    by_shape = True

    def __init__(self, unit: int) -> None:
        if unit < 1:
            raise UsageError(f"Placement flat: unit is {unit}; it is a number of elements, at least 1.")
        self.unit = unit
        self.name = f"flat(unit={unit})"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        sizes = [-(-member.numel // self.unit) * self.unit for member in members]
        share = -(-sum(sizes) // (self.unit * ranks)) * self.unit
        targets = [rank * share for rank in range(1, ranks)]
        regions: list[tuple[Region, ...]] = []
        for member, borders in zip(members, bucket_borders(members, sizes, targets, _snap), strict=True):
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
    return FlatPlacement(config.unit)
