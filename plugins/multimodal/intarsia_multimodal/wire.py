"""Messages between a loader and its workers: a line of JSON, and behind it the bytes of the arrays that it names. No object is ever unpickled."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping
from typing import Any

import numpy

from intarsia_multimodal.making import Row

ARRAYS = ("tokens_S", "labels_S", "visual_S", "positions_3S", "padding_S", "patches_NC")
LENGTH_BYTES = 8
DTYPES = ("int64", "float32", "bool")
MOST_MS = (1 << 31) - 1
"""The longest that the system waits at once."""


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
    """The next message. Errors: EOFError at the end, TimeoutError where nothing comes for `timeout_s`, be it before it begins or within it."""
    message = json.loads(_read(descriptor, int.from_bytes(_read(descriptor, LENGTH_BYTES, timeout_s), "little"), timeout_s))
    arrays: list[numpy.ndarray] = []
    for dtype, shape in message.pop("arrays"):
        if dtype not in DTYPES:
            raise ValueError(f"an array of dtype {dtype}")
        array = numpy.empty(shape, dtype)
        if array.size:
            _fill(descriptor, array.data.cast("B"), timeout_s)
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


def _read(descriptor: int, count: int, timeout_s: float | None) -> bytes:
    data = bytearray(count)
    _fill(descriptor, memoryview(data), timeout_s)
    return bytes(data)


def _fill(descriptor: int, target: memoryview, timeout_s: float | None) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while target:
        if timeout_s is not None and not poll.poll(min(1000 * timeout_s, MOST_MS)):
            raise TimeoutError
        count = os.readv(descriptor, [target])
        if not count:
            raise EOFError
        target = target[count:]
