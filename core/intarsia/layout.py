"""How a tensor is spread over the ranks of named mesh axes, as pure integers. Torch-free.

A placement cuts a bucket of members over the ranks of one axis (`intarsia.contracts.Placement`). A `Layout` composes such cuts, replication
and pending reductions for one tensor; `build_layouts` does that for a bucket. `intarsia_transfer` moves data between two layouts.

Words used here: the *pieces* of a tensor are its parts by the coordinates of the cut axes alone, numbered row-major over those axes;
ranks that differ only along other axes hold the same piece.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from intarsia.contracts.placement import ALIGNMENT_BYTES, Box, Member, Partition, Placement, Region
from intarsia.errors import PluginError, UsageError

__all__ = [
    "ALIGNMENT_BYTES",
    "DTYPE_BYTES",
    "Box",
    "Layout",
    "Member",
    "Partition",
    "Placement",
    "Region",
    "box_text",
    "build_layouts",
    "check_cover",
    "check_partition",
    "find_overlap",
    "range_boxes",
    "region_numel",
    "region_parts",
    "slices",
    "whole_region",
]

AxisKind = Literal["cut", "replicate", "sum", "max"]

# Bytes of one element, by torch's dtype names.
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip


def _require(kept: bool, sentence: str) -> None:
    if not kept:
        raise UsageError(sentence)


# ---------------------------------------------------------------- boxes and regions


def box_text(box: Box) -> str:
    """A box as messages show it: `[0:4, 8:16]`. Stability: provisional."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.end, strict=True)) + "]"


def whole_region(shape: Sequence[int]) -> Region:
    """The region of a whole tensor: one box, or none where the tensor has no element. Stability: stable."""
    return (Box.whole(shape),) if math.prod(shape) else ()


def region_numel(region: Region) -> int:
    """Elements in a region. Stability: stable."""
    return sum(math.prod(box.size) for box in region)


def range_boxes(box: Box, start: int, length: int) -> Region:
    """Elements `start` to `start + length` of `box` in row-major order, as boxes in that order (at most 2 * rank - 1). Stability: stable."""
    if length <= 0:
        return ()
    if length == box.numel:
        return (box,)
    row = math.prod(box.size[1:])
    first, skipped = divmod(start, row)
    last, kept = divmod(start + length, row)

    def part(index: int, begin: int, count: int) -> Region:
        inner = Box(box.start[1:], box.size[1:])
        return tuple(Box((box.start[0] + index, *b.start), (1, *b.size)) for b in range_boxes(inner, begin, count))

    if first == last:
        return part(first, skipped, length)
    head = part(first, skipped, row - skipped) if skipped else ()
    first += bool(skipped)
    middle = (Box((box.start[0] + first, *box.start[1:]), (last - first, *box.size[1:])),) if last > first else ()
    return head + middle + part(last, 0, kept)


def slices(box: Box, origin: Sequence[int] | None = None) -> tuple[Any, ...]:
    """The index of a global `box` in an array that begins at `origin` (the tensor's own origin when None). Stability: stable."""
    base = origin if origin is not None else (0,) * len(box.start)
    # For rank 0 the ellipsis: numpy's index () gives a number and no view.
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(box.start, box.size, base, strict=True)) or (Ellipsis,)


def region_parts(buffer: Any, region: Region, box: Box) -> Iterator[tuple[Box, Any]]:
    """Where `box` meets `region`: each common global box with its view into `buffer`.

    `buffer` is a contiguous 1-D torch tensor or numpy array that holds `region` in storage order; the views share its memory, so that copying
    into them fills the buffer. Stability: stable.
    """
    offset = 0
    for holder in region:
        common = holder.intersect(box)
        if common is not None:
            yield common, buffer[offset : offset + holder.numel].reshape(holder.size)[slices(common, holder.start)]
        offset += holder.numel


# ---------------------------------------------------------------- checks


def _check_boxes(shape: Sequence[int], region: Region) -> str:
    """What is wrong with the boxes of one region by themselves; "" when nothing is."""
    for box in region:
        if len(box.start) != len(shape) or len(box.size) != len(shape):
            return f"box {box_text(box)} has {len(box.size)} dimensions, the tensor has {len(shape)}"
        for start, size, whole in zip(box.start, box.size, shape, strict=True):
            if size <= 0:
                return f"box {box_text(box)} is empty; an empty region is an empty tuple"
            if start < 0 or start + size > whole:
                return f"box {box_text(box)} reaches outside the shape {tuple(shape)}"
    return ""


def busiest_dimension(boxes: Sequence[Box], rank: int) -> int:
    """The dimension along which the boxes begin at the most different places: the best one to sort by. Stability: private."""
    return max(range(rank), key=lambda d: len({box.start[d] for box in boxes})) if rank > 1 else 0


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The numbers of two of the boxes that share an element, or None; a sweep along one dimension. Stability: stable."""
    if not boxes or not boxes[0].start:
        return (0, 1) if len(boxes) > 1 else None
    dimension = busiest_dimension(boxes, len(boxes[0].start))
    active: list[int] = []
    for number in sorted(range(len(boxes)), key=lambda index: boxes[index].start[dimension]):
        box = boxes[number]
        active = [other for other in active if boxes[other].end[dimension] > box.start[dimension]]
        for other in active:
            if boxes[other].intersect(box) is not None:
                return other, number
        active.append(number)
    return None


def check_cover(shape: Sequence[int], regions: Sequence[Region]) -> str:
    """What keeps `regions`, one for each rank, from being a disjoint cover of the tensor; "" when nothing does. Stability: provisional."""
    for rank, region in enumerate(regions):
        problem = _check_boxes(shape, region)
        if problem:
            return f"rank {rank}: {problem}"
    labelled = [(box, rank) for rank, region in enumerate(regions) for box in region]
    overlap = find_overlap([box for box, _ in labelled])
    if overlap is not None:
        (box, rank), (other, other_rank) = (labelled[number] for number in overlap)
        return f"box {box_text(box)} of rank {rank} and box {box_text(other)} of rank {other_rank} overlap; regions must be disjoint"
    covered, total = sum(map(region_numel, regions)), math.prod(shape)
    return "" if covered == total else f"the regions cover {covered} of {total} elements of shape {tuple(shape)}"


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


# ---------------------------------------------------------------- the layout of one tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one tensor over named mesh axes. Immutable, comparable, hashable. Stability: stable.

    `axes` are (name, size), outermost first; a rank is the row-major index of its coordinates. `kinds[i]` says what axis i does:
    `cut` (each coordinate has its own part of what the axes before it left), `replicate` (all coordinates have the same), `sum` or `max` (each has
    a contribution; the value is their sum or maximum). `regions` has one region for each piece. Make one with `whole`, `cut`,
    `replicate` and `partial`, or `build_layouts`.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, int], ...]
    kinds: tuple[AxisKind, ...]
    regions: tuple[Region, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], dtype: str = "float32", axes: Sequence[tuple[str, int]] = ()) -> Layout:
        """The whole tensor on every rank of `axes`."""
        layout = cls(tuple(shape), dtype, (), (), (whole_region(shape),))
        for name, size in axes:
            layout = layout.replicate(name, size)
        return layout

    def cut(self, axis: str, regions: Sequence[Region]) -> Layout:
        """This layout with a further, innermost axis that cuts.

        `regions` are in the whole tensor's index space, the axis's ranks in order for each piece in order: for a layout that is not cut yet,
        one region for each rank, as in `Partition.regions[member]`. Raises UsageError unless every piece is cut into a disjoint cover of itself.
        """
        size, rest = divmod(len(regions), len(self.regions))
        shared = not rest and size > 0
        _require(shared, f"Axis {axis!r}: {len(regions)} regions cannot be shared out evenly over {len(self.regions)} pieces.")
        layout = self.with_axis(axis, size, "cut", tuple(map(tuple, regions)))
        problem = check_cover(self.shape, layout.regions)
        for index, region in enumerate(layout.regions if not problem else ()):
            piece = self.regions[index // size]
            inside = sum(common.numel for box in region for outer in piece if (common := box.intersect(outer)) is not None)
            if inside != region_numel(region):
                problem = problem or f"region {index % size} of piece {index // size} leaves that piece"
        _require(not problem, f"Axis {axis!r} cannot cut the tensor of shape {self.shape}: {problem}.")
        return layout

    def replicate(self, axis: str, size: int) -> Layout:
        """This layout with a further, innermost axis of `size` ranks that all hold the same."""
        return self.with_axis(axis, size, "replicate", self.regions)

    def partial(self, axis: str, size: int, op: Literal["sum", "max"]) -> Layout:
        """This layout with a further, innermost axis along which a reduction is pending: each rank holds a contribution."""
        _require(op in ("sum", "max"), f"Axis {axis!r}: a pending reduction is 'sum' or 'max', not {op!r}.")
        return self.with_axis(axis, size, op, self.regions)

    def with_axis(self, axis: str, size: int, kind: AxisKind, regions: tuple[Region, ...]) -> Layout:
        """This layout with a further, innermost axis and regions that are not checked: see `cut`, `replicate` and `partial`."""
        kinds = (*self.kinds, kind)
        _require(all(axis != name for name, _ in self.axes), f"Axis {axis!r} is in the layout already.")
        _require(size >= 1, f"Axis {axis!r} has size {size}; it must be at least 1.")
        mixed = "sum" in kinds and "max" in kinds
        _require(
            not mixed, f"Axis {axis!r}: sum and max cannot be pending at once, as their order would change the value. Reduce one first."
        )
        return Layout(self.shape, self.dtype, (*self.axes, (axis, size)), kinds, regions)

    @property
    def ranks(self) -> int:
        """Ranks of the mesh: the product of the axes' sizes."""
        return math.prod(size for _, size in self.axes)

    @property
    def pending(self) -> tuple[tuple[str, str], ...]:
        """(axis, "sum" or "max") of every pending reduction."""
        return tuple((name, kind) for (name, _), kind in zip(self.axes, self.kinds, strict=True) if kind in ("sum", "max"))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of `rank` along `axes`."""
        if not 0 <= rank < self.ranks:
            raise UsageError(f"Rank {rank} is not in a mesh of {self.ranks} ranks ({self.axes}).")
        found = []
        for _, size in reversed(self.axes):
            rank, coordinate = divmod(rank, size)
            found.append(coordinate)
        return tuple(reversed(found))

    def index_along(self, rank: int, *kinds: str) -> int:
        """Row-major index of `rank` over only those axes that are of `kinds`; over the cut axes it is the number of its piece."""
        index = 0
        for coordinate, (_, size), kind in zip(self.coordinates(rank), self.axes, self.kinds, strict=True):
            if kind in kinds:
                index = index * size + coordinate
        return index

    def local(self, rank: int) -> Region:
        """What `rank` stores, in storage order."""
        return self.regions[self.index_along(rank, "cut")]

    def primary(self, rank: int) -> Region:
        """The part of `local(rank)` that is primary: all of it at coordinate 0 of every axis that does not cut, else nothing.

        Over all ranks primaries are disjoint and cover the tensor. Where a reduction is pending, the value at a primary is a contribution only.
        """
        return () if self.index_along(rank, "replicate", "sum", "max") else self.local(rank)

    def numel(self, rank: int) -> int:
        """Elements that `rank` stores."""
        return region_numel(self.local(rank))

    def to_json(self) -> dict[str, Any]:
        """Plain lists, integers and strings."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "axes": [[name, size, kind] for (name, size), kind in zip(self.axes, self.kinds, strict=True)],
            "regions": [[[list(box.start), list(box.size)] for box in region] for region in self.regions],
        }


# ---------------------------------------------------------------- composition inside a bucket


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
