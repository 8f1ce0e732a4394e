"""Weights through files that are mapped into memory: every trainer rank writes its boxes, generators map and copy.

A version lies in one file: a page that says which version it is, what the tensors are called and where they begin, then the tensors, whole, each at a multiple of
`ALIGNMENT` bytes. Files are made once and used again for later versions. While a version is written its page says that there is none; it says the version
again when every rank has written. Rank 0 holds a lock on each file as long as it lives, by which the next start knows the files of the dead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from intarsia.contracts import Box
from intarsia.errors import DistributedError, UsageError, did_you_mean
from intarsia.layout import slices
from torch import Tensor

from intarsia_rl.contracts import WeightVersion
from intarsia_rl.weights.config import SharedMemoryConfig
from intarsia_rl.weights.held import Described, Held

NAME = "shared_memory"
SHARED = Path("/dev/shm")
PREFIX = "intarsia-weights"
ALIGNMENT = 128
PAGE = 4096
_HEAD = struct.Struct("<16sqq")
_MAGIC = b"intarsia-weights"
_NONE = -1


class SharedMemory:
    """See `intarsia_rl.contracts.WeightTransport`. The entry's target."""

    reader: ClassVar[str] = "intarsia_rl.weights.shared_memory:read"

    def __init__(self, config: SharedMemoryConfig, directory: str | os.PathLike[str]) -> None:
        if config.versions < 2:
            raise UsageError(f"weights.versions is {config.versions}; it must be at least 2: one is read while the next is written.")
        self._config, self._directory = config, Path(directory)
        self._held: Held | None = None
        self._files: dict[str, _File] = {}
        self._published: WeightVersion | None = None
        self._folder: Path | None = None

    def publish(self, version: int, parts: Mapping[str, Any]) -> WeightVersion | None:
        """Copy the weights into a file that nobody reads any more. See `WeightTransport.publish`."""
        held = self._held = self._held or Held(parts)
        file = self._choose(held, version)
        if file is None:
            return self._published
        digests = held.digests(held.copy_into(lambda piece: file.tensor(piece.name)[slices(piece.box)]))
        if held.world.rank:
            return None
        file.write_version(version)
        file.version = version
        location = {"path": str(file.path), "version": version, "machine": machine()}
        self._published = WeightVersion(version, NAME, location, digests, held.dtypes(), held.shapes())
        return self._published

    def retire(self, version: int) -> None:
        """Use the version's file for another one. What matters is the call on rank 0."""
        for file in self._files.values():
            if file.version == version:
                file.version = _NONE
        if self._published is not None and self._published.version == version:
            self._published = None

    def close(self) -> None:
        """Unmap and remove the files. Readers that have them mapped find that the version is gone."""
        for file in self._files.values():
            file.remove()
        self._files.clear()
        self._published = None

    # ------------------------------------------------------------ files

    def _choose(self, held: Held, version: int) -> _File | None:
        """The file to write into, on all ranks; None where the version is published already. Nobody takes what it holds for a version from now on."""
        answer: dict[str, Any] = {}
        if held.world.rank == 0:
            try:
                answer = self._pick(held, version)
            except UsageError as error:
                answer = {"problem": str(error)}
        answer = held.world.broadcast_json(answer, what="file of weights")
        if "problem" in answer:
            raise UsageError(answer["problem"])
        if "path" not in answer:
            return None
        for path in answer["gone"]:
            if path in self._files:
                self._files.pop(path).remove()
        path = answer["path"]
        if answer["new"]:
            missing = False
            try:
                self._files.setdefault(path, _File.open(Path(path)))
            except FileNotFoundError:
                missing = True
            if any(held.world.gather_json(missing, what="files of weights")):
                raise UsageError(
                    f"weights=shared_memory: not every trainer rank finds {path}. All of them must run on one machine and share that folder; choose "
                    "weights=socket between machines."
                )
        return self._files[path]

    def _pick(self, held: Held, version: int) -> dict[str, Any]:
        """On rank 0: a file that is free, else a new one, else that of the oldest version."""
        if self._published is not None and version <= self._published.version:
            if version == self._published.version:
                return {}
            raise UsageError(f"Version {version} of the weights cannot be published after version {self._published.version}.")
        free = [file for file in self._files.values() if file.version == _NONE]
        gone = free[1:] if len(self._files) > 2 else []
        for file in gone:
            self._files.pop(str(file.path)).remove()
        is_new = not free and len(self._files) < self._config.versions
        if is_new:
            file = self._make(held)
            self._files[str(file.path)] = file
        else:
            file = free[0] if free else min(self._files.values(), key=lambda one: one.version)
        file.version = _NONE
        file.write_version(_NONE)
        return {"path": str(file.path), "new": is_new, "gone": [str(one.path) for one in gone]}

    def _make(self, held: Held) -> _File:
        table, size = lay_out(held.described)
        if self._folder is None:
            folders = [Path(self._config.folder)] if self._config.folder else [SHARED, self._directory / "weights"]
        else:
            folders = [self._folder]
        problem = ""
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                remove_stale(folder)
                # Two versions have to fit before the first one is worth its place.
                made = _File.make(folder, table, size, spare=size if self._folder is None else 0)
                self._folder = folder
                return made
            except OSError as error:
                problem = f"{folder}: {error.strerror or error}"
        raise UsageError(
            f"There is no room for {size / 2**20:.0f} MiB of weights ({problem}). Set weights.folder to a place that has room."
        )


# ---------------------------------------------------------------- files


def lay_out(described: Mapping[str, Described]) -> tuple[bytes, int]:
    """The table of a file, as bytes of JSON, and the bytes of the whole file."""
    rows, offset = [], 0
    for name, one in described.items():
        rows.append([name, list(one.shape), one.dtype, offset])
        numel = 1
        for size in one.shape:
            numel *= size
        offset += -(-numel * one.torch_dtype.itemsize // ALIGNMENT) * ALIGNMENT
    text = json.dumps(rows).encode()
    return text, _begin(len(text)) + offset


def _begin(table: int) -> int:
    """Where tensors begin in a file whose table takes so many bytes."""
    return -(-(PAGE + table) // PAGE) * PAGE


class _File:
    """A mapped file. `version` is what this rank knows it to hold, `_NONE` where it is free; `lock` keeps it from being taken for a dead run's."""

    def __init__(self, path: Path, mapping: mmap.mmap, lock: int | None) -> None:
        self.path, self.version = path, _NONE
        self._mapping = mapping
        # Also at the interpreter's end, where nobody has closed the transport.
        self._release = weakref.finalize(self, _release, path, lock, os.getpid()) if lock is not None else None
        _, _, length = _HEAD.unpack_from(mapping)
        self._tensors = _tensors(mapping, length)

    @classmethod
    def make(cls, folder: Path, table: bytes, size: int, spare: int) -> _File:
        """A new file, locked, with its table. OSError where there is no room for it and `spare` more bytes."""
        while True:
            path = folder / f"{PREFIX}-{os.getuid()}-{secrets.token_hex(8)}"
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:  # Else a start that clears away came between making and locking.
                break
            os.close(lock)
        try:
            os.posix_fallocate(lock, 0, size + spare)
            os.ftruncate(lock, size)
            os.pwrite(lock, table, PAGE)
            os.pwrite(lock, _HEAD.pack(_MAGIC, _NONE, len(table)), 0)
            return cls(path, mmap.mmap(lock, size), lock)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(lock)
            raise

    @classmethod
    def open(cls, path: Path) -> _File:
        """A file that rank 0 has made."""
        with path.open("r+b") as file:
            return cls(path, mmap.mmap(file.fileno(), 0), None)

    def tensor(self, name: str) -> Tensor:
        """A tensor in the mapped memory."""
        return self._tensors[name]

    def write_version(self, version: int) -> None:
        """Say what the file holds."""
        self._mapping[16:24] = struct.pack("<q", version)

    def remove(self) -> None:
        """Give the name back, and the memory where nobody else has it mapped. May be called twice."""
        self._tensors = {}
        if self._release is not None and self._release.alive:
            self.write_version(_NONE)
            self._release()
        with contextlib.suppress(BufferError):  # A tensor of it is still somewhere: it goes with that.
            self._mapping.close()


def _release(path: Path, lock: int, process: int) -> None:
    """Not in a process that was forked from the one that made the file."""
    if os.getpid() == process:
        path.unlink(missing_ok=True)
        os.close(lock)


def _tensors(mapping: mmap.mmap, length: int) -> dict[str, Tensor]:
    begin, found = _begin(length), {}
    for name, shape, dtype, offset in json.loads(mapping[PAGE : PAGE + length]):
        kind, numel = getattr(torch, dtype), 1
        for size in shape:
            numel *= size
        flat = torch.frombuffer(mapping, dtype=kind, count=numel, offset=begin + offset) if numel else torch.empty(0, dtype=kind)
        found[name] = flat.view(shape)
    return found


def remove_stale(folder: Path) -> list[Path]:
    """Remove this user's files of runs that are dead: those that nobody has locked. Returns them."""
    removed = []
    for path in folder.glob(f"{PREFIX}-{os.getuid()}-*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        finally:
            os.close(file)
    return removed


def machine() -> str:
    """What tells machines apart: the kernel's identity of this boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


# ---------------------------------------------------------------- the generator's side


def read(
    location: Mapping[str, Any], names: Sequence[str], boxes: Mapping[str, Sequence[Box]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of whole tensors, or of the `boxes` of those names that it has, one after the other and each of its box's shape.

    Values lie in the shared memory and hold until the next one is asked for: copy them. DistributedError where the version is not (or no longer) there; it may come after the
    last value: what was copied before is a mix then.
    """
    version, path = location["version"], location["path"]
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        where = "" if location["machine"] == machine() else " The trainer runs on another machine: choose weights=socket."
        raise DistributedError(f"Version {version} of the weights is not at {path} any more.{where}") from None

    def check() -> None:
        magic, found, _ = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
        if magic != _MAGIC or found != version:
            state = f"version {found}" if found >= 0 else "none that is whole"
            raise DistributedError(f"{path} does not hold version {version} of the weights (any more), but {state}: take a newer one.")

    try:
        check()
        # Private: nothing that is written here gets into the file.
        mapping = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        yield from _chosen(_tensors(mapping, _HEAD.unpack_from(mapping)[2]), names, boxes or {})
        check()
    finally:
        os.close(file)


def _chosen(tensors: Mapping[str, Tensor], names: Sequence[str], boxes: Mapping[str, Sequence[Box]]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        if name not in tensors:
            raise UsageError(f"The published weights have no tensor {name!r}. {did_you_mean(name, tensors)}")
        if name in boxes:
            for box in boxes[name]:
                yield name, tensors[name][slices(box)]
        else:
            yield name, tensors[name]
