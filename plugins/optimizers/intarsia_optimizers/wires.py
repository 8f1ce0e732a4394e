"""Updates that do a sharder's work beside their own: add what other ranks have sent, and quantise what the next gather sends. What a kernel has at hand need not be written and read again.

A sharder calls `step_quantising(factor, names, wires)` of an optimizer that has it instead of `step`. It returns the wires on which everything is written; the sharder quantises
the others. A wire is an object with these attributes (`intarsia_flexshard.quantised.WireViews` is one):

    values          the masters of a shard, 1-D; with split masters their high halves
    wire            1-D uint8, in which scales are float32 at multiples of 4
    boxes           (value, payload, scale, rows, columns) of each matrix: where it begins in `values`, where its payload and scales begin on the wire (bytes, float32)
    tile, power_of_two, dtype       what shares a scale, how it is rounded, and the dtype whose values are quantised; see `intarsia_float8.format`

If the optimizer's `takes_sums` is true, the sharder may give `step_quantising(factor, names, wires, sums)` gradients of split masters as contributions that have not been added,
instead of `.grad`. `sums` is an object with these attributes (`intarsia_flexshard.reduction.Sums` is one):

    parts           1-D tensors of one size, one for each rank, to be added in this order in float32
    scale           what the sum is multiplied by, a power of two: kernels may multiply and add in one
    begins          by parameter (those of `names`) where its gradient begins in each part
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from intarsia_optimizers.runs import Piece
from intarsia_optimizers.updates import Box, Gradient


class Wire(Protocol):
    """See the module's text."""

    values: Tensor
    wire: Tensor
    boxes: tuple[Box, ...]
    tile: tuple[int, int]
    power_of_two: bool
    dtype: torch.dtype


class Sums(Protocol):
    """See the module's text."""

    parts: Sequence[Tensor]
    scale: float
    begins: Mapping[nn.Parameter, int]


def gradient_in(sums: Sums, begin: int, size: int) -> Gradient:
    """`size` elements of the contributions, from `begin` on."""
    if size == sums.parts[0].numel():
        return sums.parts, sums.scale
    return [part[begin : begin + size] for part in sums.parts], sums.scale


@dataclasses.dataclass(frozen=True)
class Part:
    """What a wire quantises of a piece: boxes that begin at elements of the piece, and the places of members of which it quantises nothing."""

    boxes: tuple[Box, ...]
    others: tuple[int, ...]


def part_of(piece: Piece, wire: Wire) -> Part | None:
    """A wire's part of a piece; None: it has none."""
    value = piece.value
    if value.untyped_storage()._cdata != wire.values.untyped_storage()._cdata or value.dtype != wire.values.dtype:
        return None
    begin = int(value.storage_offset() - wire.values.storage_offset())
    boxes = tuple((box[0] - begin, *box[1:]) for box in wire.boxes if begin <= box[0] < begin + value.numel() and box[3] * box[4])
    if not boxes:
        return None
    starts = sorted(box[0] for box in boxes)
    others = []
    for place, (member, offset) in enumerate(zip(piece.members, piece.offsets, strict=True)):
        found = bisect.bisect_left(starts, offset)
        if found == len(starts) or starts[found] >= offset + member.value.numel():
            others.append(place)
    return Part(boxes, tuple(others))


def nothing_quantised(*arguments: object) -> bool:
    """What stands for a kernel of `adamw_quantised` where there is none."""
    return False
