"""How a tensor is spread over the ranks of named mesh axes, as pure integers. Torch-free.

A placement cuts a bucket of members over the ranks of one axis (`intarsia.contracts.Placement`). A `Layout` composes such cuts, replication
and pending reductions for one tensor; `intarsia_placements.layouts` does that for a bucket. `intarsia_transfer` moves data between two layouts.

Words used here: the *pieces* of a tensor are its parts by the coordinates of the cut axes alone, numbered row-major over those axes;
ranks that differ only along other axes hold the same piece.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from intarsia.contracts.placement import ALIGNMENT_BYTES, Box, Member, Partition, Placement, Region
from intarsia.errors import UsageError

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
    "check_cover",
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
