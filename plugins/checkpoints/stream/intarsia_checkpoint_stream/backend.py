"""The stream format: `data/rank-RRRRR-NNN.bin`, raw little-endian elements of boxes, row-major, one after the other.

A box is never split over files. Bytes between boxes are zero. The hash of a file is taken while it is written.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from intarsia.contracts import FileRecord, Piece, StateItem, Storage, Writer, WrittenPart

from intarsia_checkpoint_stream.config import StreamConfig

READ_BYTES = 64 << 20
"""Adjacent pieces are read together up to this many bytes."""

GAP_BYTES = 4096
"""Pieces whose distance is less than this are read together: it is at most padding or a small neighbour."""


class StreamFile:
    """A data file that is being written, with its running size and hash."""

    def __init__(self, storage: Storage, folder: str, name: str):
        self.name, self.size, self.digest = name, 0, hashlib.sha256()
        self.writer: Writer = storage.open(f"{folder}/{name}")

    def write(self, data: memoryview) -> None:
        """Append and hash."""
        self.writer.write(data)
        self.digest.update(data)
        self.size += len(data)

    def close(self) -> FileRecord:
        """Make it durable."""
        self.writer.close()
        return FileRecord(self.name, self.size, self.digest.hexdigest())


class StreamBackend:
    """See `intarsia.contracts.CheckpointBackend`."""

    def __init__(self, config: StreamConfig):
        self.config = config

    def write(self, storage: Storage, folder: str, rank: int, tensors: Iterable[tuple[StateItem, Any]]) -> WrittenPart:
        """One pass over the tensors; `tensors` may make them as it is iterated. Extra memory: none beyond what the storage keeps."""
        if sys.byteorder != "little":
            raise OSError("the stream backend writes on little-endian machines only")
        files: list[FileRecord] = []
        pieces: list[Piece] = []
        file: StreamFile | None = None
        try:
            for item, boxes in tensors:
                for box, tensor in boxes:
                    data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
                    if file is not None and file.size >= self.config.file_bytes:
                        files.append(file.close())
                        file = None
                    if file is None:
                        file = StreamFile(storage, folder, f"data/rank-{rank:05d}-{len(files):03d}.bin")
                    file.write(memoryview(bytes(-file.size % self.config.alignment)))
                    pieces.append(Piece(item.key, box.start, box.size, file.name, file.size, len(data)))
                    for start in range(0, len(data), self.config.chunk_bytes):
                        file.write(data[start : start + self.config.chunk_bytes])
            if file is not None:
                files.append(file.close())
        except BaseException:
            if file is not None:
                file.writer.abort()
            raise
        return WrittenPart(tuple(files), tuple(pieces))

    def read(self, storage: Storage, folder: str, pieces: Sequence[Piece], deliver: Callable[[Piece, memoryview], None]) -> None:
        """File by file in rising offsets; neighbouring pieces share one read."""
        for group in coalesce(pieces):
            start = group[0].offset
            length = max(piece.offset + piece.length for piece in group) - start
            data = memoryview(storage.read(f"{folder}/{group[0].file}", start, length))
            if len(data) != length:
                raise OSError(f"{group[0].file} ends at byte {start + len(data)}; {length} bytes from {start} were to be read")
            for piece in group:
                deliver(piece, data[piece.offset - start : piece.offset - start + piece.length])


def coalesce(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces that are near each other in one file."""
    group: list[Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        near = group and piece.file == group[0].file and piece.offset - end < GAP_BYTES
        if group and not (near and piece.offset + piece.length - group[0].offset <= READ_BYTES):
            yield group
            group = []
        end = max(end, piece.offset + piece.length) if group else piece.offset + piece.length
        group.append(piece)
    if group:
        yield group
