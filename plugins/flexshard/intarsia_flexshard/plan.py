"""Where the elements of a bucket lie: in every rank's shard, in the buffer that a gather fills, and in the one that a reduction reads. Pure integers, torch-free.

A gather puts the ranks' shards one after the other: the *rank-major* buffer. A member is *contiguous* there if its elements stand in row-major order
without gaps: then the whole parameter is a view of the gathered buffer and its gradient is packed by one copy. Whether that is so follows from the boxes
that the placement gave, whatever the placement is called; members for which it is not are copied out box by box. The ends of ranks are padded
only where that separates nothing, so that transfers keep their true sizes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

from intarsia.contracts import Box, Region
from intarsia.layout import region_numel

# Equal shares can be gathered by the fastest collective; so much padding (in parts of the whole) is worth it.
EQUAL_SHARES = 0.01


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of member number `member` and where its elements begin in the rank-major buffer."""

    member: int
    box: Box
    offset: int


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Where everything of some members lies; all numbers are elements.

    `regions[r][m]` are rank r's boxes of member m in its own index space, `offsets[r][m]` where they begin in rank r's shard of `counts[r]` elements.
    `starts[m]` is where member m begins in the rank-major buffer if it is contiguous there, else None; then `copies[m]` is where it lies in the buffer of
    `copied` elements for those that are not.
    """

    shapes: tuple[tuple[int, ...], ...]
    regions: tuple[tuple[Region, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    starts: tuple[int | None, ...]
    copies: tuple[int | None, ...]
    copied: int

    @property
    def total(self) -> int:
        """Elements of the rank-major buffer."""
        return sum(self.counts)

    @property
    def elements(self) -> int:
        """Elements of all members, without padding."""
        return sum(map(math.prod, self.shapes))

    @property
    def is_bare(self) -> bool:
        """Whether the rank-major buffer is one member as it is, and nothing else."""
        return len(self.shapes) == 1 and self.starts[0] == 0 and self.total == self.elements

    def pieces(self, member: int) -> list[Piece]:
        """All ranks' boxes of a member."""
        found, base = [], 0
        for regions, offsets, count in zip(self.regions, self.offsets, self.counts, strict=True):
            position = base + offsets[member]
            for box in regions[member]:
                found.append(Piece(member, box, position))
                position += box.numel
            base += count
        return found

    def facts(self) -> list[object]:
        """What ranks compare: sizes and places, and the boxes themselves as a digest of them, as JSON."""
        boxes = hashlib.sha256(repr([[[(box.start, box.size) for box in region] for region in row] for row in self.regions]).encode())
        return [list(self.counts), [list(map(list, row)) for row in (self.shapes, self.offsets)], list(self.starts), boxes.hexdigest()]


def make_geometry(shapes: Sequence[Sequence[int]], regions: Sequence[Sequence[Region]], alignment: int) -> Geometry:
    """The geometry for `regions[r][m]`. Members begin at multiples of `alignment` elements of the rank-major buffer, wherever a rank's part does not
    continue what the rank before has begun."""
    shapes = [tuple(shape) for shape in shapes]
    ranges = [[linear_range(region, shape) for region, shape in zip(row, shapes, strict=True)] for row in regions]
    bridges = bridges_of(regions, ranges)
    offsets, counts, base = [], [], 0
    for rank, row in enumerate(regions):
        position, mine = base, []
        for member, region in enumerate(row):
            if region and bridges[rank] != member:
                position = _aligned(position, alignment)
            mine.append(position - base)
            position += region_numel(region)
        if not _is_bridged(bridges, rank):
            position = base + _aligned(position - base, alignment)
        offsets.append(tuple(mine))
        counts.append(position - base)
        base = position
    counts = _equal(counts, bridges)
    starts = [_start(member, shape, ranges, offsets, counts) for member, shape in enumerate(shapes)]
    copies: list[int | None] = []
    copied = 0
    for start, shape in zip(starts, shapes, strict=True):
        copies.append(copied if start is None else None)
        copied += _aligned(math.prod(shape), alignment) if start is None else 0
    return Geometry(
        tuple(map(tuple, shapes)), tuple(map(tuple, regions)), tuple(offsets), tuple(counts), tuple(starts), tuple(copies), copied
    )


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def linear_range(region: Region, shape: Sequence[int]) -> tuple[int, int] | None:
    """(begin, end) of a region that is a range of the row-major tensor; None for one that is not, and for an empty one."""
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    begin = end = -1
    for box in region:
        cut = [dimension for dimension, (size, whole) in enumerate(zip(box.size, shape, strict=True)) if size != whole]
        if cut and any(size > 1 for size in box.size[: cut[-1]]):
            return None
        first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
        if end not in (-1, first):
            return None
        begin, end = (first if begin < 0 else begin), first + box.numel
    return (begin, end) if region else None


def bridges_of(regions: Sequence[Sequence[Region]], ranges: Sequence[Sequence[tuple[int, int] | None]]) -> list[int | None]:
    """For each rank the member that goes on there from where the last rank with anything has left it; None where nothing does."""
    found: list[int | None] = []
    last: tuple[int, int] | None = None
    for row, spans in zip(regions, ranges, strict=True):
        held = [member for member, region in enumerate(row) if region]
        bridge = None
        if held and last is not None and held[0] == last[0]:
            span = spans[held[0]]
            bridge = held[0] if span is not None and span[0] == last[1] else None
        found.append(bridge)
        if held:
            span = spans[held[-1]]
            last = (held[-1], span[1]) if span is not None else None
    for rank in reversed(range(len(found) - 1)):  # Through a rank without anything a member goes on as well.
        if not any(regions[rank]):
            found[rank] = found[rank + 1]
    return found


def _is_bridged(bridges: Sequence[int | None], rank: int) -> bool:
    """Whether something goes on after `rank`, so that nothing may stand between."""
    return rank + 1 < len(bridges) and bridges[rank + 1] is not None


def _equal(counts: list[int], bridges: Sequence[int | None]) -> list[int]:
    """The counts, all as large as the largest where that costs little and separates nothing."""
    wanted = max(counts, default=0)
    short = [rank for rank, count in enumerate(counts) if count < wanted]
    padding = sum(wanted - counts[rank] for rank in short)
    if any(_is_bridged(bridges, rank) for rank in short) or padding > EQUAL_SHARES * sum(counts):
        return counts
    return [wanted] * len(counts)


def _start(
    member: int,
    shape: Sequence[int],
    ranges: Sequence[Sequence[tuple[int, int] | None]],
    offsets: Sequence[Sequence[int]],
    counts: Sequence[int],
) -> int | None:
    """Where a member begins in the rank-major buffer; None unless it is contiguous there."""
    numel = math.prod(shape)
    if not numel:
        return 0
    base, start, reached = 0, None, 0
    for spans, row, count in zip(ranges, offsets, counts, strict=True):
        span = spans[member]
        if span is not None:
            position = base + row[member]
            start = position if start is None else start
            if span[0] != reached or position != start + span[0]:
                return None
            reached = span[1]
        base += count
    return start if reached == numel else None
