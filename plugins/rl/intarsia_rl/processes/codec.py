"""Messages between processes: JSON and bytes, and a closed list of the contracts' dataclasses. Nothing in a message can make code run.

A message is a JSON text and any number of byte strings that the text refers to. Long tuples of integers or of floats travel as such a byte string, exactly.
"""

from __future__ import annotations

import array
import dataclasses
import json
import struct
import sys
from collections.abc import Mapping
from typing import Any

from intarsia.contracts import Limits, Media, Observation, StepResult, Task, ToolCall, ToolSpec, Turn

from intarsia_rl.contracts import (
    Failure,
    Generated,
    GeneratorFacts,
    GeneratorStats,
    PlacedMedia,
    Request,
    Routes,
    Sample,
    Sampling,
    Segment,
    WeightVersion,
)

CLASSES: dict[str, type[Any]] = {
    each.__name__: each
    for each in (
        *(Limits, Media, Observation, StepResult, Task, ToolCall, ToolSpec, Turn),
        *(Failure, Generated, GeneratorFacts, GeneratorStats, PlacedMedia, Request, Routes, Sample, Sampling, Segment, WeightVersion),
    )
}
"""All that travels besides plain values."""

PACKED = 16
"""Tuples of numbers from this length on travel as bytes."""

DEPTH = 64
"""Deepest nesting: what is deeper is a mistake, and Python's own limit is near."""

HEAD = struct.Struct("<II")
"""Bytes of the JSON text; number of byte strings. Their lengths follow, 8 bytes each, then the text, then they."""


class CodecError(Exception):
    """A value that cannot travel, or a message that is none."""


class MessageTooLarge(CodecError):
    """A message is above the limit."""


def encode(value: Any, limit: int) -> list[bytes]:
    """The parts of the message of a value, to be sent one after the other. CodecError names what cannot travel; MessageTooLarge comes before much is copied."""
    writer = _Writer(limit)
    try:
        plain = writer.plain(value, "value", 0)
        # Escaped: lone surrogates, which file names and broken output bring, survive.
        text = json.dumps(plain, separators=(",", ":")).encode("ascii")
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise CodecError(f"the value cannot be sent to another process: {error}") from error
    writer.count(len(text) - writer.counted_text)
    return [HEAD.pack(len(text), len(writer.blobs)), struct.pack(f"<{len(writer.blobs)}Q", *map(len, writer.blobs)), text, *writer.blobs]


def check(value: Any, limit: int) -> None:
    """Raise what `encode` would raise, without making the message."""
    _Writer(limit).plain(value, "value", 0)


def decode(text: bytes, blobs: list[bytes]) -> Any:
    """The value of a message. CodecError where it is none."""
    try:
        return _Reader(blobs).value(json.loads(text))
    except CodecError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise CodecError(f"no message: {type(error).__name__}: {error}") from error


class _Writer:
    """One value's way to JSON: tuples, byte strings and dataclasses become objects with the key `$`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.blobs: list[bytes] = []
        self.counted = 0
        self.counted_text = 0

    def count(self, size: int) -> None:
        """Add to the size."""
        self.counted += size
        if self.counted > self.limit:
            raise MessageTooLarge(f"the message has at least {self.counted:,} bytes, and {self.limit:,} is the limit")

    def text(self, size: int) -> None:
        """Add to the size of the text: what is known of it before it is made."""
        self.counted_text += size
        self.count(size)

    def plain(self, value: Any, path: str, depth: int) -> Any:
        """What stands for the value in JSON."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            self.text(len(value))
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if depth > DEPTH:
            raise CodecError(f"{path} is nested too deeply")
        if isinstance(value, (bytes, bytearray, memoryview)):
            return {"$": "bytes", "at": self.blob(bytes(value))}
        if type(value) in (tuple, list):
            return self.sequence(value, path, depth)
        if isinstance(value, Mapping):
            return self.mapping(value, path, depth)
        name = type(value).__name__
        if name not in CLASSES or not dataclasses.is_dataclass(value) or CLASSES[name] is not type(value):
            raise CodecError(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to another process")
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"$": name, **{key: self.plain(item, f"{path}.{key}", depth + 1) for key, item in fields.items()}}

    def sequence(self, value: tuple[Any, ...] | list[Any], path: str, depth: int) -> Any:
        """A tuple or a list; long ones of numbers as bytes."""
        kind = "tuple" if isinstance(value, tuple) else "list"
        if len(value) >= PACKED:
            packed = pack(value)
            if packed is not None:
                return {"$": kind, packed[0]: self.blob(packed[1])}
        self.text(2 * len(value))
        items = [self.plain(item, f"{path}[{number}]", depth + 1) for number, item in enumerate(value)]
        return items if kind == "list" else {"$": "tuple", "of": items}

    def mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        """A mapping; keys that are no text, or begin with `$`, make it a list of pairs."""
        self.text(4 * len(value))
        if all(type(key) is str and not key.startswith("$") for key in value):
            self.text(sum(map(len, value)))
            return {key: self.plain(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = [
            [self.plain(key, f"a key of {path}", depth + 1), self.plain(item, f"{path}[{key!r}]", depth + 1)] for key, item in value.items()
        ]
        return {"$": "map", "of": pairs}

    def blob(self, data: bytes) -> int:
        """Put a byte string beside the text; its number."""
        self.count(len(data))
        self.blobs.append(data)
        return len(self.blobs) - 1


def pack(value: tuple[Any, ...] | list[Any]) -> tuple[str, bytes] | None:
    """The code and the little-endian bytes of a sequence of integers (q), floats (d) or truth values (?) alone; None where it is of something else."""
    first = type(value[0])
    if first not in CODES or type(value[-1]) is not first or set(map(type, value)) != {first}:
        return None
    if first is bool:
        return "?", bytes(value)
    try:
        numbers = array.array(CODES[first], value)
    except OverflowError:
        return None
    if sys.byteorder == "big":
        numbers.byteswap()
    return CODES[first], numbers.tobytes()


def unpack(code: str, data: bytes) -> list[Any]:
    """The inverse of `pack`."""
    if code == "?":
        return list(map(bool, data))
    numbers = array.array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


CODES = {int: "q", float: "d", bool: "?"}


class _Reader:
    """The way back."""

    def __init__(self, blobs: list[bytes]) -> None:
        self.blobs = blobs

    def value(self, plain: Any) -> Any:
        """The value that stands here."""
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        if "$" not in plain:
            return {key: self.value(item) for key, item in plain.items()}
        name = plain["$"]
        if name in ("tuple", "list"):
            code = next((code for code in CODES.values() if code in plain), None)
            items = [self.value(item) for item in plain["of"]] if code is None else unpack(code, self.blob(plain[code]))
            return tuple(items) if name == "tuple" else items
        if name == "bytes":
            return self.blob(plain["at"])
        if name == "map":
            return {self.value(key): self.value(item) for key, item in plain["of"]}
        if name not in CLASSES:
            raise CodecError(f"no message: it holds a {name!r}, which is none of {', '.join(CLASSES)}")
        return CLASSES[name](**{key: self.value(item) for key, item in plain.items() if key != "$"})

    def blob(self, number: Any) -> bytes:
        """A byte string by its number."""
        if not isinstance(number, int) or not 0 <= number < len(self.blobs):
            raise CodecError(f"no message: there is no byte string {number!r}")
        return self.blobs[number]
