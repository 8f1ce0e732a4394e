"""`block`: tiles of a given size are shared out and none is cut, as block-wise quantisation wants it.

A tile's sizes belong to a member's last dimensions: a vector uses the last size only; dimensions before those of the tile are cut at every index. A size of -1 is
the whole dimension: with (128, -1) the borders lie between whole rows of tiles, so that every share is a contiguous range of its member; with (-1, -1)
matrices stay whole, and stacks of experts are shared out expert by expert. Where a member has a tile of its own, the least common multiple in each dimension is used. Tiles of the bucket are numbered by member
and row-major within it; each rank gets a contiguous range, its borders at the tile borders nearest to even shares of the elements. Ranges become as
few boxes as possible (at most 2 * rank - 1 for a member).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from intarsia.errors import UsageError
from intarsia.layout import Box, Member, Partition, Region, range_boxes, region_numel

from intarsia_placements.borders import bucket_borders
from intarsia_placements.config import Block


class BlockPlacement:
    """Shares out tiles."""

    accepts: Literal["box", "region"] = "box"
    by_shape = True

    def __init__(self, tile: tuple[int, ...]) -> None:
        if not 1 <= len(tile) <= 3 or any(size < 1 and size != -1 for size in tile):
            raise UsageError(
                f"Placement block: tile must have one, two or three sizes of at least 1 (or -1: the whole dimension), such as (128, 128), not {tile}."
            )
        self.tile = tile
        self.name = f"block(tile={tile})"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        grids = {member: _Tiles(member, self.tile) for member in members}
        regions: list[tuple[Region, ...]] = []
        sizes = [member.numel for member in members]
        targets = [rank * sum(sizes) // ranks for rank in range(1, ranks)]
        borders_of_members = bucket_borders(members, sizes, targets, lambda member, border: grids[member].nearest(border))
        for member, borders in zip(members, borders_of_members, strict=True):
            counts = [grids[member].count_before(border) for border in borders]
            regions.append(tuple(grids[member].boxes(begin, end) for begin, end in pairwise(counts)))
        return Partition(tuple(members), ranks, tuple(regions))


class _Tiles:
    """The tiles of one member, numbered row-major."""

    def __init__(self, member: Member, tile: tuple[int, ...]) -> None:
        dimensions = len(member.shape)
        sizes = ((1,) * dimensions + tile)[-dimensions:] if dimensions else ()
        self.shape = member.shape
        sizes = tuple(max(whole, 1) if size == -1 else size for size, whole in zip(sizes, self.shape, strict=True))
        self.sizes = tuple(map(math.lcm, sizes, member.tile)) if member.tile else sizes
        self.grid = Box.whole(tuple(-(-whole // size) for whole, size in zip(self.shape, self.sizes, strict=True)))

    def boxes(self, begin: int, end: int) -> Region:
        """Tiles `begin` to `end`, as boxes of the member's index space."""
        region = []
        for box in range_boxes(self.grid, begin, end - begin):
            start = tuple(a * size for a, size in zip(box.start, self.sizes, strict=True))
            stop = tuple(min(b * size, whole) for b, size, whole in zip(box.end, self.sizes, self.shape, strict=True))
            region.append(Box(start, tuple(b - a for a, b in zip(start, stop, strict=True))))
        return tuple(region)

    def elements(self, count: int) -> int:
        """Elements in the first `count` tiles."""
        return region_numel(self.boxes(0, count))

    def count_before(self, border: int) -> int:
        """How many tiles hold the first `border` elements."""
        return bisect_left(range(self.grid.numel + 1), border, key=self.elements)

    def nearest(self, border: int) -> int:
        """The tile border nearest to element `border`, in elements; the higher of two equally near ones."""
        above = self.count_before(border)
        high, low = self.elements(above), self.elements(max(above - 1, 0))
        return low if border - low < high - border else high


def build(config: Block) -> BlockPlacement:
    """The placement of `config`."""
    return BlockPlacement(config.tile)
