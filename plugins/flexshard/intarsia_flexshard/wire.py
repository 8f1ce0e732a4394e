"""Where the bytes of a quantised bucket lie in what each rank sends, and in the whole that a gather makes of it. Pure integers, torch-free.

A matrix (or a stack of matrices) with a tile travels as two items: its payload, one byte for each element, and its scales, four for each tile. Anything else travels
as one item, its values in the compute dtype. All of a rank's items are in one buffer of bytes, sent as it is.

Payloads stand in member order. A matrix that goes on in the next rank ends this rank's bytes and begins the next one's, so that the whole payload is a view of what was
gathered; scales and values, and what padding makes ranks' shares equal, therefore stand in one *gap*: where a payload that came from the rank before has ended, else in front.
Where a matrix runs through a whole rank its bytes do not adjoin, and are copied together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from intarsia.contracts import ALIGNMENT_BYTES, Box, Region
from intarsia.errors import PluginError, UsageError, did_you_mean
from intarsia.layout import region_numel

from intarsia_flexshard.plan import EQUAL_SHARES, Geometry, bridges_of, linear_range

SCALES = ("float32", "power_of_two")
SCALE_BYTES = 4
# Where scales and values begin: what the widest load of one thread wants.
SMALL_ALIGNMENT = 16

Kind = Literal["payload", "scales", "values"]
# In the order of a rank's shard: where values begin there (elements), where payload and scales begin on the wire (bytes, scales), rows and columns.
QuantisedBox = tuple[int, int, int, int, int]


def check_quantisation(tile: Sequence[int], scales: str) -> None:
    """Raise UsageError for a tile or a kind of scales that means nothing."""
    if len(tile) != 2 or any(size < 1 for size in tile):
        raise UsageError(
            f"sharder.tile must be two sizes of at least 1, such as (128, 128), not {tuple(tile)}: a scale belongs to a block of a matrix."
        )
    if scales not in SCALES:
        raise UsageError(f"sharder.scales is {scales!r}. {did_you_mean(scales, SCALES)}")


def tile_of(shape: Sequence[int], tile: tuple[int, int]) -> tuple[int, ...] | None:
    """`Member.tile` of a parameter of a quantised bucket: matrices and stacks of matrices have one, anything else travels as it is."""
    return {2: tile, 3: (1, *tile)}.get(len(shape))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box in an item's own index space, and where its elements, row-major, begin in the gathered bytes."""

    box: Box
    offset: int


@dataclasses.dataclass(frozen=True)
class Item:
    """One whole tensor that travels in pieces, in rank order. `start` is where it begins in the gathered bytes if its elements stand there in row-major order, else None."""

    member: int
    kind: Kind
    shape: tuple[int, ...]
    width: int
    pieces: tuple[Piece, ...]
    start: int | None

    @property
    def bytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.width


@dataclasses.dataclass(frozen=True)
class Wire:
    """The bytes of a bucket. `counts` are what each rank sends, multiples of 128; `boxes[r]` is what rank r quantises."""

    counts: tuple[int, ...]
    items: tuple[Item, ...]
    boxes: tuple[tuple[QuantisedBox, ...], ...]

    def item(self, member: int, kind: Kind) -> Item:
        """The item of a member."""
        return next(item for item in self.items if (item.member, item.kind) == (member, kind))

    def facts(self) -> list[object]:
        """What ranks compare, as JSON."""
        return [list(self.counts), [[item.member, item.kind, list(item.shape), item.width, item.start] for item in self.items]]


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Where a rank has what it received. `stays`: in the gathered bytes themselves, out of which what does not adjoin there is `copied`; else all of it is, and the gathered
    bytes lie in memory that others use as well. `whole` are the bytes of all that stays, ordinary parameters that were dequantised included; `staged` those of the shared memory."""

    stays: bool
    copied: tuple[Item, ...]
    whole: int
    staged: int


def plan_arrival(layout: Wire, read: Sequence[bool], width: int) -> Arrival:
    """`read[m]`: whether every reader of member m takes it as float8. `width` is the compute dtype's bytes."""
    total = sum(layout.counts)
    lasting = [item for item in layout.items if item.kind == "values" or read[item.member]]
    adjoining = [item for item in lasting if item.start is not None]
    # What arrived stays where most of it is read there.
    stays = 2 * sum(item.bytes for item in adjoining) > total
    copied = tuple(item for item in lasting if not (stays and item.start is not None))
    sizes = [item.bytes for item in copied]
    sizes += [math.prod(item.shape) * width for item in layout.items if item.kind == "payload" and not read[item.member]]
    whole = (total if stays else 0) + sum(aligned(size) for size in sizes)
    return Arrival(stays, copied, whole, 0 if stays else total)


def aligned(size: int) -> int:
    """At least `size` bytes, so that what comes after begins where every kernel likes it."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclasses.dataclass
class _Rank:
    """One rank's bytes, as they are laid out. `placed` has (member, kind) -> where it begins, from the rank's own beginning."""

    placed: dict[tuple[int, Kind], int] = dataclasses.field(default_factory=dict)
    count: int = 0

    def place(self, member: int, kind: Kind, size: int) -> None:
        self.placed[member, kind] = self.count
        self.count += size

    def align(self, to: int = ALIGNMENT_BYTES) -> None:
        self.count = -(-self.count // to) * to


def make_wire(geometry: Geometry, tiles: Sequence[tuple[int, ...] | None], width: int) -> Wire:
    """The bytes for members of which those with a tile are quantised; `width` is the compute dtype's bytes. Raises PluginError where a placement has cut a tile."""
    grids = [
        [_on_grid(region, shape, tile) for region, shape, tile in zip(row, geometry.shapes, tiles, strict=True)] for row in geometry.regions
    ]
    matrices = [[region if tile else () for region, tile in zip(row, tiles, strict=True)] for row in geometry.regions]
    ranges = [[linear_range(region, shape) for region, shape in zip(row, geometry.shapes, strict=True)] for row in matrices]
    bridges = bridges_of(matrices, ranges)

    def ranks(gaps: Sequence[int]) -> list[_Rank]:
        rows = zip(geometry.regions, grids, bridges, gaps, strict=True)
        return [_lay_out(row, grid, tiles, width, bridge, gap) for row, grid, bridge, gap in rows]

    laid = ranks([0] * len(bridges))
    gaps = [max(rank.count for rank in laid) - rank.count for rank in laid]
    if sum(gaps) <= EQUAL_SHARES * sum(rank.count for rank in laid):
        laid = ranks(gaps)
    items = []
    for member, (shape, tile) in enumerate(zip(geometry.shapes, tiles, strict=True)):
        regions = [row[member] for row in geometry.regions]
        if tile is None:
            items.append(_item(member, "values", shape, width, regions, laid))
        else:
            items.append(_item(member, "payload", shape, 1, regions, laid))
            grid = tuple(-(-size // edge) for size, edge in zip(shape, tile, strict=True))
            items.append(_item(member, "scales", grid, SCALE_BYTES, [row[member] for row in grids], laid))
    boxes = [
        tuple(_quantised(row, offsets, grid, tiles, rank))
        for row, offsets, grid, rank in zip(geometry.regions, geometry.offsets, grids, laid, strict=True)
    ]
    return Wire(tuple(rank.count for rank in laid), tuple(items), tuple(boxes))


def _on_grid(region: Region, shape: Sequence[int], tile: Sequence[int] | None) -> Region:
    """The boxes of tiles that a region's boxes are."""
    found = []
    for box in region if tile else ():
        assert tile is not None
        for low, high, edge, whole in zip(box.start, box.end, tile, shape, strict=True):
            if low % edge or (high % edge and high != whole):
                raise PluginError(
                    f"A quantised member of shape {tuple(shape)} was cut at {box.start} .. {box.end}, inside a tile of {tuple(tile)}. A scale belongs to a whole tile: "
                    "use a placement whose boxes end at tiles' borders (row, flat, block, owned)."
                )
        start = tuple(low // edge for low, edge in zip(box.start, tile, strict=True))
        end = tuple(-(-high // edge) for high, edge in zip(box.end, tile, strict=True))
        found.append(Box(start, tuple(b - a for a, b in zip(start, end, strict=True))))
    return tuple(found)


def _lay_out(row: Sequence[Region], grid: Sequence[Region], tiles: Sequence[object], width: int, bridge: int | None, gap: int) -> _Rank:
    rank = _Rank()
    if bridge is not None:
        rank.place(bridge, "payload", region_numel(row[bridge]))
    rank.align()
    for member, (boxes, tile) in enumerate(zip(grid, tiles, strict=True)):
        if tile:
            rank.align(SMALL_ALIGNMENT)
            rank.place(member, "scales", region_numel(boxes) * SCALE_BYTES)
    for member, (region, tile) in enumerate(zip(row, tiles, strict=True)):
        if not tile:
            rank.align(SMALL_ALIGNMENT)
            rank.place(member, "values", region_numel(region) * width)
    rank.count += gap
    for member, (region, tile) in enumerate(zip(row, tiles, strict=True)):
        if tile and region and member != bridge:
            rank.align()
            rank.place(member, "payload", region_numel(region))
    rank.align()
    return rank


def _item(member: int, kind: Kind, shape: tuple[int, ...], width: int, regions: Sequence[Region], laid: Sequence[_Rank]) -> Item:
    pieces: list[Piece] = []
    base, start, reached, adjoin = 0, 0, 0, True
    for region, rank in zip(regions, laid, strict=True):
        span = linear_range(region, shape)
        position = base + rank.placed.get((member, kind), 0)
        if region:
            start = start if pieces else position
            adjoin = adjoin and span is not None and span[0] == reached and position == start + span[0] * width
            reached = span[1] if span is not None else -1
        for box in region:
            pieces.append(Piece(box, position))
            position += box.numel * width
        base += rank.count
    whole = adjoin and reached == math.prod(shape)
    return Item(member, kind, shape, width, tuple(pieces), start if whole else None)


def _quantised(
    row: Sequence[Region], offsets: Sequence[int], grid: Sequence[Region], tiles: Sequence[object], rank: _Rank
) -> list[QuantisedBox]:
    """What a rank quantises: its boxes, matrix by matrix."""
    found = []
    for member, (region, value, boxes, tile) in enumerate(zip(row, offsets, grid, tiles, strict=True)):
        if not tile or not region:
            continue
        payload, scale = rank.placed[member, "payload"], rank.placed[member, "scales"] // SCALE_BYTES
        for box, tiled in zip(region, boxes, strict=True):
            rows, columns = box.size[-2:]
            for _ in range(math.prod(box.size[:-2])):
                found.append((value, payload, scale, rows, columns))
                value, payload, scale = value + rows * columns, payload + rows * columns, scale + math.prod(tiled.size[-2:])
    return found
