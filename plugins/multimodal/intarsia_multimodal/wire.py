"""Messages between a loader and its workers: a line of JSON, and behind it the bytes of the arrays that it names. No object is ever unpickled."""

from __future__ import annotations

import json
import os
import selectors
from collections.abc import Mapping
from typing import Any

import numpy

from intarsia_multimodal.making import Row

ARRAYS = ("tokens_S", "labels_S", "visual_S", "positions_3S", "padding_S", "patches_NC")
LENGTH_BYTES = 8
DTYPES = ("int64", "float32", "bool")


def send(descriptor: int, message: Mapping[str, Any], row: Row | None = None) -> None:
    """Write a message, and a row with it."""
    arrays = [] if row is None else [numpy.ascontiguousarray(getattr(row, name)) for name in ARRAYS]
    facts: dict[str, Any] = {"arrays": [[array.dtype.name, array.shape] for array in arrays]}
    if row is not None:
        facts["row"] = {"grids": row.grids, "lengths": row.lengths, "bytes": row.bytes, "bad": row.bad}
    head = json.dumps({**message, **facts}).encode()
    _write(descriptor, memoryview(len(head).to_bytes(LENGTH_BYTES, "little") + head))
    for array in arrays:
        if array.size:
            _write(descriptor, array.data.cast("B"))


def receive(descriptor: int, timeout_s: float | None = None) -> tuple[dict[str, Any], Row | None]:
    """The next message. Errors: EOFError at the end, TimeoutError where its beginning does not come within `timeout_s`."""
    if timeout_s is not None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError
    message = json.loads(_read(descriptor, int.from_bytes(_read(descriptor, LENGTH_BYTES), "little")))
    arrays: list[numpy.ndarray] = []
    for dtype, shape in message.pop("arrays"):
        if dtype not in DTYPES:
            raise ValueError(f"an array of dtype {dtype}")
        array = numpy.empty(shape, dtype)
        if array.size:
            _fill(descriptor, array.data.cast("B"))
        arrays.append(array)
    facts = message.pop("row", None)
    if facts is None:
        return message, None
    grids = tuple((int(t), int(h), int(w)) for t, h, w in facts["grids"])
    given = dict(zip(ARRAYS, arrays, strict=True))
    return message, Row(**given, grids=grids, lengths=tuple(facts["lengths"]), bytes=facts["bytes"], bad=tuple(facts["bad"]))


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read(descriptor: int, count: int) -> bytes:
    data = bytearray(count)
    _fill(descriptor, memoryview(data))
    return bytes(data)


def _fill(descriptor: int, target: memoryview) -> None:
    while target:
        count = os.readv(descriptor, [target])
        if not count:
            raise EOFError
        target = target[count:]
