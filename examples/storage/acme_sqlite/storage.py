"""A Storage in one SQLite file. Names are rows; a file's bytes are chunks, so that a range can be read without the rest. Torch-free.

A file appears with the row of its name, in one transaction when it is closed. Publishing is one UPDATE. SQLite syncs each transaction.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from intarsia.contracts import check_name

from acme_sqlite.config import SQLiteConfig

CHUNK_BYTES = 1 << 20
SCHEMA = """
CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, file TEXT NOT NULL, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (file TEXT, number INTEGER, data BLOB NOT NULL, PRIMARY KEY (file, number));
"""
UNDER = "(name = :name OR substr(name, 1, length(:name) + 1) = :name || '/')"
"""A row's name is `:name`, or lies in the folder of that name."""


class SQLiteWriter:
    """Chunks of a file that has no name until `close`."""

    def __init__(self, storage: SQLiteStorage, name: str) -> None:
        self._storage, self._name, self._file = storage, name, uuid.uuid4().hex
        self._buffer, self._number, self._size = bytearray(), 0, 0

    def write(self, data: bytes | memoryview) -> None:
        """Append; whole chunks go to the database."""
        self._buffer += memoryview(data).cast("B")
        while len(self._buffer) >= CHUNK_BYTES:
            self._put(self._buffer[:CHUNK_BYTES])
            del self._buffer[:CHUNK_BYTES]

    def _put(self, chunk: bytearray) -> None:
        with self._storage.transaction() as database:
            database.execute("INSERT INTO chunks VALUES (?, ?, ?)", (self._file, self._number, bytes(chunk)))
        self._number, self._size = self._number + 1, self._size + len(chunk)

    def close(self) -> None:
        """Write the rest and give the file its name, in place of any earlier one."""
        self._put(self._buffer)
        with self._storage.transaction() as database:
            database.execute("DELETE FROM chunks WHERE file IN (SELECT file FROM names WHERE name = ?)", (self._name,))
            database.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?)", (self._name, self._file, self._size))

    def abort(self) -> None:
        """Delete what was written."""
        try:
            with self._storage.transaction() as database:
                database.execute("DELETE FROM chunks WHERE file = ? AND file NOT IN (SELECT file FROM names)", (self._file,))
        except OSError:
            pass  # chunks without a name are never seen


class SQLiteStorage:
    """See `intarsia.contracts.Storage`. Each operation opens the database anew, so that threads and processes share nothing else."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s

    @contextmanager
    def transaction(self, write: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction; errors of the database are OSErrors."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=self.timeout_s, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = FULL")
                database.executescript(SCHEMA)
                database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    yield database
                except BaseException:
                    database.execute("ROLLBACK")
                    raise
                database.execute("COMMIT")
        except sqlite3.Error as error:
            raise OSError(errno.EIO, f"SQLite: {error}", str(self.path)) from error

    def describe(self) -> str:
        """The database."""
        return f"sqlite:{self.path}"

    def open(self, name: str) -> SQLiteWriter:
        """A writer of `name`."""
        return SQLiteWriter(self, check_name(name))

    def _find(self, database: sqlite3.Connection, name: str) -> tuple[str, int]:
        row = database.execute("SELECT file, size FROM names WHERE name = ?", (check_name(name),)).fetchone()
        if row is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return row

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """The chunks that hold the range, cut to it."""
        with self.transaction(write=False) as database:
            file, size = self._find(database, name)
            end = size if length is None else min(size, offset + length)
            numbers = (file, offset // CHUNK_BYTES, (end - 1) // CHUNK_BYTES)
            rows = database.execute("SELECT data FROM chunks WHERE file = ? AND number BETWEEN ? AND ? ORDER BY number", numbers)
            skip = offset % CHUNK_BYTES
            return b"".join(data for (data,) in rows)[skip : skip + max(0, end - offset)]

    def size(self, name: str) -> int:
        """Bytes in `name`."""
        with self.transaction(write=False) as database:
            return self._find(database, name)[1]

    def list(self, prefix: str = "") -> list[str]:
        """Names in the folder."""
        with self.transaction(write=False) as database:
            where = f"WHERE {UNDER} AND name != :name" if prefix else ""
            rows = database.execute(f"SELECT name FROM names {where}", {"name": check_name(prefix) if prefix else ""})
            return sorted(name for (name,) in rows)

    def publish(self, source: str, destination: str) -> None:
        """Rename a folder's rows."""
        names = {"name": check_name(source), "to": check_name(destination)}
        with self.transaction() as database:
            if database.execute(f"SELECT 1 FROM names WHERE {UNDER} LIMIT 1", {"name": destination}).fetchone():
                raise FileExistsError(errno.EEXIST, "the destination has files", destination)
            moved = database.execute(
                f"UPDATE names SET name = :to || substr(name, length(:name) + 1) WHERE {UNDER} AND name != :name", names
            )
            if not moved.rowcount:
                raise FileNotFoundError(errno.ENOENT, "no such folder", source)

    def remove(self, prefix: str) -> None:
        """Delete names and their chunks."""
        with self.transaction() as database:
            name = {"name": check_name(prefix)}
            database.execute(f"DELETE FROM chunks WHERE file IN (SELECT file FROM names WHERE {UNDER})", name)
            database.execute(f"DELETE FROM names WHERE {UNDER}", name)


def build(config: SQLiteConfig, root: str | os.PathLike[str]) -> SQLiteStorage:
    """The storage in the folder `root`."""
    return SQLiteStorage(Path(root) / config.file, config.timeout_s)
