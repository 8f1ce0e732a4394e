"""Media as patches, once for equal ones, however many requests, rows and documents show them. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import stat
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import numpy
from intarsia.contracts import Media

from intarsia_multimodal.contracts import Processor, Slot

KEPT_BYTES = 128 << 20
"""Bytes of patches that are kept for whoever shows the same next."""

Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A medium's patches, float32 [N, C], which nobody writes to, and its grid. Stability: provisional."""

    patches_NC: numpy.ndarray
    grid: tuple[int, int, int]

    @functools.cached_property
    def digest(self) -> bytes:
        """Over patches and grid."""
        found = hashlib.sha256(repr(tuple(self.grid)).encode())
        found.update(numpy.ascontiguousarray(self.patches_NC).data.cast("B"))
        return found.digest()


class Decoder:
    """Loads media by a processor: equal ones once, for as long as somebody has them, and `limit_bytes` of the last ones besides (one, however large). Threads may share it. Stability: provisional.

    Media are equal by their contents, a file's as well, and by what is taken of them (grid, frames, size). What an URL gives is not known before it is fetched, and never kept; nor is a file that is written anew while it is
    decoded.
    `decoded` counts what the processor was asked for, `spared` what was there already.
    """

    def __init__(self, processor: Processor, limit_bytes: int = KEPT_BYTES) -> None:
        self.processor = processor
        self.decoded = self.spared = 0
        self._limit, self._bytes = limit_bytes, 0
        self._guard = threading.Lock()
        self._had: weakref.WeakValueDictionary[Key, Loaded] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Key, Loaded] = OrderedDict()
        self._running: dict[Key, Future[Loaded]] = {}

    def load(self, slot: Slot) -> Loaded:
        """A medium's patches. Errors: the processor's."""
        contents = digest_of(slot.media)
        if contents is None:
            with self._guard:
                self.decoded += 1
            return Loaded(self.processor.load(slot), slot.grid)
        key = (slot.media.kind, contents, slot.grid, slot.frames, slot.size)
        with self._guard:
            found, running = self._had.get(key), self._running.get(key)
            if found is not None:
                self.spared += 1
                self._keep(key, found)
                return found
            if running is None:
                self.decoded += 1
                own = self._running[key] = Future()
            else:
                self.spared += 1
        return self._decoded(key, slot, contents, own) if running is None else running.result()

    def _decoded(self, key: Key, slot: Slot, contents: bytes, own: Future[Loaded]) -> Loaded:
        """Decode what nobody else is decoding. Who asks meanwhile waits for `own`."""
        try:
            loaded = Loaded(self.processor.load(slot), slot.grid)
        except BaseException as error:
            with self._guard:
                del self._running[key]
            own.set_exception(error)
            raise
        # A file that was written anew meanwhile may have given other contents than those that it is known by.
        is_known = not isinstance(slot.media.data, str) or digest_of(slot.media) == contents
        with self._guard:
            del self._running[key]
            if is_known:
                self._had[key] = loaded
                self._keep(key, loaded)
        own.set_result(loaded)
        return loaded

    def _keep(self, key: Key, loaded: Loaded) -> None:
        """As the last one."""
        if key not in self._kept:
            self._bytes += loaded.patches_NC.nbytes
        self._kept[key] = loaded
        self._kept.move_to_end(key)
        while self._bytes > self._limit and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].patches_NC.nbytes


def digest_of(media: Media) -> bytes | None:
    """Over a medium's contents; None where they are no bytes that are there, nor a file's."""
    if isinstance(media.data, str):
        try:
            if not stat.S_ISREG(os.stat(media.data).st_mode):  # to open a pipe would be to wait for who writes into it
                return None
            with open(media.data, "rb") as file:
                return hashlib.file_digest(file, hashlib.sha256).digest()
        except (OSError, ValueError):
            return None
    found = hashlib.sha256()
    if isinstance(media.data, bytes):
        found.update(media.data)
    else:
        for frame in media.data:
            found.update(b"frame" + len(frame).to_bytes(8, "little"))
            found.update(frame)
    return found.digest()
