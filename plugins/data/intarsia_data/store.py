"""The token store: a source's documents, tokenised once, in memory-mapped files.

A store is a folder named by the fingerprints of source and tokenizer:

    facts.json     documents, tokens, dtype, digest of the content, whether there is a mask
    tokens.bin     all ids, documents one after the other (uint16 or uint32)
    offsets.bin    int64, documents + 1: where each document begins
    bytes.bin      int64, documents: bytes of UTF-8 that each document stands for
    trained.bin    uint8 for each id, only where a document has a mask

It is written aside and renamed, under a file lock that ends with its process: of several processes that want it, one builds and
the others wait. What a run resumes with is compared by the digest, so that a touched or moved file is no change and an edited one is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy
from intarsia.contracts import DataSource, Document, Tokenizer
from intarsia.errors import IntarsiaError, PluginError, UsageError

from intarsia_data.tokenizer import encode_parts, text_of

FORMAT = 1
DOCUMENTS_AT_ONCE = 256
REPORT_EVERY_S = 30.0
log = logging.getLogger("intarsia_data")
Store = TypeVar("Store")


class TokenStore:
    """An opened store. `tokens`, `offsets`, `document_bytes` and `trained` (or None) are read-only arrays on the files."""

    def __init__(self, folder: Path):
        self.facts = json.loads((folder / "facts.json").read_text())
        self.documents, self.token_count, self.digest = self.facts["documents"], self.facts["tokens"], self.facts["digest"]
        self.tokens = mapped(folder / "tokens.bin", self.facts["dtype"], self.token_count)
        self.offsets = mapped(folder / "offsets.bin", "int64", self.documents + 1)
        self.document_bytes = mapped(folder / "bytes.bin", "int64", self.documents)
        self.trained = mapped(folder / "trained.bin", "uint8", self.token_count) if self.facts["trained"] else None


def open_store(source: DataSource, tokenizer: Tokenizer, name: str, cache: Path, timeout_s: float = 6 * 3600.0) -> TokenStore:
    """The store of `source` under `cache`, built if need be; `name` says in messages which source it is.

    Errors: UsageError for a document that cannot be read or encoded (with its number), for a cache that cannot be written, and when
    another process that builds the same store is not done after `timeout_s` seconds.
    """
    key = json.dumps([FORMAT, type(source).__qualname__, source.fingerprint(), tokenizer.fingerprint(), tokenizer.vocab_size])
    return open_kept(cache, key, lambda folder: build(source, tokenizer, name, folder), TokenStore, name, timeout_s)


def open_kept(
    cache: Path, key: str, build: Callable[[Path], None], open_folder: Callable[[Path], Store], name: str, timeout_s: float = 6 * 3600.0
) -> Store:
    """What is kept under `cache` by `key`: built by `build(folder)` if need be, aside and under a lock, and then opened by `open_folder(folder)`, whose
    OSError, ValueError or KeyError means that it is missing or damaged and must be built anew.

    Errors: those of `build`, and UsageError for a cache that cannot be written and for another process that is not done in time. Stability: provisional.
    """
    folder = cache / hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    try:
        if (store := _opened(folder, open_folder)) is not None:
            return store
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock"), name, timeout_s):
            if (store := _opened(folder, open_folder)) is not None:
                return store
            aside = folder.with_suffix(".building")
            for leftover in (aside, folder):  # of a process that was killed, or damaged
                shutil.rmtree(leftover, ignore_errors=True)
            aside.mkdir()
            build(aside)
            for path in aside.iterdir():
                # Durable before the folder is renamed into place.
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
            aside.rename(folder)
        return open_folder(folder)
    except OSError as error:
        raise UsageError(
            f"{name}: its tokens cannot be kept in {cache}: {error}. Make room, or set data.cache to another folder."
        ) from error


def build(source: DataSource, tokenizer: Tokenizer, name: str, folder: Path) -> None:
    """Tokenise all of `source` into `folder`, which exists and is empty. Errors as in `open_store`."""
    dtype = numpy.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
    digest = hashlib.blake2b(digest_size=16)
    lengths: list[int] = []
    sizes: list[int] = []
    masked, count, reported = False, len(source), time.monotonic()
    with open(folder / "tokens.bin", "wb") as tokens, open(folder / "trained.bin", "wb") as trained:
        for first in range(0, count, DOCUMENTS_AT_ONCE):
            for ids, mask, size in tokenise(source, tokenizer, name, range(first, min(first + DOCUMENTS_AT_ONCE, count)), dtype):
                lengths.append(len(ids))
                sizes.append(size)
                masked = masked or not mask.all()
                for output, array in ((tokens, ids), (trained, mask)):
                    output.write(array.data)
                    digest.update(array.data)
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                log.info("%s: tokenised %d of %d documents", name, len(lengths), count)
    if not masked:
        (folder / "trained.bin").unlink()
    offsets = numpy.concatenate([[0], numpy.cumsum(lengths, dtype=numpy.int64)]).astype(numpy.int64)
    digest.update(offsets.data)
    offsets.tofile(folder / "offsets.bin")
    numpy.array(sizes, dtype=numpy.int64).tofile(folder / "bytes.bin")
    facts = {"documents": count, "tokens": int(offsets[-1]), "dtype": dtype.name, "digest": digest.hexdigest(), "trained": bool(masked)}
    (folder / "facts.json").write_text(json.dumps(facts))


Tokenised = tuple[numpy.ndarray, numpy.ndarray, int]


def tokenise(source: DataSource, tokenizer: Tokenizer, name: str, numbers: Sequence[int], dtype: numpy.dtype) -> Iterator[Tokenised]:
    """For each document number: its ids, their mask (uint8) and its bytes of text. bos and eos stand around it where the tokenizer has them.

    A document without any token stays empty. Text goes through the tokenizer's `encode_batch` where it has one.
    """
    documents = []
    for number in numbers:
        with document_named(name, number, "cannot be read"):
            documents.append(source[number])
    texts = {number: document.text for number, document in zip(numbers, documents, strict=True) if document.text is not None}
    encoded: dict[int, Any] = {}
    if hasattr(tokenizer, "encode_batch"):
        # One bad text must be named, so a failed batch is done again one by one below.
        with contextlib.suppress(Exception):
            encoded = dict(zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True))
    for number, document in zip(numbers, documents, strict=True):
        with document_named(name, number, "cannot be encoded"):
            raw, mask, text = (encoded[number], None, texts[number]) if number in encoded else _ids(document, tokenizer)
            array, whole = numpy.asarray(raw, dtype=numpy.int64), is_whole(document, tokenizer)
            ids, trained = framed(array, mask, tokenizer, frame_start=document.tokens is None, whole=whole)
            size = len(text.encode())
        yield ids.astype(dtype), trained, size


def _ids(document: Document, tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[bool] | None, str]:
    """Ids of one document, their mask (None where all are trained on), and the text that they stand for."""
    if document.text is not None:
        return tokenizer.encode(document.text), None, document.text
    if document.messages is not None:
        return *rendered(document, tokenizer), "".join(text_of(message.content) for message in document.messages)
    if document.tokens is not None:
        return document.tokens, document.trained, tokenizer.decode(document.tokens)
    if document.parts is not None:
        return encode_parts(document.parts, tokenizer.encode, tokenizer.vocab_size), None, text_of(document.parts)
    raise UsageError("it has neither text nor messages nor tokens nor parts")


def rendered(document: Document, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids and mask of a document's conversation. Stability: provisional."""
    messages = document.messages or ()
    # A tokenizer that was written before conversations had tools takes none.
    return tokenizer.render(messages, document.tools) if document.tools else tokenizer.render(messages)


def is_whole(document: Document, tokenizer: Tokenizer) -> bool:
    """Whether a document's ids begin and end as they should: those of a conversation that a chat template wrote. Stability: provisional."""
    return document.messages is not None and getattr(tokenizer, "frames_conversations", False)


def framed(
    ids: numpy.ndarray, mask: Sequence[bool] | None, tokenizer: Tokenizer, frame_start: bool, whole: bool = False
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Ids and mask (uint8) with bos before (not before given ids) and eos after; eos is trained on where the token before it is. Nothing is put around what is `whole`.

    Errors: UsageError for an id that the tokenizer does not have, and for a mask of another length. Stability: provisional.
    """
    if not ids.size:
        return ids, numpy.empty(0, numpy.uint8)
    if not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise UsageError(f"token id {bad} is out of range: the tokenizer has the ids 0 to {tokenizer.vocab_size - 1}")
    if mask is not None and len(mask) != len(ids):
        raise UsageError(f"{len(ids)} token ids but {len(mask)} values in their mask")
    trained = numpy.ones(len(ids), numpy.uint8) if mask is None else numpy.asarray(mask, dtype=numpy.uint8)
    if whole:
        return ids, trained
    if frame_start and tokenizer.bos_id is not None and ids[0] != tokenizer.bos_id:
        ids, trained = numpy.concatenate([[tokenizer.bos_id], ids]), numpy.concatenate([trained[:1], trained])
    if tokenizer.eos_id is not None and ids[-1] != tokenizer.eos_id:
        ids, trained = numpy.concatenate([ids, [tokenizer.eos_id]]), numpy.concatenate([trained, trained[-1:]])
    return ids, trained


@contextlib.contextmanager
def document_named(name: str, number: int, failure: str, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Say of any error which source and document it comes from; those of the kinds `but` are left as they are. Stability: provisional."""
    try:
        yield
    except but:
        raise
    except IntarsiaError as error:
        raise type(error)(f"{name}: document {number} {failure}: {error}") from error
    except Exception as error:
        raise PluginError(f"{name}: document {number} {failure}: {type(error).__name__}: {error}") from error


def _opened(folder: Path, open_folder: Callable[[Path], Store]) -> Store | None:
    """What is in `folder`, or None where it is missing or damaged (it is built anew then)."""
    try:
        return open_folder(folder)
    except (OSError, ValueError, KeyError):
        return None


def mapped(path: Path, dtype: str, count: int) -> numpy.ndarray:
    """A file as a read-only array. Errors: ValueError when its size is not that of `count` items."""
    if path.stat().st_size != count * numpy.dtype(dtype).itemsize:
        raise ValueError(f"{path} has the wrong size")
    return numpy.asarray(numpy.memmap(path, dtype=dtype, mode="r", shape=(count,))) if count else numpy.empty(0, dtype)


@contextlib.contextmanager
def _locked(path: Path, name: str, timeout_s: float) -> Iterator[None]:
    """Hold a lock on `path`; the system releases it when the process ends, however it ends.

    Errors: UsageError after `timeout_s`; OSError where the file system has no locks.
    """
    begun = time.monotonic()
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - begun > timeout_s:
                    raise UsageError(
                        f"{name}: another process has been building its token store for {timeout_s:.0f} s. Look for a process that "
                        f"holds {path}, or set data.cache to another folder."
                    ) from None
                time.sleep(0.05)
        yield
