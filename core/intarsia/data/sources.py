"""The sources of documents that core brings: text files, JSON lines, and the Python standard library's own code."""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy

from intarsia.contracts import Document
from intarsia.data.config import JsonlConfig, StdlibConfig, TextConfig
from intarsia.data.files import FileRanges, decode, expand, fingerprint, split_ranges
from intarsia.data.records import to_document
from intarsia.errors import UsageError


class RangeIndex:
    """Where every document lies: number of its file, its number there, first byte, bytes. Built by one pass over the files, on first use."""

    def __init__(self, files: list[Path], separator: bytes):
        ranges = [(number, *piece) for number, file in enumerate(files) for piece in split_ranges(file, separator)]
        self.table = numpy.array(ranges, dtype=numpy.int64).reshape(-1, 4)


class FileSource:
    """What text and JSON lines have in common: files, and in them byte ranges."""

    def __init__(self, paths: tuple[str, ...], errors: str, kind: str, settings: tuple[object, ...]):
        if errors not in ("strict", "replace"):
            raise UsageError(f"{kind}: errors={errors!r} is unknown; it is strict or replace.")
        self.files = expand(paths, kind)
        self.errors = errors
        self._settings = (kind, errors, *settings)
        self._ranges = FileRanges()

    def fingerprint(self) -> str:
        """Over names, sizes and times of the files, and the settings."""
        return fingerprint(self.files, *self._settings)


class TextSource(FileSource):
    """Documents from text files: whole files, or the pieces between separators."""

    def __init__(self, config: TextConfig):
        super().__init__(config.paths, config.errors, "text", (config.separator,))
        self._separator = config.separator.encode()

    @functools.cached_property
    def _index(self) -> RangeIndex:
        return RangeIndex(self.files, self._separator)

    def __len__(self) -> int:
        return len(self._index.table) if self._separator else len(self.files)

    def __getitem__(self, index: int) -> Document:
        number, _, start, length = map(int, self._index.table[index]) if self._separator else (index, 0, 0, -1)
        data = self._ranges.read(self.files[number], start, length)
        return Document(text=decode(data, self.errors, f"{self.files[number]}, from byte {start} on"))


class JsonlSource(FileSource):
    """Documents from files with one JSON object on each line; any line is found by its byte offset."""

    def __init__(self, config: JsonlConfig):
        super().__init__(config.paths, config.errors, "jsonl", (config.field, config.trained))
        self._config = config

    @functools.cached_property
    def _index(self) -> RangeIndex:
        return RangeIndex(self.files, b"\n")

    def __len__(self) -> int:
        return len(self._index.table)

    def __getitem__(self, index: int) -> Document:
        number, line, start, length = map(int, self._index.table[index])
        where = f"{self.files[number]}:{line + 1}"
        text = decode(self._ranges.read(self.files[number], start, length), self.errors, where)
        try:
            record = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{where}: not valid JSON: {error}.") from None
        return to_document(record, self._config.field, where, self._config.trained)


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
