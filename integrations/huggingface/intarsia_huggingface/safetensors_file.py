"""safetensors files, read a box at a time and written a block at a time. Nothing here ever holds more than a tensor's block.

Headers are checked in full when a file is opened, so that a damaged file is named with its tensor and the reason, and not met later as wrong numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from intarsia.contracts import Box
from intarsia.errors import CheckpointError, PluginError, UsageError, did_you_mean
from torch import Tensor

HEADER_BYTES = 100_000_000
"""Longest header that readers of the format accept."""

BLOCK_BYTES = 64 << 20
"""Bytes that are read or converted at once."""

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""The format's names of dtypes to torch's."""

_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file: `dtype` as torch names it, `offset` in bytes from the file's beginning."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    length: int


class SafetensorsFile:
    """An opened file: `tensors` by name, `metadata`. CheckpointError names file, tensor and reason where its header is not sound."""

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                length = self._header_length(file.read(8), size)
                text = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
        header = self._parse(text)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._broken("__metadata__ is not an object of texts")
        self.metadata: Mapping[str, str] = metadata
        self.tensors = {name: self._place(name, facts, 8 + length) for name, facts in header.items()}
        self._check_cover(8 + length, size)

    def _broken(self, reason: str, tensor: str = "") -> CheckpointError:
        where = f"{self.path}, tensor {tensor!r}" if tensor else f"{self.path}"
        return CheckpointError(f"{where}: this is not a sound safetensors file: {reason}. Fetch or write the file again.")

    def _header_length(self, first: bytes, size: int) -> int:
        if len(first) < 8:
            raise self._broken(f"it has {size} bytes, and a header's length alone takes 8")
        length = int.from_bytes(first, "little")
        if length > HEADER_BYTES:
            raise self._broken(f"its header would have {length} bytes; readers accept {HEADER_BYTES}")
        if 8 + length > size:
            raise self._broken(f"its header has {length} bytes, but the file ends after {size}: it is truncated")
        return length

    def _parse(self, text: bytes) -> dict[str, Any]:
        def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
            result: dict[str, Any] = {}
            for name, value in found:
                if name in result:
                    raise self._broken("the header lists it twice", name)
                result[name] = value
            return result

        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._broken("its header is no object")
        return header

    def _place(self, name: str, facts: Any, begin: int) -> Place:
        if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
            raise self._broken("its entry must have dtype, shape and data_offsets", name)
        shape, offsets, dtype = facts["shape"], facts["data_offsets"], facts["dtype"]
        if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise self._broken(f"shape {shape!r} and data_offsets {offsets!r} must be lists of whole numbers from 0 on", name)
        if dtype not in DTYPES or not hasattr(torch, DTYPES[dtype]):
            raise self._broken(f"its dtype {dtype!r} is not known here. {did_you_mean(str(dtype), DTYPES)}", name)
        start, end = offsets
        wanted = math.prod(shape) * getattr(torch, DTYPES[dtype]).itemsize
        if end - start != wanted:
            raise self._broken(f"shape {shape} in {dtype} takes {wanted} bytes, but data_offsets {offsets} hold {end - start}", name)
        return Place(tuple(shape), DTYPES[dtype], begin + start, wanted)

    def _check_cover(self, begin: int, size: int) -> None:
        position, before = begin, ""
        for name, place in sorted(self.tensors.items(), key=lambda item: (item[1].offset, item[1].length)):
            if place.offset != position:
                what = f"overlaps {before!r}" if place.offset < position else f"leaves a hole of {place.offset - position} bytes before it"
                raise self._broken(f"its data {what}", name)
            position, before = position + place.length, name
            if position > size:
                raise self._broken(f"its data ends at byte {position}, but the file at {size}: it is truncated", name)
        if position != size:
            raise self._broken(f"{size - position} bytes at its end belong to no tensor")

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A new CPU tensor with `box` of a tensor (all of it when None), of the box's size and the stored dtype."""
        place = self.tensors[name]
        box = Box.whole(place.shape) if box is None else box
        if len(box.size) != len(place.shape) or any(end > size for end, size in zip(box.end, place.shape, strict=True)):
            raise UsageError(f"The box {box} is not inside the shape {list(place.shape)} of {name!r} in {self.path}.")
        out = torch.empty(box.size, dtype=getattr(torch, place.dtype))
        if out.numel():
            try:
                with open(self.path, "rb", buffering=0) as file:
                    if place.shape:
                        self._fill(file, place.offset, place.shape, box.start, out)
                    else:
                        self._fill(file, place.offset, (1,), (0,), out.view(1))
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        return out

    def _fill(self, file: BinaryIO | Any, offset: int, shape: Sequence[int], start: Sequence[int], out: Tensor) -> None:
        """Read `out`'s rows of the tensor of `shape` at `offset`, whole rows in blocks; a stack of matrices is read matrix by matrix."""
        row_bytes = out.element_size() * math.prod(shape[1:])
        if len(shape) > 2 and tuple(out.shape[1:]) != tuple(shape[1:]):
            for index in range(out.shape[0]):
                self._fill(file, offset + (start[0] + index) * row_bytes, shape[1:], start[1:], out[index])
            return
        step = max(1, BLOCK_BYTES // row_bytes)
        for first in range(0, out.shape[0], step):
            rows = min(step, out.shape[0] - first)
            data = self._bytes(file, offset + (start[0] + first) * row_bytes, rows * row_bytes)
            block = torch.frombuffer(data, dtype=torch.uint8).view(out.dtype).view(rows, *shape[1:])
            inner = tuple(slice(a, a + n) for a, n in zip(start[1:], out.shape[1:], strict=True))
            out[first : first + rows].copy_(block[(slice(None), *inner)])

    def _bytes(self, file: Any, offset: int, length: int) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        file.seek(offset)
        while done < length:
            count = file.readinto(view[done:])
            if not count:
                raise self._broken(f"it ended at byte {offset + done} while it was being read")
            done += count
        return data


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


@dataclass(frozen=True, slots=True)
class Head:
    """What a file's header says of a tensor to be written. `dtype` as torch names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def length(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


def check_dtype(dtype: str) -> None:
    """UsageError unless the format can hold `dtype`."""
    if dtype not in _NAMES:
        raise UsageError(f"safetensors files cannot hold the dtype {dtype!r}. {did_you_mean(dtype, _NAMES)}")


def shards(heads: Iterable[Head], shard_bytes: int, header_bytes: int = HEADER_BYTES // 2) -> Iterator[list[Head]]:
    """The tensors in order, in files of at most `shard_bytes` of data (a larger tensor has a file of its own) and `header_bytes` of header."""
    group: list[Head] = []
    data = header = 0
    for head in heads:
        entry = len(json.dumps(head.name)) + 200
        if group and (data + head.length > shard_bytes or header + entry > header_bytes):
            yield group
            group, data, header = [], 0, 0
        group.append(head)
        data, header = data + head.length, header + entry
    if group:
        yield group


def write_file(path: Path, heads: Sequence[Head], blocks: Callable[[str], Iterable[Tensor]]) -> None:
    """Write a file whose tensors `blocks(name)` gives as consecutive parts of their row-major elements, in the head's dtype.

    The file appears under its name when it is whole and durable.
    """
    ordered = sorted(
        heads, key=lambda head: (-getattr(torch, head.dtype).itemsize, head.name)
    )  # so that every tensor is aligned to its elements
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for head in ordered:
        offsets = [position, position + head.length]
        header[head.name] = {"dtype": _NAMES[head.dtype], "shape": list(head.shape), "data_offsets": offsets}
        position += head.length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_name(f".{path.name}.part")
    try:
        with open(aside, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for head in ordered:
                written = 0
                for block in blocks(head.name):
                    data = block.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                    written += data.nbytes
                    file.write(data.data)
                if written != head.length:
                    raise PluginError(
                        f"{path}: {head.name} gave {written} bytes; shape {list(head.shape)} in {head.dtype} has {head.length}."
                    )
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        aside.unlink(missing_ok=True)
