"""Batches from samples: segments packed into rows, with all that the loss needs beside each label. A pure function: every data rank packs alike and takes its rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from intarsia.contracts import IGNORE, Batch
from intarsia_data.batches import Row, padding_of, stack

from intarsia_rl.contracts import Sample, Segment
from intarsia_rl.controller.rollout import POLICY
from intarsia_rl.media import prepared

if TYPE_CHECKING:
    from intarsia_multimodal.contracts import Slot
    from intarsia_multimodal.decoding import Decoder


@dataclasses.dataclass(frozen=True)
class Weighed:
    """A sample to train on: its advantage, each trained token's weight, and what it adds to the divisor."""

    sample: Sample
    advantage: float
    weight: float
    count: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Segment `place` of a sample and, for each of its tokens, the values that belong to it as a label."""

    number: int
    place: int
    segment: Segment
    weighed: Weighed
    reference: tuple[float, ...] | None
    audit: tuple[float, ...] | None
    count: int

    def __len__(self) -> int:
        return len(self.segment.tokens)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Sizes of rows, and what is in them. With a `decoder` batches have what a model sees, be it nothing."""

    row: int
    micro_batch: int
    pad_id: int
    reference: bool = False
    routes: bool = False
    decoder: Decoder | None = None


def pieces_of(samples: Sequence[Weighed]) -> list[Piece]:
    """The segments that are trained on, in order. A sample's count belongs to the first of them."""
    found: list[Piece] = []
    for weighed in samples:
        count, sample = weighed.count, weighed.sample
        for place, segment in enumerate(sample.segments):
            if segment.actor != POLICY or True not in segment.trained[1:]:
                continue
            reference, audit = (
                None if scores is None else scores[place] for scores in (sample.reference_log_probs, sample.audit_log_probs)
            )
            found.append(Piece(len(found), place, segment, weighed, reference, audit, count))
            count = 0
    return found


def rows_of(pieces: Sequence[Piece], size: int) -> list[list[Piece]]:
    """Rows of at most `size` tokens: the longest first, each into the first row that has room. Rows are ordered by their first piece, pieces within a row by number."""
    rows: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: (-len(piece), piece.number)):
        if len(piece) > size:
            raise AssertionError(f"segment of {len(piece)} tokens in sample {piece.weighed.sample.id} is longer than a row of {size}")
        place = next((place for place, left in enumerate(room) if left >= len(piece)), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(size)
        rows[place].append(piece)
        room[place] -= len(piece)
    ordered = [sorted(row, key=lambda piece: piece.number) for row in rows]
    return sorted(ordered, key=lambda row: row[0].number)


def micro_batches(samples: Sequence[Weighed], packing: Packing, rank: int, ranks: int, version: int) -> list[Batch]:
    """This rank's micro-batches of one step. Each rank has the same number of them, at least one; a rank without rows gets rows of padding."""
    pieces = pieces_of(samples)
    rows = rows_of(pieces, packing.row)
    # With it the loss makes means over trained tokens of sums that core divides by the count.
    per_token = sum(piece.count for piece in pieces) / max(1, sum(sum(piece.segment.trained[1:]) for piece in pieces))
    numbers = {"version": version, "per_token": per_token}
    start, stop = (len(rows) * edge // ranks for edge in (rank, rank + 1))
    mine = rows[start:stop]
    number = max(1, math.ceil(math.ceil(len(rows) / ranks) / packing.micro_batch))
    edges = [len(mine) * each // number for each in range(number + 1)]
    shape = routes_shape(rows) if packing.routes else None
    return [_stack(mine[edges[each] : edges[each + 1]] or [[]], packing, numbers, shape) for each in range(number)]


def routes_shape(rows: Sequence[Sequence[Piece]]) -> tuple[int, int] | None:
    """(MoE layers, K) of the step's routes; None where there are none: samples of an evaluation come without."""
    shapes = {piece.segment.routes.shape[1:] for row in rows for piece in row if piece.segment.routes is not None}
    if len(shapes) > 1:
        raise AssertionError(f"routes of several shapes in one step: {sorted(shapes)}")
    return next(iter(shapes), None)


def _stack(rows: Sequence[Sequence[Piece]], packing: Packing, numbers: Mapping[str, float], routes: tuple[int, int] | None) -> Batch:
    """The rows as one Batch; what is left of a row is padding, a document of its own."""
    size, count = packing.row, len(rows)
    beside = {name: numpy.zeros((count, size), numpy.float32) for name in ("old_log_probs_BS", "advantages_BS", "weights_BS")}
    versions = numpy.full((count, size), -1, numpy.int32)
    audit = numpy.full((count, size), numpy.nan, numpy.float32)
    reference = numpy.zeros((count, size), numpy.float32)
    choices = None if routes is None else numpy.full((count, size, *routes), -1, numpy.int16)
    made: list[Row] = []
    places: list[tuple[tuple[str, int], ...]] = []
    for row, pieces in enumerate(rows):
        tokens, labels = numpy.full(size, packing.pad_id, numpy.int64), numpy.full(size, IGNORE, numpy.int64)
        at = 0
        for piece in pieces:
            segment, end = piece.segment, at + len(piece)
            tokens[at:end] = segment.tokens
            # Labels are one place ahead: what is said of token t stands beside the input t - 1.
            trained = numpy.array(segment.trained[1:], bool)
            place = at + numpy.flatnonzero(trained)
            labels[place] = numpy.array(segment.tokens[1:])[trained]
            beside["old_log_probs_BS"][row, place] = numpy.array(segment.log_probs[1:], numpy.float32)[trained]
            beside["advantages_BS"][row, place] = piece.weighed.advantage
            beside["weights_BS"][row, place] = piece.weighed.weight
            versions[row, place] = numpy.array(segment.versions[1:], numpy.int32)[trained]
            for into, values in ((reference, piece.reference), (audit, piece.audit)):
                if values is not None:
                    into[row, place] = numpy.array(values[1:], numpy.float32)[trained]
            if choices is not None and segment.routes is not None:
                chosen = numpy.frombuffer(segment.routes.data, "<i2").reshape(segment.routes.shape)
                choices[row, at : at + len(chosen)] = chosen
            at = end
        lengths = [len(piece) for piece in pieces] + ([size - at] if at < size else [])
        made.append(Row(tokens, labels, numpy.array(lengths), 0, pieces[0].number if pieces else -1, size - at))
        places.append(tuple((piece.weighed.sample.id, piece.place) for piece in pieces))
    extra = {**{name: torch.from_numpy(values) for name, values in beside.items()}, "versions_BS": torch.from_numpy(versions)}
    extra["audit_log_probs_BS"] = torch.from_numpy(audit)
    if packing.reference:
        extra["reference_log_probs_BS"] = torch.from_numpy(reference)
    if choices is not None:
        extra["routes_BSLK"] = torch.from_numpy(choices)
    counted = sum(piece.count for pieces in rows for piece in pieces)
    batch = stack(made, size)
    if packing.decoder is not None:
        extra |= shown(rows, batch.positions_BS, packing.decoder)
    return dataclasses.replace(batch, extra={**extra, **padding_of(made, size), **numbers, "pieces": tuple(places), "count": counted})


def shown(rows: Sequence[Sequence[Piece]], positions_BS: torch.Tensor, decoder: Decoder) -> dict[str, Any]:
    """What a model sees of these rows, by the names of `Batch.extra`: `positions_3BS`, `visual_BS`, `patches_NC` (what makes them, when a model looks at them; no rows where nothing is shown, so that all ranks
    run the tower) and `grids`."""
    positions_3BS = positions_BS.expand(3, *positions_BS.shape).clone()
    visual_BS = torch.full_like(positions_BS, -1)
    slots: list[Slot] = []
    features = 0
    for row, pieces in enumerate(rows):
        at = 0
        for piece in pieces:
            here = slice(at, at + len(piece))
            if piece.segment.media:
                found = prepared(piece.segment.tokens, piece.segment.media, decoder.processor)
                positions_3BS[:, row, here] = torch.from_numpy(found.positions_3N)
                visual_BS[row, here] = torch.from_numpy(found.visual(features))
                features += found.features
                slots += found.media
            at = here.stop
    return {
        "positions_3BS": positions_3BS,
        "visual_BS": visual_BS,
        "patches_NC": functools.partial(patches_of, slots, decoder),
        "grids": tuple(slot.grid for slot in slots),
    }


def patches_of(slots: Sequence[Slot], decoder: Decoder) -> torch.Tensor:
    """The patches of media, one behind the other, float32 [N, C]. Errors: MediaError."""
    nothing = numpy.zeros((0, decoder.processor.patch_values), numpy.float32)
    loaded = [decoder.load(slot) for slot in slots]
    return torch.from_numpy(numpy.concatenate([nothing, *(each.patches_NC for each in loaded)]))
