"""The manifest: one JSON file that says what a checkpoint holds and where. Read strictly; nothing in it is imported or run. Torch-free.

docs/reference/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from intarsia.contracts.placement import Box
from intarsia.contracts.state import StateKind
from intarsia.contracts.storage import FileRecord, JSONObject, Piece
from intarsia.errors import CheckpointError, did_you_mean
from intarsia.layout import DTYPE_BYTES, box_text

FORMAT = "intarsia-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
MARKER = "COMMIT"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRecord:
    """One stored tensor. `kind` rank: it belongs to `rank` alone and its key is the item's with `@rankN` behind. Stability: provisional."""

    owner: str
    name: str
    kind: StateKind
    version: int
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    rank: int | None = None

    @property
    def item(self) -> str:
        """Key of the state item."""
        return f"{self.owner}/{self.name}"

    @property
    def key(self) -> str:
        """Key of the tensor."""
        return self.item if self.rank is None else f"{self.item}@rank{self.rank}"

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRecord:
    """One stored JSON value; for kind rank `value` maps each rank (as a string) to its own. Stability: provisional."""

    owner: str
    name: str
    kind: StateKind
    version: int
    value: Any

    @property
    def key(self) -> str:
        """Key of the state item."""
        return f"{self.owner}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents. `serial` counts a run's commits: the highest is the newest, whatever its step. Stability: provisional."""

    step: int
    serial: int
    time_s: float
    world: int
    writer: str
    backend: str
    facts: JSONObject
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, ValueRecord]
    files: Mapping[str, FileRecord]

    def items(self) -> dict[str, tuple[StateKind, int]]:
        """Kind and schema version of every state item by key."""
        found = {record.item: (record.kind, record.version) for record in self.tensors.values()}
        return found | {key: (record.kind, record.version) for key, record in self.values.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes in all data files."""
        return sum(file.size for file in self.files.values())


def encode(value: Any) -> bytes:
    """Canonical JSON: sorted keys, UTF-8, no NaN, one newline at the end."""
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()


def decode(data: bytes, where: str) -> Any:
    """Strict JSON of the file `where`: no duplicate keys, no NaN. CheckpointError says what is wrong."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in found:
            if key in result:
                raise ValueError(f"the key {key!r} is there twice in one object")
            result[key] = value
        return result

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise CheckpointError(f"{where} is not valid: nested too deeply.") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}). It was damaged or not written by Intarsia.") from None


class Reader:
    """Takes typed fields out of one JSON object and names file, place and reason when something is off."""

    def __init__(self, value: Any, where: str, place: str, fields: Iterable[str], optional: Iterable[str] = ()):
        self.where, self.place = where, place
        self.value = value if isinstance(value, dict) else self.fail(f"must be an object, is {describe(value)}")
        known = set(fields) | set(optional)
        for name in sorted(set(self.value) - known):
            self.fail(f"unknown field {name!r}. {did_you_mean(name, known)}")
        for name in sorted(set(fields) - set(self.value)):
            self.fail(f"the field {name!r} is missing")

    def fail(self, reason: str) -> Any:
        """Raise the CheckpointError."""
        raise CheckpointError(f"{self.where}: {self.place}: {reason}.")

    def text(self, name: str) -> str:
        """A non-empty string."""
        value = self.value[name]
        return value if isinstance(value, str) and value else self.fail(f"{name} must be a non-empty string, is {describe(value)}")

    def integer(self, name: str, least: int = 0) -> int:
        """An integer of at least `least`."""
        value = self.value[name]
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return cast(int, value) if good else self.fail(f"{name} must be an integer of at least {least}, is {describe(value)}")

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers that are not negative."""
        value = self.value[name]
        if not isinstance(value, list) or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in value):
            self.fail(f"{name} must be a list of integers of at least 0, is {describe(value)}")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object."""
        value = self.value[name]
        return value if isinstance(value, dict) else self.fail(f"{name} must be an object, is {describe(value)}")


def describe(value: Any) -> str:
    """A value in a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain JSON; `from_json` is the inverse."""
    tensors = {}
    for key, record in manifest.tensors.items():
        tensors[key] = tensor_head(record) | {
            "pieces": [
                {"start": list(p.box_start), "size": list(p.box_size), "file": p.file, "offset": p.offset, "length": p.length}
                for p in record.pieces
            ]
        }
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(manifest, name) for name in ("step", "serial", "time_s", "world", "writer", "backend")},
        "facts": dict(manifest.facts),
        "tensors": tensors,
        "values": {key: dataclasses.asdict(record) for key, record in manifest.values.items()},
        "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in manifest.files.items()},
    }


def tensor_head(record: TensorRecord) -> dict[str, Any]:
    """A tensor record's JSON without its pieces."""
    head = {"owner": record.owner, "name": record.name, "kind": record.kind, "version": record.version}
    return head | {"shape": list(record.shape), "dtype": record.dtype} | ({} if record.rank is None else {"rank": record.rank})


def check_version(value: Any, where: str) -> None:
    """CheckpointError unless `value` is a manifest of a format version that this code reads."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not a manifest of an Intarsia checkpoint: its field 'format' must be {FORMAT!r}.")
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{where}: the field 'version' must be a positive integer, is {describe(version)}.")
    if version > VERSION:
        raise NewerFormat(
            f"{where} is in checkpoint format {version}, written by Intarsia {describe(value.get('writer'))}; "
            f"this Intarsia reads formats up to {VERSION}. Upgrade Intarsia to load it."
        )


class NewerFormat(CheckpointError):
    """The checkpoint was written by a later version in a format that this one does not read. Stability: provisional."""


FIELDS = ("format", "version", "step", "serial", "time_s", "world", "writer", "backend", "facts", "tensors", "values", "files")


def from_json(value: Any, where: str) -> Manifest:
    """The manifest in decoded JSON, every field and every relation between them checked. `where` names the file in messages."""
    check_version(value, where)
    top = Reader(value, where, "top level", FIELDS)
    if not isinstance(value["time_s"], int | float) or isinstance(value["time_s"], bool):
        top.fail("time_s must be a number")
    world = top.integer("world", 1)
    files = {name: _file(name, record, where) for name, record in top.mapping("files").items()}
    tensors = {key: _tensor(key, record, files, world, where) for key, record in top.mapping("tensors").items()}
    values = {key: _value(key, record, world, where) for key, record in top.mapping("values").items()}
    clash = sorted({record.item for record in tensors.values()} & set(values))
    if clash:
        top.fail(f"the item {clash[0]!r} is there as a tensor and as a value")
    _check_ranks(tensors, world, where)
    _check_bytes(tensors, where)
    numbers = {"step": top.integer("step"), "serial": top.integer("serial", 1), "time_s": float(value["time_s"]), "world": world}
    return Manifest(
        **numbers,
        writer=top.text("writer"),
        backend=top.text("backend"),
        facts=top.mapping("facts"),
        tensors=tensors,
        values=values,
        files=files,
    )


def _file(name: str, value: Any, where: str) -> FileRecord:
    reader = Reader(value, where, f"file {name!r}", ("size", "sha256"))
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")) or name in (MANIFEST, MARKER):
        reader.fail("a data file's name is relative to the checkpoint, without '.', '..' or backslash, and not the manifest or the marker")
    digest = reader.text("sha256")
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        reader.fail(f"sha256 must be 64 hexadecimal digits, is {describe(digest)}")
    return FileRecord(name, reader.integer("size"), digest)


def _tensor(key: str, value: Any, files: Mapping[str, FileRecord], world: int, where: str) -> TensorRecord:
    reader = Reader(value, where, f"tensor {key!r}", ("owner", "name", "kind", "version", "shape", "dtype", "pieces"), ("rank",))
    kind = reader.text("kind")
    if kind not in ("tensor", "replicated", "rank"):
        reader.fail(f"a tensor's kind is tensor, replicated or rank, not {describe(kind)}")
    if (kind == "rank") != ("rank" in value):
        reader.fail("the field 'rank' belongs to tensors of kind rank, and only to them")
    rank = reader.integer("rank") if kind == "rank" else None
    if rank is not None and rank >= world:
        reader.fail(f"rank {rank} is outside a world of {world}")
    shape, dtype = reader.integers("shape"), reader.text("dtype")
    if dtype not in DTYPE_BYTES:
        reader.fail(f"unknown dtype {dtype!r}. {did_you_mean(dtype, DTYPE_BYTES)}")
    if not isinstance(value["pieces"], list):
        reader.fail("pieces must be a list")
    pieces = tuple(_piece(key, piece, shape, dtype, files, where) for piece in value["pieces"])
    record = TensorRecord(
        reader.text("owner"), reader.text("name"), cast(StateKind, kind), reader.integer("version", 1), shape, dtype, pieces, rank
    )
    if record.key != key:
        reader.fail(f"owner and name say {record.key!r}")
    overlap = find_overlap([Box(piece.box_start, piece.box_size) for piece in pieces])
    if overlap:
        reader.fail(f"the boxes {box_text(overlap[0])} and {box_text(overlap[1])} overlap")
    covered = sum(math.prod(piece.box_size) for piece in pieces)
    if covered != record.numel:
        reader.fail(f"its boxes hold {covered} of the {record.numel} elements of shape {list(shape)}: there is a hole")
    return record


def _piece(key: str, value: Any, shape: tuple[int, ...], dtype: str, files: Mapping[str, FileRecord], where: str) -> Piece:
    reader = Reader(value, where, f"tensor {key!r}", ("start", "size", "file", "offset", "length"))
    box = start, size = reader.integers("start"), reader.integers("size")
    if len(start) != len(shape) or len(size) != len(shape):
        reader.fail(f"the box {list(start)} + {list(size)} has not as many dimensions as the shape {list(shape)}")
    if any(n == 0 for n in size) or any(a + n > limit for a, n, limit in zip(start, size, shape, strict=True)):
        reader.fail(f"the box {list(start)} + {list(size)} is empty or outside the shape {list(shape)}")
    file, offset, length = reader.text("file"), reader.integer("offset"), reader.integer("length")
    if file not in files:
        reader.fail(f"its file {file!r} is not listed. {did_you_mean(file, files)}")
    if offset + length > files[file].size:
        reader.fail(f"bytes {offset} to {offset + length} are outside the file {file!r} of {files[file].size} bytes")
    if length != math.prod(size) * DTYPE_BYTES[dtype]:
        reader.fail(f"a box of size {list(size)} in {dtype} has {math.prod(size) * DTYPE_BYTES[dtype]} bytes, not {length}")
    return Piece(key, *box, file, offset, length)


def _value(key: str, value: Any, world: int, where: str) -> ValueRecord:
    reader = Reader(value, where, f"value {key!r}", ("owner", "name", "kind", "version", "value"))
    kind = reader.text("kind")
    if kind not in ("replicated", "keyed", "rank"):
        reader.fail(f"a value's kind is replicated, keyed or rank, not {describe(kind)}")
    record = ValueRecord(reader.text("owner"), reader.text("name"), cast(StateKind, kind), reader.integer("version", 1), value["value"])
    if record.key != key:
        reader.fail(f"owner and name say {record.key!r}")
    if kind != "replicated":
        reader.mapping("value")
    if kind == "rank":
        _compare_ranks(key, set(record.value), {str(rank) for rank in range(world)}, where)
    return record


def _check_ranks(tensors: Mapping[str, TensorRecord], world: int, where: str) -> None:
    by_item: dict[str, set[str]] = {}
    for record in tensors.values():
        if record.rank is not None:
            by_item.setdefault(record.item, set()).add(str(record.rank))
        elif f"{record.key}@rank0" in tensors:
            raise CheckpointError(f"{where}: tensor {record.key!r}: it is there once for all ranks and once for each.")
    for item, ranks in by_item.items():
        _compare_ranks(item, ranks, {str(rank) for rank in range(world)}, where)


def _compare_ranks(key: str, have: set[str], want: set[str], where: str) -> None:
    for verb, ranks in (("lacks", want - have), ("has a surplus entry for", have - want)):
        if ranks:
            raise CheckpointError(
                f"{where}: {key!r} has an entry for each of {len(want)} ranks, but {verb} rank {', '.join(sorted(ranks))}."
            )


def _check_bytes(tensors: Mapping[str, TensorRecord], where: str) -> None:
    """No two pieces may share bytes of a file."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for record in tensors.values():
        for piece in record.pieces:
            by_file.setdefault(piece.file, []).append((piece.offset, piece.length, piece.key))
    for file, ranges in by_file.items():
        ranges.sort()
        for (offset, length, key), (after, _, other) in itertools.pairwise(ranges):
            if offset + length > after:
                raise CheckpointError(f"{where}: file {file!r}: tensors {key!r} and {other!r} overlap at byte {after}.")


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element, or None. Sweeps the dimension with the most distinct starts."""
    if len(boxes) < 2:
        return None
    dimensions = len(boxes[0].start)
    if dimensions == 0:
        return boxes[0], boxes[1]
    axis = max(range(dimensions), key=lambda d: len({box.start[d] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start[axis]):
        active = [other for other in active if other.end[axis] > box.start[axis]]
        for other in active:
            if box.intersect(other):
                return other, box
        active.append(box)
    return None
