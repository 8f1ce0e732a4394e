"""The index: how many tokens and patches each document of a source has, from headers alone, kept beside the token stores.

A folder named by the fingerprints of source, tokenizer and processor:

    facts.json      documents, media, digest of the tokens and grids
    lengths.bin     int64, documents: tokens
    bytes.bin       int64, documents: bytes of UTF-8
    offsets.bin     int64, documents + 1: where each document's media begin in media.bin
    media.bin       int64, [media, 3]: first token of its block, the token behind it, patches
    bad.json        numbers of the documents with a medium that cannot be used, each with the reason
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
from intarsia.contracts import DataSource, Tokenizer
from intarsia.errors import UsageError
from intarsia_data.store import document_named, mapped, open_kept

from intarsia_multimodal.contracts import MediaError, Processor

FORMAT = 1
DOCUMENTS_AT_ONCE = 64
REPORT_EVERY_S = 30.0
log = logging.getLogger("intarsia_multimodal")

Record = dict[str, Any]
"""Of one document: `length`, `bytes`, `media` ([at, stop, patches] each) and `digest`; or `bad`, the reason why its media cannot be used. JSON."""


class MediaIndex:
    """An opened index. Arrays are read-only, on the files: `lengths` and `document_bytes` [documents], `offsets` [documents + 1], `media` [media, 3]."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.facts = json.loads((folder / "facts.json").read_text())
        self.documents, self.digest = self.facts["documents"], self.facts["digest"]
        self.lengths = mapped(folder / "lengths.bin", "int64", self.documents)
        self.document_bytes = mapped(folder / "bytes.bin", "int64", self.documents)
        self.offsets = mapped(folder / "offsets.bin", "int64", self.documents + 1)
        self.media = mapped(folder / "media.bin", "int64", 3 * self.facts["media"]).reshape(-1, 3)
        self.bad: list[tuple[int, str]] = [(number, reason) for number, reason in json.loads((folder / "bad.json").read_text())]

    def mended(self) -> str:
        """What is to be done where bad media have been mended: they are not looked at again, so that all ranks and all resumed runs leave the same documents out."""
        return f"Where they have been mended since, remove {self.folder} to have them looked at again."

    def patches(self) -> numpy.ndarray:
        """Patches of each document, int64."""
        sums = numpy.concatenate([[0], numpy.cumsum(self.media[:, 2])])
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]


def open_index(
    source: DataSource, tokenizer: Tokenizer, processor: Processor, name: str, cache: Path, bad_media: str,
    prepare: Callable[[list[range]], Iterable[list[Record]]] | None = None, limits: str = "",
) -> MediaIndex:  # fmt: skip
    """The index of `source` under `cache`, built if need be. `prepare` gives the records of ranges of documents, in order; none: this process makes them.
    An index belongs to the policy `bad_media` and to the `limits` of what may be read, too, since both decide what is in it.

    Errors: MediaError for a medium that cannot be used, with `bad_media` "stop"; UsageError for documents that are wrong.
    """
    key = [
        "media",
        FORMAT,
        type(source).__qualname__,
        source.fingerprint(),
        tokenizer.fingerprint(),
        tokenizer.vocab_size,
        type(processor).__qualname__,
        processor.fingerprint(),
        bad_media,
        limits,
    ]

    def build(folder: Path) -> None:
        ranges = [range(first, min(first + DOCUMENTS_AT_ONCE, len(source))) for first in range(0, len(source), DOCUMENTS_AT_ONCE)]
        found = prepare(ranges) if prepare else (records_of(source, processor, name, each, bad_media) for each in ranges)
        write(folder, name, len(source), found)

    return open_kept(cache, json.dumps(key), build, MediaIndex, name)


def write(folder: Path, name: str, count: int, found: Iterable[list[Record]]) -> None:
    """The files of an index from the records of all documents, in order."""
    digest, reported = hashlib.blake2b(digest_size=16), time.monotonic()
    lengths: list[int] = []
    sizes: list[int] = []
    offsets: list[int] = [0]
    media: list[list[int]] = []
    bad: list[tuple[int, str]] = []
    for records in found:
        for record in records:
            if "bad" in record:
                bad.append((len(lengths), record["bad"]))
            digest.update(record.get("digest", "bad").encode())
            lengths.append(record.get("length", 0))
            sizes.append(record.get("bytes", 0))
            media += record.get("media", [])
            offsets.append(len(media))
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            log.info("%s: prepared %d of %d documents", name, len(lengths), count)
    for file, values in (("lengths", lengths), ("bytes", sizes), ("offsets", offsets), ("media", media)):
        numpy.array(values, dtype=numpy.int64).tofile(folder / f"{file}.bin")
    (folder / "bad.json").write_text(json.dumps(bad))
    (folder / "facts.json").write_text(json.dumps({"documents": len(lengths), "media": len(media), "digest": digest.hexdigest()}))


def records_of(source: DataSource, processor: Processor, name: str, numbers: Sequence[int], bad_media: str) -> list[Record]:
    """The records of documents. Errors as in `open_index`."""
    return [record_of(source, processor, name, number, bad_media) for number in numbers]


def record_of(source: DataSource, processor: Processor, name: str, number: int, bad_media: str) -> Record:
    """The record of one document. Errors as in `open_index`."""
    try:
        with document_named(name, number, "cannot be prepared", but=(MediaError,)):
            # A source that makes its media may know their sizes without making them.
            prepared = processor.prepare(getattr(source, "outline", source.__getitem__)(number))
    except MediaError as error:
        if bad_media == "stop":
            raise stop(name, number, str(error)) from error
        return {"bad": str(error)}
    digest = hashlib.blake2b(digest_size=16)
    for array in (prepared.tokens_N, prepared.trained_N.astype(numpy.uint8)):
        digest.update(numpy.ascontiguousarray(array).data)
    digest.update(repr([(slot.grid, slot.frames) for slot in prepared.media]).encode())
    media = [[slot.at, slot.stop, slot.patches] for slot in prepared.media]
    return {"length": len(prepared.tokens_N), "bytes": prepared.text_bytes, "media": media, "digest": digest.hexdigest()}


def stop(name: str, number: int, reason: str) -> MediaError:
    """The error of the policy "stop"."""
    return MediaError(
        f"{name}: document {number} has a medium that cannot be used: {reason}. Mend or leave out the document, or set data.loader.bad_media=skip to leave out all "
        "such documents, counted and named."
    )


def fit(index: MediaIndex, row: int, budget: int, too_long: str, name: str) -> tuple[numpy.ndarray, numpy.ndarray, int]:
    """(tokens that are taken of each document, patches in these, how many documents are too long), for rows of `row` tokens and `budget` patches.

    A document that is too long is cut before the first medium that does not fit, or, where all do, at `row` tokens; with "skip" nothing of it is taken.
    Errors: UsageError with "stop".
    """
    lengths, patches = index.lengths.copy(), index.patches()
    numbers = numpy.flatnonzero((lengths > row) | (patches > budget))
    for number in numbers.tolist():
        if too_long == "stop":
            raise UsageError(
                f"{name}: document {number} has {lengths[number]} tokens and {patches[number]} patches, and a row takes train.sequence_length={row} tokens and "
                f"data.loader.patches={budget} patches. {len(numbers)} documents are too long: raise these, or set data.loader.too_long to truncate or skip."
            )
        lengths[number], patches[number] = cut_of(index, number, row, budget) if too_long == "truncate" else (0, 0)
    return lengths, patches, len(numbers)


def cut_of(index: MediaIndex, number: int, row: int, budget: int) -> tuple[int, int]:
    """(tokens, patches) that are taken of a document that is too long."""
    taken = 0
    for at, behind, patches in index.media[index.offsets[number] : index.offsets[number + 1]].tolist():
        if behind > row or taken + patches > budget:
            return min(at, row), taken
        taken += patches
    return min(int(index.lengths[number]), row), taken


def cut_media(index: MediaIndex, lengths: numpy.ndarray) -> int:
    """How many images and videos are not in what `fit` takes of the documents."""
    short = numpy.flatnonzero(lengths < index.lengths).tolist()
    return sum(int((index.media[index.offsets[number] : index.offsets[number + 1], 1] > lengths[number]).sum()) for number in short)
