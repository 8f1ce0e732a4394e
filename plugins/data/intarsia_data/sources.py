"""The sources of documents that core brings: text files, JSON lines, and the Python standard library's own code."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy
from intarsia.contracts import Document
from intarsia.errors import UsageError

from intarsia_data.config import JsonlConfig, StdlibConfig, TextConfig
from intarsia_data.files import FileRanges, decode, expand, fingerprint, split_ranges
from intarsia_data.records import parse_json, to_document


class FilesConfig(Protocol):
    """What `FileSource` reads of settings."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Files or globs."""

    @property
    def errors(self) -> str:
        """For bytes that are no UTF-8: strict or replace."""


class FileSource:
    """What text and JSON lines have in common: files, and in them byte ranges between separators (empty: each file is one). Stability: provisional."""

    def __init__(self, kind: str, config: FilesConfig, separator: bytes):
        if config.errors not in ("strict", "replace"):
            raise UsageError(f"{kind}: errors={config.errors!r} is unknown; it is strict or replace.")
        self.files = expand(config.paths, kind)
        self._config, self._separator, self._ranges = config, separator, FileRanges()

    @functools.cached_property
    def _places(self) -> numpy.ndarray:
        """Of every document the number of its file, its number there, first byte, bytes. One pass over the files, on first use."""
        if not self._separator:
            return numpy.array([(number, 0, 0, -1) for number in range(len(self.files))], dtype=numpy.int64)
        pieces = ((number, *piece) for number, file in enumerate(self.files) for piece in split_ranges(file, self._separator))
        return numpy.array(list(pieces), dtype=numpy.int64).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self._places)

    def file_of(self, index: int) -> Path:
        """The file in which document `index` lies."""
        return self.files[int(self._places[index][0])]

    def _text(self, index: int, where: str) -> tuple[str, str]:
        """The text of document `index`, and where it lies: `where` with the file, the line (from 1) and the first byte filled in."""
        file, piece, start, length = map(int, self._places[index])
        where = where.format(file=self.files[file], line=piece + 1, start=start)
        return decode(self._ranges.read(self.files[file], start, length), self._config.errors, where), where

    def fingerprint(self) -> str:
        """Over names, sizes and times of the files, and the settings."""
        return fingerprint(self.files, self._config)


class TextSource(FileSource):
    """Documents from text files: whole files, or the pieces between separators."""

    def __init__(self, config: TextConfig):
        super().__init__("text", config, config.separator.encode())

    def __getitem__(self, index: int) -> Document:
        return Document(text=self._text(index, "{file}, from byte {start} on")[0])


class JsonlSource(FileSource):
    """Documents from files with one JSON object on each line; any line is found by its byte offset."""

    def __init__(self, config: JsonlConfig):
        super().__init__("jsonl", config, b"\n")
        self._fields = config.field, config.trained

    def __getitem__(self, index: int) -> Document:
        text, where = self._text(index, "{file}:{line}")
        return to_document(parse_json(text, where), self._fields[0], where, self._fields[1])


class StdlibSource:
    """The .py files of the running Python's standard library, sorted by name, without tests, installed packages and machine-specific files."""

    _LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

    def __init__(self, config: StdlibConfig):
        if config.limit is not None and config.limit < 1:
            raise UsageError(f"stdlib: limit={config.limit} leaves no file; it must be at least 1, or none.")
        self.folder = Path(sysconfig.get_paths()["stdlib"])
        self.names = sorted(self._find())[: config.limit]
        if not self.names:
            raise UsageError(
                f"stdlib: {self.folder} holds no .py files (this Python may keep its library compiled or in an archive). "
                "Use another source, such as data.mixture.0.source=text, or a Python with its library's source."
            )

    def _find(self) -> Iterator[str]:
        """Names below the folder: the same on every machine with this version of Python."""
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in self._LEFT_OUT and not name.startswith("config-")]
            here = Path(folder).relative_to(self.folder)
            yield from ((here / name).as_posix() for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Document:
        try:
            return Document(text=(self.folder / self.names[index]).read_bytes().decode("utf-8", "replace"))
        except OSError as error:
            raise UsageError(f"stdlib: {self.folder / self.names[index]} cannot be read: {error}.") from error

    def fingerprint(self) -> str:
        """Over the version of Python and the files."""
        return fingerprint([self.folder / name for name in self.names], "stdlib", sys.version)
