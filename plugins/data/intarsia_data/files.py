"""Finding and reading files: globs, fingerprints, byte ranges of plain and gzipped files."""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from intarsia.errors import UsageError

CHUNK_BYTES = 1 << 22


def expand(patterns: Sequence[str], what: str) -> list[Path]:
    """The files that the globs match, each once, in the order of the patterns and sorted within each.

    Errors: UsageError for a pattern that matches nothing, and for a folder. Stability: stable.
    """
    if not patterns:
        raise UsageError(f"{what}: no paths are given. Set `paths` to files or globs.")
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        files = [Path(match) for match in matches if not os.path.isdir(match)]
        if not files:
            reason = f"is a folder; name its files, as in {pattern.rstrip('/')}/**/*" if matches else "matches no file"
            raise UsageError(f"{what}: {pattern!r} {reason} (looked from {os.getcwd()}).")
        found.update(dict.fromkeys(files))
    return list(found)


def fingerprint(files: Sequence[Path], *settings: object) -> str:
    """A hash over names, sizes and modification times of files and over settings: cheap, and changed by any rewrite. Stability: stable."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for file in files:
        stat = file.stat()
        digest.update(os.fsencode(file) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def decode(data: bytes, errors: str, where: str) -> str:
    """UTF-8 text; `where` names the file and the offset of `data` in it. Errors: UsageError with the byte's offset."""
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: byte {error.start} ({data[error.start]:#04x}) is not UTF-8. Convert the file, or set errors=replace to put U+FFFD there."
        ) from None


class FileRanges:
    """Byte ranges of files, of the decompressed content where the name ends in .gz. Keeps the last file open; safe to use from threads."""

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), functools.lru_cache(maxsize=1)(_open)

    def read(self, path: Path, start: int = 0, length: int = -1) -> bytes:
        """`length` bytes from `start`; -1: to the end. Errors: UsageError that names the file."""
        with self._lock, _named(path):
            file = self._open(path)
            file.seek(start)
            return file.read(length)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """A file that cannot be read is the user's to mend: say which."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise UsageError(f"{path}: cannot be read: {error}.") from error


def _open(path: Path) -> IO[bytes]:
    """Open for reading, through gzip where the name says so."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def split_ranges(path: Path, separator: bytes) -> Iterator[tuple[int, int, int]]:
    """(number from 0, start, length) of the pieces between separators, without blank ones; reads in chunks.

    Errors: UsageError that names the file.
    """
    number, start, rest = 0, 0, b""
    with _named(path), _open(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            *pieces, rest = (rest + chunk).split(separator)
            for piece in pieces:
                if piece.strip():
                    yield number, start, len(piece)
                number, start = number + 1, start + len(piece) + len(separator)
    if rest.strip():
        yield number, start, len(rest)
