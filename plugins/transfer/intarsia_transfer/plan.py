"""Moving a tensor from one layout to another: who sends which box to whom, and what is reduced. Pure integers, torch-free.

    plan = transfer(src, dst)
    plan.sends(rank)      what this rank hands out, for each destination in the order in which that destination expects it
    plan.receives(rank)   what this rank takes, in the order in which it must be applied

Ranks are row-major numbers over each layout's own axes; rank r of both layouts is the same process, and the meshes may differ in size.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, Literal

from intarsia.contracts.placement import Box, Region
from intarsia.errors import UsageError
from intarsia.layout import Layout, busiest_dimension, slices

MoveOp = Literal["copy", "sum", "max", "zero"]


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One box of data that goes from a rank to a rank. Stability: stable.

    `box` is global. In the source's local buffer it lies in `source_box`, which begins at element `source_offset`; likewise at the
    destination. `op` is what the destination does with it: `copy` overwrites, `sum` adds to and `max` takes the maximum with what is there. `zero` moves
    nothing (source and destination are the same rank) and clears the box. On the wire a box is its elements, row-major.
    """

    source: int
    destination: int
    op: MoveOp
    box: Box
    source_box: Box
    source_offset: int
    destination_box: Box
    destination_offset: int

    def source_view(self, buffer: Any) -> Any:
        """The box in the source's contiguous 1-D buffer (torch or numpy), as a view of the box's shape."""
        return _view(buffer, self.source_offset, self.source_box, self.box)

    def destination_view(self, buffer: Any) -> Any:
        """The box in the destination's contiguous 1-D buffer (torch or numpy), as a view of the box's shape."""
        return _view(buffer, self.destination_offset, self.destination_box, self.box)


def _view(buffer: Any, offset: int, holder: Box, box: Box) -> Any:
    return buffer[offset : offset + holder.numel].reshape(holder.size)[slices(box, holder.start)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A box of a piece and where it begins in the piece's storage."""

    piece: int
    offset: int
    box: Box


def _held(piece: int, region: Region) -> Iterator[_Held]:
    offset = 0
    for box in region:
        yield _Held(piece, offset, box)
        offset += box.numel


class _Index:
    """The boxes of a layout's pieces, sorted, so that those that meet a given box are found without trying all."""

    def __init__(self, layout: Layout) -> None:
        held = [entry for piece, region in enumerate(layout.regions) for entry in _held(piece, region)]
        self.dimension = busiest_dimension([entry.box for entry in held], len(layout.shape))
        self.held = held if not layout.shape else sorted(held, key=lambda entry: entry.box.start[self.dimension])
        self.starts = [entry.box.start[self.dimension] for entry in self.held] if layout.shape else []
        self.reach = list(itertools.accumulate((entry.box.end[self.dimension] for entry in self.held), max)) if layout.shape else []

    def meeting(self, box: Box) -> list[tuple[_Held, Box]]:
        """Every box that meets `box`, with what they have in common, ordered by piece and storage."""
        low, high = 0, len(self.held)
        if box.start:
            start = box.start[self.dimension]
            low, high = bisect_right(self.reach, start), bisect_left(self.starts, start + box.size[self.dimension])
        found = [(entry, common) for entry in self.held[low:high] if (common := entry.box.intersect(box)) is not None]
        return sorted(found, key=lambda pair: (pair[0].piece, pair[0].offset))


class Transfer:
    """The moves that turn `src` into `dst`. Made by `transfer`. Stability: stable.

    A rank that holds a valid copy of an element takes it from itself. Other ranks take it from the holder with their own replica number (counted
    modulo the number of replicas for ranks outside the source mesh), which spreads the load. Where a
    reduction is pending in `src` there is one move for each contribution, in ascending order of source, so that every destination gets the same bits. Where a sum is
    pending in `dst`, coordinate 0 gets the value and the others get zeros; where a maximum is, all get the value.
    """

    def __init__(self, src: Layout, dst: Layout) -> None:
        self.src, self.dst = src, dst
        self.ranks = max(src.ranks, dst.ranks)
        self._source_index, self._destination_index = _Index(src), _Index(dst)
        self._reduction: MoveOp = src.pending[0][1] if src.pending else "copy"  # type: ignore[assignment]
        self._replicas = math.prod(size for (_, size), kind in zip(src.axes, src.kinds, strict=True) if kind == "replicate")
        self._moves: dict[int, tuple[list[Move], list[Move]]] = {}
        self._sources: dict[tuple[int, int], list[int]] = {}
        for rank in range(src.ranks):
            key = (src.index_along(rank, "cut"), src.index_along(rank, "replicate"))
            self._sources.setdefault(key, []).append(rank)
        # Where a sum is pending in the destination, only its coordinate 0 takes data.
        takers = [rank for rank in range(dst.ranks) if not dst.index_along(rank, "sum")]
        self._takers: dict[int, list[int]] = {}
        for rank in takers:
            self._takers.setdefault(dst.index_along(rank, "cut"), []).append(rank)

    def _sources_for(self, piece: int, destination: int) -> list[int]:
        """The ranks, ascending, whose contributions make `piece` of the source for rank `destination`; one where nothing is pending."""
        inside = destination < self.src.ranks
        replica = self.src.index_along(destination, "replicate") if inside else destination % self._replicas
        return self._sources[piece, replica]

    def receives(self, rank: int) -> list[Move]:
        """What `rank` takes, from itself too, in the order in which it must be applied; [] for a rank outside the destination's mesh."""
        moves: list[Move] = []
        for target in _held(0, self.dst.local(rank)) if rank < self.dst.ranks else ():
            if self.dst.index_along(rank, "sum"):
                moves.append(Move(rank, rank, "zero", target.box, target.box, target.offset, target.box, target.offset))
                continue
            for origin, common in self._source_index.meeting(target.box):
                for number, source in enumerate(self._sources_for(origin.piece, rank)):
                    op = self._reduction if number else "copy"
                    moves.append(Move(source, rank, op, common, origin.box, origin.offset, target.box, target.offset))
        return moves

    def sends(self, rank: int) -> list[Move]:
        """What `rank` hands out, to itself too, by ascending destination and then in the order in which that destination takes it."""
        moves: list[Move] = []
        held = _held(self.src.index_along(rank, "cut"), self.src.local(rank)) if rank < self.src.ranks else ()
        for origin in held:
            for target, common in self._destination_index.meeting(origin.box):
                for destination in self._takers[target.piece]:
                    sources = self._sources_for(origin.piece, destination)
                    if rank in sources:
                        op = self._reduction if rank != sources[0] else "copy"
                        moves.append(Move(rank, destination, op, common, origin.box, origin.offset, target.box, target.offset))
        return sorted(moves, key=lambda move: (move.destination, move.destination_offset, move.source_offset))

    def moves(self, rank: int) -> tuple[list[Move], list[Move]]:
        """(sends, receives) of `rank`, worked out once: for plans that are run again and again."""
        if rank not in self._moves:
            self._moves[rank] = (self.sends(rank), self.receives(rank))
        return self._moves[rank]

    def counts(self, rank: int) -> tuple[list[int], list[int]]:
        """Elements that `rank` sends to and receives from each rank over the wire; 0 for itself."""
        sent, received = [0] * self.ranks, [0] * self.ranks
        for move in self.sends(rank):
            sent[move.destination] += move.box.numel * (move.destination != rank)
        for move in self.receives(rank):
            received[move.source] += move.box.numel * (move.source != rank)
        return sent, received


def transfer(src: Layout, dst: Layout) -> Transfer:
    """The plan that turns a tensor laid out as `src` into one laid out as `dst`. Raises UsageError unless their shapes are equal. Stability: stable."""
    if src.shape != dst.shape:
        raise UsageError(f"A tensor of shape {src.shape} cannot be moved into a layout of shape {dst.shape}.")
    return Transfer(src, dst)
