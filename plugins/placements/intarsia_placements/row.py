"""`row`: every member is cut evenly along one dimension.

The dimension is counted in units: the tile's size along it, or 1. n units over R ranks: the first n % R ranks get one more than the
others, so that shares differ by at most one unit (torch.chunk's 5 over 4 gives 2, 2, 1, 0; this gives 2, 1, 1, 1). The last unit may
be short. A vector has only one dimension to cut; a rank-0 member goes whole to the rank that then has the fewest elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from intarsia.errors import UsageError
from intarsia.layout import Box, Member, Partition, Region, region_numel, whole_region

from intarsia_placements.config import Row


class DimensionPlacement:
    """Cuts along dimension `dim` of every member. Also what `column` is."""

    accepts: Literal["box", "region"] = "box"
    by_shape = True

    def __init__(self, name: str, dim: int) -> None:
        self.dim = dim
        self.name = f"{name}(dim={dim})"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        regions: list[tuple[Region, ...]] = [self._cut(member, ranks) if member.shape else () for member in members]
        loads = [sum(region_numel(row[rank]) for row in regions if row) for rank in range(ranks)]
        for index, member in enumerate(members):
            if not member.shape:
                owner = loads.index(min(loads))
                loads[owner] += 1
                regions[index] = tuple(whole_region(()) if rank == owner else () for rank in range(ranks))
        return Partition(tuple(members), ranks, tuple(regions))

    def _cut(self, member: Member, ranks: int) -> tuple[Region, ...]:
        dimensions = len(member.shape)
        if dimensions > 1 and not -dimensions <= self.dim < dimensions:
            raise UsageError(
                f"Placement {self.name!r} cannot cut member {member.name!r} of shape {member.shape}: it has no dimension {self.dim}. "
                f"Choose a dim between {-dimensions} and {dimensions - 1}."
            )
        dim = self.dim % dimensions
        whole = member.shape[dim]
        unit = member.tile[dim] if member.tile else 1
        each, more = divmod(-(-whole // unit), ranks)
        regions: list[Region] = []
        for rank in range(ranks):
            begin = min((rank * each + min(rank, more)) * unit, whole)
            end = min(((rank + 1) * each + min(rank + 1, more)) * unit, whole)
            if end == begin or not member.numel:
                regions.append(())
                continue
            start = tuple(begin if d == dim else 0 for d in range(dimensions))
            regions.append((Box(start, (*member.shape[:dim], end - begin, *member.shape[dim + 1 :])),))
        return tuple(regions)


def build(config: Row) -> DimensionPlacement:
    """The placement of `config`."""
    return DimensionPlacement("row", config.dim)
