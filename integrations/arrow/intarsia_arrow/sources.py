"""Documents from Parquet and Arrow files: an index of row groups, and the last row group read kept in memory.

Nothing but footers is read until a document is asked for; then the chosen columns of its row group are.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pyarrow
from intarsia.contracts import Document
from intarsia.errors import UsageError, did_you_mean
from intarsia_data.files import expand, fingerprint
from intarsia_data.records import to_document
from pyarrow import ipc, parquet

from intarsia_arrow.config import ArrowConfig, ParquetConfig

Result = TypeVar("Result")


class TableSource:
    """What both formats share: files made of groups of rows. A format gives the rows of each group of a file, and reads one group."""

    kind = ""

    def __init__(self, config: ParquetConfig | ArrowConfig):
        self.files = expand(config.paths, self.kind)
        self._column, self._trained = config.column, config.trained
        self._group = functools.lru_cache(maxsize=2)(self._checked_group)

    def fingerprint(self) -> str:
        """Over names, sizes and times of the files, and the columns."""
        return fingerprint(self.files, self.kind, self._column, self._trained)

    @functools.cached_property
    def _groups(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """(file, group, rows of the file before it) of every group that has rows, and how many rows end with each."""
        groups, rows = [], []
        for number, path in enumerate(self.files):
            counts = self._guarded(path, self.rows)
            for group, (count, before) in enumerate(zip(counts, itertools.accumulate(counts, initial=0), strict=False)):
                if count:
                    groups.append((number, group, before))
                    rows.append(count)
        return groups, list(itertools.accumulate(rows))

    def __len__(self) -> int:
        ends = self._groups[1]
        return ends[-1] if ends else 0

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)
        groups, ends = self._groups
        place = bisect.bisect_right(ends, index)
        file, group, before = groups[place]
        row = index - (ends[place - 1] if place else 0)
        record = {name: values[row].as_py() for name, values in self._group(file, group).items()}
        return to_document(record, self._column, f"{self.files[file]}, row {before + row}", self._trained)

    def _checked_group(self, file: int, group: int) -> dict[str, pyarrow.Array]:
        """The document's column of a group of rows, and the mask's where there is one."""
        path = self.files[file]
        names = self._guarded(path, self.columns)
        if self._column not in names:
            raise UsageError(
                f"{path}: there is no column {self._column!r}. Columns here: {', '.join(map(repr, names)) or 'none'}. {did_you_mean(self._column, names)}"
            )
        wanted = [name for name in dict.fromkeys((self._column, self._trained)) if name in names]
        table = self._guarded(path, lambda source: self.read(source, group, wanted))
        return {name: table.column(name) for name in wanted}

    def _guarded(self, path: Path, action: Callable[[Path], Result]) -> Result:
        """`action(path)`, with the file named when it cannot be read."""
        try:
            return action(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise UsageError(f"{path}: cannot be read as {self.kind}: {error}") from error

    def columns(self, path: Path) -> list[str]:
        """Names of the columns of a file."""
        raise NotImplementedError

    def rows(self, path: Path) -> list[int]:
        """Rows in each group of a file."""
        raise NotImplementedError

    def read(self, path: Path, group: int, names: list[str]) -> pyarrow.Table | pyarrow.RecordBatch:
        """The named columns of one group."""
        raise NotImplementedError


class ParquetSource(TableSource):
    """Parquet: groups are row groups, whose sizes are in the footer."""

    kind = "parquet"

    def columns(self, path: Path) -> list[str]:
        """From the schema."""
        return list(parquet.ParquetFile(path).schema_arrow.names)

    def rows(self, path: Path) -> list[int]:
        """From the footer."""
        metadata = parquet.ParquetFile(path).metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def read(self, path: Path, group: int, names: list[str]) -> pyarrow.Table:
        """One row group."""
        return parquet.ParquetFile(path).read_row_group(group, columns=names)


class ArrowSource(TableSource):
    """Arrow IPC, in file format (Feather 2 is the same) or stream format: groups are record batches, mapped and not copied."""

    kind = "arrow"

    def __init__(self, config: ArrowConfig):
        super().__init__(config)
        self._batches = functools.lru_cache(maxsize=2)(self._open)

    def _open(self, path: Path) -> list[pyarrow.RecordBatch]:
        """All record batches of a file, as views of the mapped file (decompressed where it is compressed)."""
        try:
            reader = ipc.open_file(pyarrow.memory_map(str(path)))
        except pyarrow.ArrowInvalid:
            return list(ipc.open_stream(pyarrow.memory_map(str(path))))
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]

    def columns(self, path: Path) -> list[str]:
        """Of the first batch; a file without batches has none."""
        batches = self._batches(path)
        return list(batches[0].schema.names) if batches else []

    def rows(self, path: Path) -> list[int]:
        """Of each batch."""
        return [batch.num_rows for batch in self._batches(path)]

    def read(self, path: Path, group: int, names: list[str]) -> pyarrow.RecordBatch:
        """One batch."""
        return self._batches(path)[group].select(names)
