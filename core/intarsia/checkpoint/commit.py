"""The commit protocol over any Storage, and what it leaves to be found. Torch-free.

A save writes everything under a temporary folder. Each rank ends with its part file. Rank 0 waits for all parts, merges them into the
manifest, writes it, publishes the folder under its final name and writes the marker, which holds the manifest's hash, last.
A folder without a marker that fits is no checkpoint. docs/reference/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from intarsia.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MARKER,
    VERSION,
    Manifest,
    NewerFormat,
    check_version,
    decode,
    describe,
    encode,
    from_json,
)
from intarsia.contracts.storage import FileRecord, Storage, WrittenPart
from intarsia.errors import CheckpointError

CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A complete checkpoint: its folder in the storage, and where that is in words. `verified`: every hash was compared. Stability: stable."""

    folder: str
    location: str
    step: int
    serial: int
    time_s: float
    size_bytes: int
    verified: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """A folder that does not count as a checkpoint, and why. Stability: stable."""

    folder: str
    reason: str
    newer_format: bool = False


def temporary_token(random: str) -> str:
    """Who writes: `host.pid.random`, part of the names of temporary folders."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"
    return f"{host}.{os.getpid()}.{random}"


def write_file(storage: Storage, name: str, data: bytes) -> None:
    """A whole file, durable when this returns; nothing is left of it when it fails."""
    writer = storage.open(name)
    try:
        writer.write(data)
        writer.close()
    except BaseException:
        writer.abort()
        raise


def marker_bytes(manifest: bytes) -> bytes:
    """What the marker of a checkpoint with this manifest holds, to the byte."""
    return f"{FORMAT} {VERSION} {hashlib.sha256(manifest).hexdigest()}\n".encode()


# ---------------------------------------------------------------- parts


def part_name(folder: str, rank: int) -> str:
    """The file in which a rank says what it wrote."""
    return f"{folder}/parts/rank-{rank:05d}.json"


def wait_for_parts(storage: Storage, folder: str, world: int, timeout_s: float) -> list[dict[str, Any]]:
    """Every rank's part. CheckpointError when a rank reports a failure, or has not reported in time."""
    parts: dict[int, dict[str, Any]] = {}
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while True:
        for rank in range(world):
            if rank not in parts:
                with contextlib.suppress(FileNotFoundError):
                    name = part_name(folder, rank)
                    parts[rank] = decode(storage.read(name), name)
        for rank, part in parts.items():
            if "error" in part:
                raise CheckpointError(f"rank {rank} failed: {part['error']}")
        if len(parts) == world:
            return [parts[rank] for rank in range(world)]
        if time.monotonic() > deadline:
            late = ", ".join(str(rank) for rank in range(world) if rank not in parts)
            raise CheckpointError(
                f"rank {late} had not written its part after {timeout_s:.0f} s. It died, hangs, or did not save this step."
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 1.0)


def part_json(written: WrittenPart, heads: Mapping[str, Any], values: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """A rank's part as JSON."""
    pieces: dict[str, list[Any]] = {}
    for p in written.pieces:
        box = {"start": list(p.box_start), "size": list(p.box_size), "file": p.file, "offset": p.offset, "length": p.length}
        pieces.setdefault(p.key, []).append(box)
    return {
        "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in written.files},
        "pieces": pieces,
        "tensors": dict(heads),
        "values": dict(values),
        "digests": dict(digests),
    }


def merge_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's files, tensors and values. CheckpointError where ranks contradict each other, naming item and ranks."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    first: dict[str, int] = {}
    for rank, part in enumerate(parts):
        for name, file in part["files"].items():
            if name in files:
                raise CheckpointError(f"two ranks, rank {rank} one of them, wrote the file {name!r}; the backend must name files by rank.")
            files[name] = file
        for key, head in part["tensors"].items():
            if tensors.setdefault(key, {"head": head, "pieces": []})["head"] != head:
                raise CheckpointError(f"{key!r} differs: on rank {first[key]} {tensors[key]['head']}, on rank {rank} {head}.")
            first.setdefault(key, rank)
        for key, pieces in part["pieces"].items():
            tensors.setdefault(key, {"head": {}, "pieces": []})["pieces"] += pieces
        for key, record in part["values"].items():
            _merge_value(values, first, key, record, rank)
        for key in first:
            if _kind(tensors, values, key) == "replicated" and (key in part["digests"]) != (key in parts[0]["digests"]):
                raise CheckpointError(f"the replicated item {key!r} must be on all ranks; ranks 0 and {rank} disagree about it.")
        for key, digest in part["digests"].items():
            if digest != parts[0]["digests"].get(key, digest):
                raise CheckpointError(
                    f"the replicated item {key!r} must be equal on all ranks, and rank {rank} differs from rank 0. "
                    f"Its owner changed it on some ranks only, or it should be of kind rank or keyed."
                )
    return {"files": files, "tensors": {key: t["head"] | {"pieces": t["pieces"]} for key, t in tensors.items()}, "values": values}


def _kind(tensors: Mapping[str, Any], values: Mapping[str, Any], key: str) -> Any:
    return values[key]["kind"] if key in values else tensors[key]["head"].get("kind")


def _merge_value(values: dict[str, Any], first: dict[str, int], key: str, record: dict[str, Any], rank: int) -> None:
    kind, value = record["kind"], record["value"]
    if kind == "rank":
        value = {str(rank): value}
    known = values.get(key)
    if known is None:
        values[key], first[key] = record | {"value": dict(value) if kind != "replicated" else value}, rank
        return
    for field in ("kind", "version"):
        if known[field] != record[field]:
            raise CheckpointError(f"{key!r} has {field} {known[field]} on rank {first[key]} and {record[field]} on rank {rank}.")
    if kind == "replicated":
        return
    for name, inner in value.items():
        if known["value"].setdefault(name, inner) != inner:
            raise CheckpointError(
                f"the keyed item {key!r} has two values for {name!r}: {describe(known['value'][name])} from an earlier rank, "
                f"{describe(inner)} from rank {rank}. Keys are global: equal keys must agree."
            )


# ---------------------------------------------------------------- publish and find


def publish(
    storage: Storage,
    base: str,
    temporary: str,
    head: Mapping[str, Any],
    parts: list[dict[str, Any]],
    values: Mapping[str, Any] | None = None,
) -> CheckpointRef:
    """Make the temporary folder the newest checkpoint, of what is in `parts` and the merged `values`. Durable when this returns."""
    complete, skipped = scan(storage, base)
    serial = 1 + max((ref.serial for ref in complete), default=0)
    value = {"format": FORMAT, "version": VERSION, "serial": serial, "time_s": time.time(), **head, **merge_parts(parts)}
    value["values"] |= values or {}
    manifest = from_json(value, f"the manifest of {temporary}")
    data = encode(value)
    write_file(storage, f"{temporary}/{MANIFEST}", data)
    storage.remove(f"{temporary}/parts")
    stem = f"{base}/step-{manifest.step:08d}"
    taken = {ref.folder for ref in complete} | {entry.folder for entry in skipped}
    folder = next(name for name in _names(stem) if name not in taken)
    storage.publish(temporary, folder)
    write_file(storage, f"{folder}/{MARKER}", marker_bytes(data))
    return _ref(storage, folder, manifest)


def _names(stem: str) -> Iterator[str]:
    """`stem`, `stem.1`, ...: a step saved again never touches the earlier one."""
    yield stem
    attempt = 0
    while True:
        attempt += 1
        yield f"{stem}.{attempt}"


def _ref(storage: Storage, folder: str, manifest: Manifest) -> CheckpointRef:
    location = f"{storage.describe().rstrip('/')}/{folder}"
    return CheckpointRef(folder, location, manifest.step, manifest.serial, manifest.time_s, manifest.size_bytes)


def load_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of a complete checkpoint. CheckpointError where marker or manifest is missing, damaged or newer; NewerFormat for the last."""
    where = f"{storage.describe().rstrip('/')}/{folder}"
    try:
        marker = storage.read(f"{folder}/{MARKER}")
    except FileNotFoundError:
        raise CheckpointError(f"{where} has no {MARKER} file: its save was interrupted, or it is being deleted.") from None
    try:
        data = storage.read(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        raise CheckpointError(f"{where} has no {MANIFEST}.") from None
    if marker != marker_bytes(data):
        newer = re.fullmatch(rb"%b (\d{1,9}) [0-9a-f]{64}\n" % FORMAT.encode(), marker)
        if newer and int(newer[1]) > VERSION:
            check_version(decode(data, f"{where}/{MANIFEST}"), f"{where}/{MANIFEST}")
        raise CheckpointError(f"{where}: {MARKER} does not fit {MANIFEST}: one of the two was damaged.")
    return from_json(decode(data, f"{where}/{MANIFEST}"), f"{where}/{MANIFEST}")


def check_sizes(storage: Storage, folder: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(file, reason) of each data file that is missing or has another size."""
    for name, file in manifest.files.items():
        try:
            size = storage.size(f"{folder}/{name}")
        except FileNotFoundError:
            yield name, "is missing"
            continue
        if size != file.size:
            yield name, f"has {size} bytes, not {file.size}"


def check_hash(storage: Storage, folder: str, file: FileRecord) -> str:
    """What is wrong with a data file's bytes; "" when nothing is."""
    digest, offset = hashlib.sha256(), 0
    try:
        while offset < file.size:
            data = storage.read(f"{folder}/{file.name}", offset, min(CHUNK_BYTES, file.size - offset))
            if not data:
                break
            digest.update(data)
            offset += len(data)
        if storage.size(f"{folder}/{file.name}") != file.size or offset != file.size:
            return f"does not have its {file.size} bytes"
    except OSError as error:
        return f"cannot be read: {error}"
    return "" if digest.hexdigest() == file.sha256 else "was changed: its SHA-256 is not the manifest's"


def scan(storage: Storage, base: str) -> tuple[list[CheckpointRef], list[Skipped]]:
    """Complete checkpoints under `base`, newest first, and the folders that are none, with reasons. Compares sizes, not hashes of data."""
    complete, skipped = [], []
    start = f"{base}/" if base else ""
    folders = {name[len(start) :].partition("/")[0] for name in storage.list(base) if "/" in name[len(start) :]}
    for entry in sorted(folders):
        folder = f"{start}{entry}"
        if entry.startswith("saving."):
            skipped.append(Skipped(folder, "is temporary: a save that has not ended, or that a crash cut off"))
        elif entry.startswith("step-"):
            try:
                manifest = load_manifest(storage, folder)
                problem = next((f"{name} {reason}" for name, reason in check_sizes(storage, folder, manifest)), "")
            except (CheckpointError, OSError) as error:
                skipped.append(Skipped(folder, str(error), isinstance(error, NewerFormat)))
                continue
            if problem:
                skipped.append(Skipped(folder, problem))
            else:
                complete.append(_ref(storage, folder, manifest))
    return sorted(complete, key=lambda ref: ref.serial, reverse=True), skipped


# ---------------------------------------------------------------- retention and leftovers


def purge(storage: Storage, base: str, keep_last: int, keep_every: int | None, keep: Iterable[str]) -> list[str]:
    """Delete complete checkpoints beyond the `keep_last` newest (0: none), sparing multiples of `keep_every`, and `keep`. Returns the folders."""
    if keep_last == 0:
        return []
    kept, gone = set(keep), []
    for ref in scan(storage, base)[0][keep_last:]:
        if ref.folder not in kept and not (keep_every and ref.step % keep_every == 0):
            # Without its marker it is no checkpoint any more, wherever the rest of the deletion stops.
            storage.remove(f"{ref.folder}/{MARKER}")
            storage.remove(ref.folder)
            gone.append(ref.folder)
    return gone


def temporary_folder(base: str, token: str, number: int, step: int) -> str:
    """Where save `number` of the session `token` writes before it is published."""
    return f"{base}/saving.{token}.{number}.step-{step:08d}"


def clean(storage: Storage, base: str, token: str, number: int, exclusive: bool) -> list[str]:
    """Delete what unfinished saves left. Returns the folders.

    A temporary folder goes when it is of this session (`token`) up to its save `number` (other ranks may be ahead), when its process ran on
    this host and is dead, or when the caller holds the run's lock (`exclusive`). Final folders without a marker go under the lock only.
    """
    gone = []
    for entry in scan(storage, base)[1]:
        name = entry.folder.rpartition("/")[2]
        if name.startswith("saving."):
            host, pid, random, count = (*name.split(".")[1:5], "", "", "", "")[:4]
            if f"{host}.{pid}.{random}" == token:
                leftover = count.isdigit() and int(count) <= number
            else:
                leftover = exclusive or (host == token.partition(".")[0] and pid.isdigit() and not _alive(int(pid)))
        else:
            leftover = exclusive and f"{entry.folder}/{MARKER}" not in storage.list(entry.folder)
        if leftover:
            storage.remove(entry.folder)
            gone.append(entry.folder)
    return gone


def _alive(pid: int) -> bool:
    """Whether another process of this host has this id. Our own id in another session's name is a dead predecessor's."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def explain(step: int, storage: Storage, action: Callable[[], str], remains: Callable[[], str]) -> Iterator[None]:
    """Turn what fails inside into one CheckpointError that names step, place, action, reason and what remains."""
    try:
        yield
    except Exception as error:
        name = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        reason = (f"{error.strerror or error}{name}" if isinstance(error, OSError) else str(error) or type(error).__name__).rstrip(".")
        hint = " The disk is full: free some space." if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(
            f"Saving the checkpoint of step {step} to {storage.describe()} failed while {action()}: {reason}.{hint} {remains()}"
        ) from error
