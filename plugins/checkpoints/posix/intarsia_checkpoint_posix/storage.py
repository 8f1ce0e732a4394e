"""Storage on a POSIX file system: files appear whole, folders move atomically, everything is synced."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import shutil
import uuid
from pathlib import Path

from intarsia.contracts import check_name
from intarsia.contracts.storage import PARTIAL

from intarsia_checkpoint_posix.config import PosixConfig


class PosixWriter:
    """A file under a partial name beside its final one until `close`."""

    def __init__(self, path: Path, fsync: bool):
        self._path = path
        self._partial = path.with_name(f".{uuid.uuid4().hex}{PARTIAL}")
        self._fsync = fsync
        self._file = open(self._partial, "xb", buffering=0)  # noqa: SIM115 (closed by close or abort)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data` (the kernel may take it in several bites)."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Sync, give the file its name, sync the folder; on an error nothing is left."""
        try:
            if self._fsync:
                os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)
            if self._fsync:
                sync_folder(self._path.parent)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Close and delete what was written."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make names in the folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PosixStorage:
    """See `intarsia.contracts.Storage`. `root` need not exist yet."""

    def __init__(self, root: str | os.PathLike[str], fsync: bool = True):
        self.root = Path(root)
        self.fsync = fsync

    def describe(self) -> str:
        """The root folder."""
        return str(self.root)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            if self.fsync:
                sync_folder(path.parent)

    def open(self, name: str) -> PosixWriter:
        """A writer of `name`, which exists when the writer is closed."""
        path = self._path(name)
        self._make_folder(path.parent)
        return PosixWriter(path, self.fsync)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset`."""
        try:
            with open(self._path(name), "rb") as file:
                file.seek(offset)
                return file.read(length)
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(error.errno, "no such file", name) from error

    def size(self, name: str) -> int:
        """Bytes in the file `name`."""
        path = self._path(name)
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return path.stat().st_size

    def list(self, prefix: str = "") -> list[str]:
        """Names of all finished files under the folder `prefix`."""
        start = self._path(prefix) if prefix else self.root
        found = []
        for folder, _, files in os.walk(start):
            relative = Path(folder).relative_to(self.root)
            found += [(relative / file).as_posix() for file in files if not file.endswith(PARTIAL)]
        return sorted(found)

    def folders(self, prefix: str = "") -> builtins.list[str]:
        """Names of the folders directly below the folder `prefix`, with finished files or without."""
        start = self._path(prefix) if prefix else self.root
        return sorted(path.name for path in start.iterdir() if path.is_dir()) if start.is_dir() else []

    def publish(self, source: str, destination: str) -> None:
        """One rename; the parents are synced."""
        old, new = self._path(source), self._path(destination)
        if not old.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", source)
        self._make_folder(new.parent)
        for folder, _, _ in os.walk(new, topdown=False):
            # Empty folders are no files. rmdir refuses others, so that of two publishers at once only one can win.
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        try:
            os.rename(old, new)
        except OSError as error:
            if new.exists():
                raise FileExistsError(errno.EEXIST, "the destination has files", destination) from error
            raise
        if self.fsync:
            sync_folder(new.parent)
            sync_folder(old.parent)

    def remove(self, prefix: str) -> None:
        """Delete a file or a folder."""
        path = self._path(prefix)
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        if self.fsync:
            sync_folder(path.parent)


def build(config: PosixConfig, root: str | os.PathLike[str]) -> PosixStorage:
    """The storage of the run whose directory (or location) is `root`."""
    return PosixStorage(Path(config.root).expanduser() / Path(root).resolve().name if config.root else root, config.fsync)
