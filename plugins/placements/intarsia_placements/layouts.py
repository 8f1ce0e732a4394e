"""The layouts of a bucket of tensors: placements, one inside the other, over the axes of a mesh. Pure integers, torch-free.

A placement cuts a bucket's members over the ranks of one axis (`intarsia.contracts.Placement`); `build_layouts` composes such cuts and replication into a `Layout` for each member.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from intarsia.contracts import Box, Member, Partition, Placement, Region
from intarsia.errors import PluginError, UsageError
from intarsia.layout import AxisKind, Layout, box_text, check_cover, range_boxes, region_numel, whole_region


def _require(kept: bool, sentence: str) -> None:
    if not kept:
        raise UsageError(sentence)


def build_layouts(members: Sequence[Member], steps: Sequence[tuple[str, int, Placement | Literal["replicate"]]]) -> dict[str, Layout]:
    """The layouts of a bucket's members under `steps` (axis, size, placement), outermost first, by member name. Stability: stable.

    An inner placement cuts what the outer ones left on each rank, again as one bucket: a piece that is one box is a member of the
    box's shape; a piece of several boxes is a 1-D member in storage order, which only a placement with `accepts == "region"` may cut. Raises
    UsageError, naming placements and axes, for a composition that is not legal, and PluginError for a placement that breaks its contract.
    """
    twice = sorted(name for name, count in Counter(member.name for member in members).items() if count > 1)
    _require(not twice, f"A bucket has several members of the name {', '.join(map(repr, twice))}.")
    for member in members:
        _check_member(member)
    pieces: list[list[Region]] = [[whole_region(member.shape) for member in members]]
    kinds: list[AxisKind] = []
    outer = ""
    for axis, size, placement in steps:
        if placement == "replicate":
            kinds.append("replicate")
            continue
        _require(size >= 1, f"Axis {axis!r} has size {size}; it must be at least 1.")
        answers = [_cut_piece(members, piece, axis, size, placement, outer) for piece in pieces]
        replicas = {replicated for _, replicated in answers if replicated is not None}
        if len(replicas) > 1:
            raise PluginError(f"Placement {placement.name!r} broke its contract: it replicates some pieces of a bucket and cuts others.")
        kinds.append("replicate" if replicas == {True} else "cut")
        if kinds[-1] == "cut":
            pieces = [[regions[index][rank] for index in range(len(members))] for regions, _ in answers for rank in range(size)]
            outer += f"{' and ' if outer else ''}{placement.name!r} on axis {axis!r}"
    axes = [(axis, size) for axis, size, _ in steps]
    layouts = {}
    for index, member in enumerate(members):
        layout = Layout(member.shape, member.dtype, (), (), tuple(piece[index] for piece in pieces))
        for (axis, size), kind in zip(axes, kinds, strict=True):
            layout = layout.with_axis(axis, size, kind, layout.regions)
        layouts[member.name] = layout
    return layouts


def _check_member(member: Member) -> None:
    _require(min(member.shape, default=0) >= 0, f"Member {member.name!r} has the shape {member.shape}; sizes must not be negative.")
    good = member.tile is None or (len(member.tile) == len(member.shape) and min(member.tile, default=1) >= 1)
    _require(good, f"Member {member.name!r} has tile {member.tile} for shape {member.shape}: one size of at least 1 for each dimension.")


def _cut_piece(
    members: Sequence[Member], piece: Sequence[Region], axis: str, size: int, placement: Placement, outer: str
) -> tuple[list[list[Region]], bool | None]:
    """One piece of every member, cut over an axis: the regions by member and rank, and whether they are replicas (None: nothing to cut).

    Members without an element here are not shown to the placement.
    """
    seen = [index for index, region in enumerate(piece) if region]
    shown = tuple(_as_member(members[index], piece[index]) for index in seen)
    for index in seen:
        if len(piece[index]) > 1 and placement.accepts != "region":
            raise UsageError(
                f"Placement {placement.name!r} on axis {axis!r} cannot cut what {outer} left of {members[index].name!r}: that is "
                f"{len(piece[index])} boxes, and {placement.name!r} cuts one box only. Choose an inner placement that accepts any region "
                f"(flat, owned), or an outer one that leaves boxes (row, column, owned)."
            )
    regions: list[list[Region]] = [[()] * size for _ in members]
    if not shown:
        return regions, None
    try:
        partition = placement.partition(shown, size)
    except UsageError as error:
        inside = f" inside {outer}" if outer else ""
        raise UsageError(f"{error} (placement {placement.name!r} on axis {axis!r} of size {size}{inside})") from error
    if tuple(partition.members) != shown or partition.ranks != size:
        raise PluginError(f"Placement {placement.name!r} broke its contract: it answered for other members or ranks than it was asked for.")
    check_partition(partition, placement.name)
    for index, parts in zip(seen, partition.regions, strict=True):
        regions[index] = [_to_global(piece[index], part) for part in parts]
    return regions, partition.replicated


def _as_member(member: Member, region: Region) -> Member:
    """The piece `region` of `member` as an inner placement sees it: a box keeps its rank, several boxes are 1-D in storage order."""
    numel = region_numel(region)
    cost = member.cost * numel / member.numel
    if len(region) == 1:
        # Its start lies on the tile grid, or else the outer cut went through a tile, which check_partition has refused.
        return dataclasses.replace(member, shape=region[0].size, cost=cost)
    tile = None if member.tile is None else (_storage_tile(member.tile, region),)
    return dataclasses.replace(member, shape=(numel,), tile=tile, cost=cost)


def _storage_tile(tile: Sequence[int], region: Region) -> int:
    """Elements between places where a region of several boxes may be cut in storage order without cutting a tile: the rows of
    tiles where all boxes' are equally long, else the whole region."""
    rows = {tile[0] * math.prod(box.size[1:]) for box in region}
    regular = len(rows) == 1 and all(box.size[0] % tile[0] == 0 for box in region[:-1])
    # A box that is cut through a tile whose rest is in another box of the region has no rows of tiles of its own.
    regular = regular and all(a % t == 0 for box in region for a, t in zip(box.start, tile, strict=True))
    return rows.pop() if regular else region_numel(region)


def _to_global(piece: Region, part: Region) -> Region:
    """`part`, as an inner placement cut it from `piece` seen as a member, in the whole tensor's index space."""
    if len(piece) == 1:
        origin = piece[0].start
        return tuple(Box(tuple(map(int.__add__, box.start, origin)), box.size) for box in part)
    found: list[Box] = []
    for box in part:
        start, end, offset = box.start[0], box.end[0], 0
        for outer in piece:
            low, high = max(start, offset), min(end, offset + outer.numel)
            found += range_boxes(outer, low - offset, high - low)
            offset += outer.numel
    return tuple(found)


# ---------------------------------------------------------------- what a placement promises


def check_partition(partition: Partition, placement: str = "") -> None:
    """Raise PluginError, saying which member and what is wrong, unless regions are inside, disjoint and covering (or all whole where
    replicated) and no tile is cut. `placement` is how the message calls who made it. Stability: stable."""
    who = f"placement {placement!r}" if placement else "the placement"
    if len(partition.regions) != len(partition.members):
        raise PluginError(f"{who} broke its contract: {len(partition.regions)} rows of regions for {len(partition.members)} members.")
    for member, regions in zip(partition.members, partition.regions, strict=True):
        problem = ""
        if len(regions) != partition.ranks:
            problem = f"{len(regions)} regions for {partition.ranks} ranks"
        elif partition.replicated:
            if any(region != whole_region(member.shape) for region in regions):
                problem = "replicated, yet not every rank stores the member whole"
        else:
            problem = check_cover(member.shape, regions)
            if not problem and member.tile is not None:
                problem = next(filter(None, (_check_tiles(member.shape, member.tile, region) for region in regions)), "")
        if problem:
            raise PluginError(f"{who} broke its contract for member {member.name!r} of shape {member.shape}: {problem}.")


def _check_tiles(shape: Sequence[int], tile: Sequence[int], region: Region) -> str:
    """Which tile of the grid that is anchored at the origin is cut by `region`; "" when none is."""
    for box in region:
        low = tuple(a // t * t for a, t in zip(box.start, tile, strict=True))
        high = tuple(min(-(-b // t) * t, n) for b, t, n in zip(box.end, tile, shape, strict=True))
        if low == box.start and high == box.end:
            continue
        # The tiles that a box touches fill its hull on the tile grid; none is cut when the region holds that hull, in whatever boxes.
        hull = Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))
        held = sum(common.numel for other in region if (common := other.intersect(hull)) is not None)
        if held != hull.numel:
            return f"box {box_text(box)} cuts a tile of {tuple(tile)} in the shape {tuple(shape)}"
    return ""
