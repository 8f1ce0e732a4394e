"""The manifest: one JSON file that says what a checkpoint holds and where. Read strictly; nothing in it is imported or run. Torch-free.

docs/reference/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from intarsia.config.shapes import unique
from intarsia.contracts import Box, FileRecord, JSONObject, Piece, StateKind
from intarsia.errors import CheckpointError, did_you_mean
from intarsia.layout import DTYPE_BYTES, box_text, find_overlap

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

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise CheckpointError(f"{where} is not valid: nested too deeply.") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}). It was damaged or not written by Intarsia.") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """What a field of the manifest must be: a test and its words."""

    words: str
    holds: Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


TEXT = Field("a non-empty string", lambda value: isinstance(value, str) and value != "")
COUNT = Field("an integer of at least 0", _count)
POSITIVE = Field("an integer of at least 1", lambda value: _count(value) and value > 0)
COUNTS = Field("a list of integers of at least 0", lambda value: isinstance(value, list) and all(map(_count, value)))
TIME = Field("a number of seconds in the years 1970 to 9999", lambda value: type(value) in (int, float) and 0 <= value < 253e9)
LIST = Field("a list", lambda value: isinstance(value, list))
OBJECT = Field("an object", lambda value: isinstance(value, dict))
JSON = Field("JSON", lambda value: True)

ITEM = {"owner": TEXT, "name": TEXT, "kind": TEXT, "version": POSITIVE}
PIECE = {"start": COUNTS, "size": COUNTS, "file": TEXT, "offset": COUNT, "length": COUNT}
TOP = {"format": TEXT, "version": POSITIVE, "step": COUNT, "serial": POSITIVE, "time_s": TIME, "world": POSITIVE}
FACTS = {
    "plugins": Field("a list of objects", lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value)),
    "mesh": Field("an object of integers of at least 0", lambda value: isinstance(value, dict) and all(map(_count, value.values()))),
    **dict.fromkeys(("recipe", "kernels", "data"), OBJECT),
}
TOP |= {"writer": TEXT, "backend": TEXT, "facts": OBJECT, "tensors": OBJECT, "values": OBJECT, "files": OBJECT}


def _fields(value: Any, fields: Mapping[str, Field], place: str) -> Any:
    """`value` itself, an object with exactly these fields; CheckpointError says where and what is wrong."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{place} must be an object, is {describe(value)}.")
    for name in sorted(set(value) ^ set(fields)):
        lacking = f"the field {name!r} is missing" if name in fields else f"unknown field {name!r}. {did_you_mean(name, fields)}"
        raise CheckpointError(f"{place}: {lacking.rstrip('.')}.")
    for name, field in fields.items():
        if not field.holds(value[name]):
            raise CheckpointError(f"{place}: {name} must be {field.words}, is {describe(value[name])}.")
    return value


def describe(value: Any) -> str:
    """A value in a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain JSON; `from_json` is the inverse."""
    plain = {name: getattr(manifest, name) for name in ("step", "serial", "time_s", "world", "writer", "backend", "facts")}
    return {
        "format": FORMAT,
        "version": VERSION,
        **plain,
        "tensors": {key: tensor_head(t) | {"pieces": [piece_json(piece) for piece in t.pieces]} for key, t in manifest.tensors.items()},
        "values": {key: dataclasses.asdict(record) for key, record in manifest.values.items()},
        "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in manifest.files.items()},
    }


def piece_json(piece: Piece) -> dict[str, Any]:
    """A piece in its tensor's record."""
    return dict(zip(PIECE, (list(piece.box_start), list(piece.box_size), piece.file, piece.offset, piece.length), strict=True))


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


def from_json(value: Any, where: str) -> Manifest:
    """The manifest in decoded JSON, every field and every relation between them checked. `where` names the file in messages."""
    check_version(value, where)
    top, world = _fields(value, TOP, f"{where}: top level"), value["world"]
    known = [name for name in FACTS if name in top["facts"]]
    _fields({name: top["facts"][name] for name in known}, {name: FACTS[name] for name in known}, f"{where}: facts")
    files = {name: _file(name, record, f"{where}: file {name!r}") for name, record in top["files"].items()}
    tensors = {key: _tensor(key, record, files, f"{where}: tensor {key!r}") for key, record in top["tensors"].items()}
    values = {key: _value(key, record, f"{where}: value {key!r}") for key, record in top["values"].items()}
    ranks = {key: set(record.value) for key, record in values.items() if record.kind == "rank"}
    for key, record in tensors.items():
        if record.item in values or (record.rank is not None and record.item in tensors):
            raise CheckpointError(f"{where}: tensor {key!r}: the item {record.item!r} is there in a second form.")
        if record.rank is not None:
            ranks.setdefault(record.item, set()).add(str(record.rank))
    for key, found in ranks.items():
        lost = next((rank for rank in range(world) if str(rank) not in found), None)
        if lost is not None:
            raise CheckpointError(f"{where}: {key!r} must have an entry for each of {world} ranks, and lacks rank {lost}.")
        if len(found) > world:
            raise CheckpointError(f"{where}: {key!r} has entries for more ranks than the {world} that there are.")
    _check_bytes(tensors, where)
    plain = {name: top[name] for name in ("step", "serial", "time_s", "world", "writer", "backend", "facts")}
    return Manifest(**plain, tensors=tensors, values=values, files=files)


def _file(name: str, value: Any, place: str) -> FileRecord:
    record = _fields(value, {"size": COUNT, "sha256": TEXT}, place)
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")) or name in (MANIFEST, MARKER):
        raise CheckpointError(
            f"{place}: a data file's name is relative, without '.', '..' or backslash, and not the manifest or the marker."
        )
    if len(record["sha256"]) != 64 or set(record["sha256"]) - set("0123456789abcdef"):
        raise CheckpointError(f"{place}: sha256 must be 64 hexadecimal digits, is {describe(record['sha256'])}.")
    return FileRecord(name, record["size"], record["sha256"])


def _tensor(key: str, value: Any, files: Mapping[str, FileRecord], place: str) -> TensorRecord:
    of_rank = {"rank": COUNT} if isinstance(value, dict) and value.get("kind") == "rank" else {}
    fields = _fields(value, {**ITEM, "shape": COUNTS, "dtype": TEXT, "pieces": LIST, **of_rank}, place)
    if fields["dtype"] not in DTYPE_BYTES:
        raise CheckpointError(f"{place}: unknown dtype {fields['dtype']!r}. {did_you_mean(fields['dtype'], DTYPE_BYTES)}")
    shape = tuple(fields["shape"])
    pieces = tuple(_piece(key, piece, shape, fields["dtype"], files, place) for piece in fields["pieces"])
    record = TensorRecord(**{**fields, "shape": shape, "pieces": pieces})
    boxes = [Box(piece.box_start, piece.box_size) for piece in pieces]
    overlap = find_overlap(boxes)
    covered = sum(math.prod(piece.box_size) for piece in pieces)
    problem = (
        f"a tensor's kind is tensor, replicated or rank, not {describe(record.kind)}"
        if record.kind not in ("tensor", "replicated", "rank")
        else f"owner, name and rank say {record.key!r}"
        if record.key != key
        else f"the boxes {' and '.join(box_text(boxes[number]) for number in overlap)} overlap"
        if overlap
        else f"its boxes hold {covered} of the {record.numel} elements of shape {list(shape)}: there is a hole"
        if covered != record.numel
        else ""
    )
    if problem:
        raise CheckpointError(f"{place}: {problem}.")
    return record


def _piece(key: str, value: Any, shape: tuple[int, ...], dtype: str, files: Mapping[str, FileRecord], place: str) -> Piece:
    fields = _fields(value, PIECE, place)
    start, size, file, offset, length = (fields[name] for name in PIECE)
    wanted = math.prod(size) * DTYPE_BYTES[dtype]
    problem = (
        f"the box {start} + {size} has not as many dimensions as the shape {list(shape)}"
        if not len(start) == len(size) == len(shape)
        else f"the box {start} + {size} is empty or outside the shape {list(shape)}"
        if any(n == 0 or a + n > limit for a, n, limit in zip(start, size, shape, strict=True))
        else f"its file {file!r} is not listed. {did_you_mean(file, files)}"
        if file not in files
        else f"bytes {offset} to {offset + length} are outside the file {file!r} of {files[file].size} bytes"
        if offset + length > files[file].size
        else f"a box of size {size} in {dtype} has {wanted} bytes, not {length}"
        if length != wanted
        else ""
    )
    if problem:
        raise CheckpointError(f"{place}: {problem.rstrip('.')}.")
    return Piece(key, tuple(start), tuple(size), file, offset, length)


def _value(key: str, value: Any, place: str) -> ValueRecord:
    shaped = OBJECT if isinstance(value, dict) and value.get("kind") != "replicated" else JSON
    record = ValueRecord(**_fields(value, {**ITEM, "value": shaped}, place))
    if record.kind not in ("replicated", "keyed", "rank"):
        raise CheckpointError(f"{place}: a value's kind is replicated, keyed or rank, not {describe(record.kind)}.")
    if record.key != key:
        raise CheckpointError(f"{place}: owner and name say {record.key!r}.")
    return record


def _check_bytes(tensors: Mapping[str, TensorRecord], where: str) -> None:
    """No two pieces may share bytes of a file."""
    pieces = sorted((piece for record in tensors.values() for piece in record.pieces), key=lambda piece: (piece.file, piece.offset))
    for one, other in itertools.pairwise(pieces):
        if one.file == other.file and one.offset + one.length > other.offset:
            raise CheckpointError(f"{where}: file {one.file!r}: tensors {one.key!r} and {other.key!r} overlap at byte {other.offset}.")
