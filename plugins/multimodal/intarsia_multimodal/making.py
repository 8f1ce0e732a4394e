"""A row of tokens, labels, positions and patches from documents. Torch-free: worker processes do it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy
from intarsia.contracts import IGNORE, DataSource
from intarsia.errors import PluginError
from intarsia_data.store import document_named

from intarsia_multimodal.contracts import MediaError, Prepared, Processor
from intarsia_multimodal.decoding import Decoder
from intarsia_multimodal.index import stop


class Piece(NamedTuple):
    """A document in a row: numbers of its source and of itself, and how many tokens and patches of it the plan takes."""

    source: int
    document: int
    length: int
    patches: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row before it is stacked: S tokens, labels, numbers of visual features (-1: none) and three positions, all int64; patches float32 [N, C] with the grids of their
    media; lengths of documents that sum to S; bytes that the labels stand for (None: not known); what is wrong with documents that are padding instead.
    `padding_S` (bool) are the tokens that only fill it."""

    tokens_S: numpy.ndarray
    labels_S: numpy.ndarray
    visual_S: numpy.ndarray
    positions_3S: numpy.ndarray
    padding_S: numpy.ndarray
    patches_NC: numpy.ndarray
    grids: tuple[tuple[int, int, int], ...]
    lengths: tuple[int, ...]
    bytes: int | None
    bad: tuple[str, ...] = ()


class RowMaker:
    """Makes rows of `size` tokens from pieces of sources. `decoder` makes equal media patches once."""

    def __init__(
        self, sources: Sequence[DataSource], names: Sequence[str], processor: Processor, size: int, pad_id: int, byte_lengths: Sequence[int] | None, bad_media: str
    ):  # fmt: skip
        self._sources, self._names, self.processor = sources, names, processor
        self.decoder = Decoder(processor)
        self._size, self._pad_id, self._bad_media = size, pad_id, bad_media
        self._byte_lengths = None if byte_lengths is None else numpy.asarray(byte_lengths, dtype=numpy.int64)

    def make(self, pieces: Sequence[Piece], decode: bool = True) -> Row:
        """A row of documents; what is left of it is padding, as a document of its own. Without any it is a row that counts for nothing, for a rank that has no sample. Without `decode` it has no
        patches, and what only shows in decoding is not found.

        With `bad_media` "skip" a document whose media cannot be decoded is padding of the same length, so that the plan stays as it is. Errors: MediaError with "stop";
        PluginError for a document that is another one than when the plan was made.
        """
        tokens, labels, visual = (numpy.full(self._size, value, numpy.int64) for value in (self._pad_id, IGNORE, -1))
        positions, padding = numpy.empty((3, self._size), numpy.int64), numpy.ones(self._size, bool)
        loaded: list[numpy.ndarray] = []
        grids: list[tuple[int, int, int]] = []
        lengths, bad, at, features = [], [], 0, 0
        for piece in pieces:
            here = slice(at, at + piece.length)
            positions[:, here] = numpy.arange(piece.length)
            try:
                prepared, patches = self._read(piece, decode)
            except MediaError as error:
                if self._bad_media == "stop":
                    raise stop(self._names[piece.source], piece.document, str(error)) from error
                bad.append(f"{self._names[piece.source]}: document {piece.document}: {error}")
            else:
                tokens[here], positions[:, here], padding[here] = prepared.tokens_N, prepared.positions_3N, False
                follows = prepared.trained_N[1:]
                labels[at : at + piece.length - 1][follows] = prepared.tokens_N[1:][follows]
                visual[here] = prepared.visual(features)
                features += prepared.features
                grids += [slot.grid for slot in prepared.media]
                loaded += patches
            lengths.append(piece.length)
            at += piece.length
        positions[:, at:] = numpy.arange(self._size - at)
        size_bytes = None if self._byte_lengths is None else int(self._byte_lengths[labels[labels != IGNORE]].sum())
        stacked = numpy.concatenate(loaded) if loaded else numpy.empty((0, self.processor.patch_values), numpy.float32)
        lengths += [self._size - at] if at < self._size else []
        return Row(tokens, labels, visual, positions, padding, stacked, tuple(grids), tuple(lengths), size_bytes, tuple(bad))

    def _read(self, piece: Piece, decode: bool) -> tuple[Prepared, list[numpy.ndarray]]:
        """A document's tokens and the patches of each of its media (none without `decode`), as far as the plan takes it."""
        name = self._names[piece.source]
        with document_named(name, piece.document, "cannot be read", but=(MediaError,)):
            prepared = self.processor.prepare(self._sources[piece.source][piece.document]).cut(piece.length)
            found = len(prepared.tokens_N), sum(slot.patches for slot in prepared.media)
            if found != (piece.length, piece.patches):
                raise PluginError(
                    f"it has {found[0]} tokens and {found[1]} patches, and had {piece.length} and {piece.patches} when its index was made: the data has changed since. Where a file that it names was replaced, touch the source's own files, or remove its folder in data.cache, and begin a new run"
                )
            slots = prepared.media if decode else ()
            loaded = [self.decoder.load(slot).patches_NC for slot in slots]
        for slot, patches in zip(slots, loaded, strict=True):
            if patches.shape != (slot.patches, self.processor.patch_values) or patches.dtype != numpy.float32:
                raise PluginError(
                    f"{name}: document {piece.document}: the processor gives {patches.dtype} {list(patches.shape)} for a grid of {slot.grid}; float32 "
                    f"[{slot.patches}, {self.processor.patch_values}] was promised."
                )
        return prepared, loaded
