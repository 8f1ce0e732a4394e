"""Test doubles of storages: in memory, slow, and dying at any chosen operation."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

from intarsia.contracts import Storage, Writer


class Killed(BaseException):
    """What a FaultyStorage raises for a process that dies: no `except Exception` stops it."""


class MemoryWriter:
    """A file of a MemoryStorage that exists when it is closed."""

    def __init__(self, storage: MemoryStorage, name: str):
        self._storage, self._name, self._data = storage, name, bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        self._data += memoryview(data).cast("B")

    def close(self) -> None:
        """Let the file appear."""
        with self._storage.lock:
            self._storage.files[self._name] = bytes(self._data)

    def abort(self) -> None:
        """Forget it."""
        self._data.clear()


class MemoryStorage:
    """A Storage in a dict: `files` maps names to bytes. Keeps every promise of the contract but that of outliving the process."""

    def __init__(self, name: str = "memory"):
        self.name = name
        self.files: dict[str, bytes] = {}
        self.lock = threading.RLock()

    def describe(self) -> str:
        """`memory:NAME`."""
        return f"memory:{self.name}"

    def _check(self, name: str) -> str:
        if "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"{name!r} is not a storage name")
        return name

    def open(self, name: str) -> MemoryWriter:
        """A writer."""
        return MemoryWriter(self, self._check(name))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Part of a file."""
        with self.lock:
            if self._check(name) not in self.files:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            return self.files[name][offset : None if length is None else offset + length]

    def size(self, name: str) -> int:
        """Bytes in a file."""
        return len(self.read(name))

    def list(self, prefix: str = "") -> list[str]:
        """Names under a folder."""
        start = f"{self._check(prefix)}/" if prefix else ""
        with self.lock:
            return sorted(name for name in self.files if name.startswith(start))

    def publish(self, source: str, destination: str) -> None:
        """Rename all files under `source` at once."""
        with self.lock:
            names = self.list(source)
            if not names:
                raise FileNotFoundError(errno.ENOENT, "no such folder", source)
            if self.list(destination) or destination in self.files:
                raise FileExistsError(errno.EEXIST, "the destination has files", destination)
            for name in names:
                self.files[destination + name[len(source) :]] = self.files.pop(name)

    def remove(self, prefix: str) -> None:
        """Delete a file or a folder."""
        with self.lock:
            for name in [*self.list(prefix), prefix]:
                self.files.pop(name, None)


class WrappedWriter:
    """A writer whose calls go through a function first."""

    def __init__(self, inner: Writer, name: str, before: Callable[[str, str], None]):
        self._inner, self._name, self._before = inner, name, before

    def write(self, data: bytes | memoryview) -> None:
        """Write; a process that dies here leaves half of the data."""
        try:
            self._before("write", self._name)
        except Killed:
            self._inner.write(memoryview(data).cast("B")[: len(data) // 2])
            raise
        self._inner.write(data)

    def close(self) -> None:
        """Close."""
        self._before("close", self._name)
        self._inner.close()

    def abort(self) -> None:
        """Abort; a dead process does not."""
        try:
            self._before("abort", self._name)
        except Killed:
            return
        self._inner.abort()


class WrappedStorage:
    """A Storage that hands each operation (`open`, `write`, `close`, `publish`, `remove`, `read`, `size`, `list`) and its name to `before` first."""

    def __init__(self, inner: Storage):
        self.inner = inner

    def before(self, operation: str, name: str) -> None:
        """Called before each operation; what it raises replaces the operation."""

    def describe(self) -> str:
        """The inner storage's."""
        return self.inner.describe()

    def open(self, name: str) -> WrappedWriter:
        """Open."""
        self.before("open", name)
        return WrappedWriter(self.inner.open(name), name, self.before)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read."""
        self.before("read", name)
        return self.inner.read(name, offset, length)

    def size(self, name: str) -> int:
        """Size."""
        self.before("size", name)
        return self.inner.size(name)

    def list(self, prefix: str = "") -> list[str]:
        """List."""
        self.before("list", prefix)
        return self.inner.list(prefix)

    def publish(self, source: str, destination: str) -> None:
        """Publish; a process that dies here has moved half of the files, as storages do that cannot rename a folder."""
        try:
            self.before("publish", source)
        except Killed:
            names = self.inner.list(source)
            for name in names[: (len(names) + 1) // 2]:
                writer = self.inner.open(destination + name[len(source) :])
                writer.write(self.inner.read(name))
                writer.close()
                self.inner.remove(name)
            raise
        self.inner.publish(source, destination)

    def remove(self, prefix: str) -> None:
        """Remove; a process that dies here has deleted half of the files."""
        try:
            self.before("remove", prefix)
        except Killed:
            names = self.inner.list(prefix)
            for name in names[: (len(names) + 1) // 2]:
                self.inner.remove(name)
            raise
        self.inner.remove(prefix)


CHANGES = ("open", "write", "close", "publish", "remove")
"""Operations that change a storage."""


class FaultyStorage(WrappedStorage):
    """Fails at the `fail_at`-th (from 1) of the `operations`, with `error`.

    With `error` None the process dies there: `Killed` is raised, and by every later operation, so that no clean-up runs. With an
    exception that one operation raises it, and, if `forever`, all later ones do. `match` restricts what is counted to names that contain it. `log` holds
    what was counted.
    """

    def __init__(
        self,
        inner: Storage,
        fail_at: int = 0,
        error: Exception | None = None,
        operations: tuple[str, ...] = CHANGES,
        match: str = "",
        forever: bool = False,
    ):
        super().__init__(inner)
        self.fail_at, self.error, self.operations, self.match, self.forever = fail_at, error, operations, match, forever
        self.log: list[tuple[str, str]] = []
        self.dead = False
        self._lock = threading.Lock()

    def before(self, operation: str, name: str) -> None:
        """Count, and fail where it is time."""
        with self._lock:
            if self.dead:
                raise Killed(f"{operation} {name}: the process is dead")
            if operation not in self.operations or self.match not in name:
                return
            self.log.append((operation, name))
            due = len(self.log) >= self.fail_at if self.forever else len(self.log) == self.fail_at
            if not self.fail_at or not due:
                return
            if self.error is not None:
                raise self.error
            self.dead = True
            raise Killed(f"{operation} {name}: killed")


class SlowStorage(WrappedStorage):
    """Sleeps `seconds_s` before each write, or, with a `gate`, waits there until the gate is set. `waiting` is set once a write has come that far."""

    def __init__(self, inner: Storage, seconds_s: float = 0.05, gate: threading.Event | None = None):
        super().__init__(inner)
        self.seconds_s, self.gate, self.waiting = seconds_s, gate, threading.Event()

    def before(self, operation: str, name: str) -> None:
        """Sleep or wait."""
        if operation == "write":
            self.waiting.set()
            if self.gate is not None:
                self.gate.wait(600)
            else:
                time.sleep(self.seconds_s)
