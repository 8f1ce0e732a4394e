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
    piece_json,
)
from intarsia.contracts.storage import CheckpointBackend, FileRecord, HasFolders, Storage, WrittenPart
from intarsia.errors import CheckpointError, UsageError
from intarsia.plugins import Plugins

# Folder of a run's checkpoints in its storage.
BASE = "checkpoints"

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


def part_json(written: WrittenPart, heads: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's part as JSON: what it wrote, the head of each of its items (a replicated tensor's with the hash of its bytes), and JSON values."""
    pieces: dict[str, list[Any]] = {}
    for piece in written.pieces:
        pieces.setdefault(piece.key, []).append(piece_json(piece))
    files = {file.name: {"size": file.size, "sha256": file.sha256} for file in written.files}
    return {"files": files, "pieces": pieces, "heads": dict(heads), "values": dict(values)}


def merge_parts(parts: list[dict[str, Any]], stages: int = 1) -> dict[str, Any]:
    """The manifest's files, tensors and values. CheckpointError where ranks contradict each other, naming item and ranks.

    What is equal on all ranks may be missing on all ranks of a pipeline stage, of which there are `stages`; the first stage that has it gives it.
    """
    files: dict[str, Any] = {}
    heads: dict[str, tuple[int, dict[str, Any]]] = {}
    pieces: dict[str, list[Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for rank, part in enumerate(parts):
        for name, file in part["files"].items():
            if files.setdefault(name, file) is not file:
                raise CheckpointError(f"two ranks, rank {rank} one of them, wrote the file {name!r}; the backend must name files by rank")
        for key, head in part["heads"].items():
            first, known = heads.setdefault(key, (rank, head))
            if known != head:
                raise CheckpointError(f"{key!r} must be equal on all ranks, and differs: on rank {first} {known}, on rank {rank} {head}")
        for key, boxes in part["pieces"].items():
            if heads[key][1]["kind"] != "replicated" or key not in pieces:
                pieces.setdefault(key, []).extend(boxes)
        for key, value in part["values"].items():
            kind, merged = heads[key][1]["kind"], values.setdefault(key, {})
            for name, inner in (value if kind == "keyed" else {str(rank) if kind == "rank" else "the value": value}).items():
                if merged.setdefault(name, inner) != inner:
                    raise CheckpointError(
                        f"{key!r} of kind {kind} must be equal on all ranks, and {name!r} differs: it is {describe(merged[name])} on an "
                        f"earlier rank and {describe(inner)} on rank {rank}"
                    )
    size = len(parts) // stages
    for key, (_, head) in heads.items():
        for start in range(0, len(parts), size) if head["kind"] == "replicated" else ():
            here = [key in part["heads"] for part in parts[start : start + size]]
            if any(here) and not all(here):
                has, lacks = start + here.index(True), start + here.index(False)
                raise CheckpointError(f"{key!r} of kind replicated must be on all ranks; rank {has} has it, rank {lacks} has not")
    plain = {key: {name: field for name, field in head.items() if name != "sha256"} for key, (_, head) in heads.items()}
    tensors = {key: head | {"pieces": pieces.get(key, [])} for key, head in plain.items() if key not in values}
    whole = {key: value["the value"] if plain[key]["kind"] == "replicated" else value for key, value in values.items()}
    return {"files": files, "tensors": tensors, "values": {key: plain[key] | {"value": value} for key, value in whole.items()}}


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
    value = {
        "format": FORMAT,
        "version": VERSION,
        "serial": serial,
        "time_s": time.time(),
        **head,
        **merge_parts(parts, head["facts"].get("mesh", {}).get("pp", 1)),
    }
    value["values"] |= values or {}
    manifest = from_json(value, f"the manifest of {temporary}")
    data = encode(value)
    write_file(storage, f"{temporary}/{MANIFEST}", data)
    storage.remove(f"{temporary}/parts")
    stem = f"{base}/step-{manifest.step:08d}"
    taken = {ref.folder for ref in complete} | {entry.folder for entry in skipped}
    # A step that is saved again never touches the earlier one.
    folder = next(name for name in (stem, *(f"{stem}.{attempt}" for attempt in range(1, len(taken) + 2))) if name not in taken)
    storage.publish(temporary, folder)
    write_file(storage, f"{folder}/{MARKER}", marker_bytes(data))
    return _ref(storage, folder, manifest)


def _ref(storage: Storage, folder: str, manifest: Manifest) -> CheckpointRef:
    location = f"{storage.describe().rstrip('/')}/{folder}"
    return CheckpointRef(folder, location, manifest.step, manifest.serial, manifest.time_s, manifest.size_bytes)


def load_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of a complete checkpoint. CheckpointError where marker or manifest is missing, damaged or newer; NewerFormat for the last."""
    where = f"{storage.describe().rstrip('/')}/{folder}"
    try:
        marker, data = (storage.read(f"{folder}/{name}") for name in (MARKER, MANIFEST))
    except FileNotFoundError:
        have = storage.list(folder)
        lost = next(name for name in (MARKER, MANIFEST) if f"{folder}/{name}" not in have or name == MANIFEST)
        raise CheckpointError(f"{where} has no {lost} file: its save was interrupted, or it is being deleted.") from None
    if marker != marker_bytes(data):
        newer = re.fullmatch(rb"%b (\d{1,9}) [0-9a-f]{64}\n" % FORMAT.encode(), marker)
        if newer and int(newer[1]) > VERSION:
            check_version(decode(data, f"{where}/{MANIFEST}"), f"{where}/{MANIFEST}")
        raise CheckpointError(f"{where}: {MARKER} does not fit {MANIFEST}: one of the two was damaged.")
    return from_json(decode(data, f"{where}/{MANIFEST}"), f"{where}/{MANIFEST}")


def check_file(storage: Storage, folder: str, file: FileRecord, hashes: bool) -> str:
    """What is wrong with a data file: missing, another size, with `hashes` other bytes, unreadable; "" when nothing is."""
    name, digest = f"{folder}/{file.name}", hashlib.sha256()
    try:
        size = storage.size(name)
        for offset in range(0, file.size if hashes and size == file.size else 0, CHUNK_BYTES):
            digest.update(storage.read(name, offset, min(CHUNK_BYTES, file.size - offset)))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    changed = "was changed: its SHA-256 is not the manifest's" if hashes and digest.hexdigest() != file.sha256 else ""
    return changed if size == file.size else f"has {size} bytes, not {file.size}"


def scan(storage: Storage, base: str) -> tuple[list[CheckpointRef], list[Skipped]]:
    """Complete checkpoints under `base`, newest first, and the folders that are none, with reasons. Compares sizes, not hashes of data."""
    complete, skipped = [], []
    start = f"{base}/" if base else ""
    folders = {name[len(start) :].partition("/")[0] for name in storage.list(base) if "/" in name[len(start) :]}
    for entry in sorted(folders.union(storage.folders(base) if isinstance(storage, HasFolders) else ())):
        folder = f"{start}{entry}"
        if entry.startswith("saving."):
            skipped.append(Skipped(folder, "is temporary: a save that has not ended, or that a crash cut off"))
        elif entry.startswith("step-"):
            try:
                manifest = load_manifest(storage, folder)
                for file in manifest.files.values():
                    if problem := check_file(storage, folder, file, hashes=False):
                        raise CheckpointError(f"{file.name} {problem}")
                complete.append(_ref(storage, folder, manifest))
            except (CheckpointError, OSError) as error:
                skipped.append(Skipped(folder, str(error), isinstance(error, NewerFormat)))
    return sorted(complete, key=lambda ref: ref.serial, reverse=True), skipped


def refuse_newer(skipped: Iterable[Skipped]) -> None:
    """NewerFormat where one of the skipped folders is a checkpoint in a newer format: going on from an older one would fork the run."""
    for entry in skipped:
        if entry.newer_format:
            raise NewerFormat(entry.reason)


# ---------------------------------------------------------------- retention and leftovers


def purge(storage: Storage, base: str, keep_last: int, keep_every: int | None, keep: Iterable[str]) -> None:
    """Delete complete checkpoints beyond the `keep_last` newest (0: none), sparing multiples of `keep_every`, and `keep`."""
    kept = set(keep)
    for ref in scan(storage, base)[0][keep_last:] if keep_last else ():
        if ref.folder not in kept and not (keep_every and ref.step % keep_every == 0):
            # Without its marker it is no checkpoint any more, wherever the rest of the deletion stops.
            storage.remove(f"{ref.folder}/{MARKER}")
            storage.remove(ref.folder)


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
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # It is there, and another user's.
    return pid != os.getpid()


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
            f"Saving the checkpoint of step {step} to {storage.describe()} failed while {action()}: {reason}.{hint} {remains()}".rstrip()
        ) from error


def find_backend(name: str, plugins: Plugins) -> CheckpointBackend:
    """The backend that wrote a checkpoint, with default settings: reading never depends on them."""
    try:
        entry = plugins.registry("checkpoint backend").find(name)
    except UsageError as error:
        raise CheckpointError(f"The checkpoint was written by the backend {name!r}, which is not installed. {error}") from error
    return plugins.build(plugins.config_class(entry)())
