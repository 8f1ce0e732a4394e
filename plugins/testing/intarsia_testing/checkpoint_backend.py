"""Conformance of checkpoint backends. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestColumns(CheckpointBackendConformance):
        entry = "my-distribution:columns"

The promises are those of `intarsia.contracts.CheckpointBackend`.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from intarsia.contracts import Box, CheckpointBackend, FileRecord, Piece, StateItem, WrittenPart
from intarsia.layout import DTYPE_BYTES
from intarsia.plugins import current

from intarsia_testing.base import Conformance
from intarsia_testing.doubles import FaultyStorage, MemoryStorage
from intarsia_testing.promise import broken

Work = list[tuple[StateItem, list[tuple[Box, torch.Tensor]]]]


def noise(shape: Sequence[int], dtype: str, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits (random truths for bool: other bytes are none)."""
    generator = torch.Generator().manual_seed(seed + 1)
    if dtype == "bool":
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    count = DTYPE_BYTES[dtype]
    for size in shape:
        count *= size
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(getattr(torch, dtype)).view(tuple(shape))


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def item(name: str, tensor: torch.Tensor) -> StateItem:
    """An item as core hands it over."""
    return StateItem("model", name, "tensor", tensor)


class CheckpointBackendConformance(Conformance):
    """Every promise of `intarsia.contracts.CheckpointBackend`, one test each.

    Set `entry`, and `config` or `configs` where the default settings are not all that should be tested. Or override `backends` when no
    entry offers them.
    """

    kind: ClassVar[str] = "checkpoint backend"

    def backends(self) -> list[CheckpointBackend]:
        """Freshly built backends under test."""
        return [current().build(config) for config in self.given_configs()]

    def read(self, backend: CheckpointBackend, storage: Any, pieces: Sequence[Piece]) -> dict[Piece, bytes]:
        """What the backend delivers, checked to be the pieces asked for, each once."""
        found: dict[Piece, bytes] = {}

        def deliver(piece: Piece, data: memoryview) -> None:
            if piece in found or piece not in pieces:
                broken("delivers each piece once", f"{piece} was delivered twice or never asked for.")
            found[piece] = bytes(data)

        backend.read(storage, "saving/x", pieces, deliver)
        if len(found) != len(pieces):
            broken("delivers each piece once", f"{len(pieces) - len(found)} of {len(pieces)} pieces were not delivered.")
        return found

    def round_trip(self, backend: CheckpointBackend, work: Work, rank: int = 0) -> tuple[MemoryStorage, WrittenPart]:
        """Write, check what the backend says of it, read back and compare."""
        storage = MemoryStorage()
        part = backend.write(storage, "saving/x", rank, iter(work))
        self.check_part(storage, part)
        want = {(entry.key, box.start, box.size): tensor for entry, boxes in work for box, tensor in boxes}
        have = {(piece.key, piece.box_start, piece.box_size): piece for piece in part.pieces}
        if len(have) != len(part.pieces) or sum(tensor.numel() for tensor in want.values()) != sum(
            self.count(piece) for piece in part.pieces
        ):
            broken("writes every box", f"{len(want)} boxes were to be written, {len(part.pieces)} pieces hold another number of elements.")
        found = self.read(backend, storage, list(part.pieces))
        for (key, start, size), piece in have.items():
            for (other, box_start, box_size), tensor in want.items():
                inside = other == key and all(
                    a <= s and s + n <= a + m for s, n, a, m in zip(start, size, box_start, box_size, strict=True)
                )
                if inside:
                    index = tuple(slice(s - a, s - a + n) for s, n, a in zip(start, size, box_start, strict=True))
                    if found[piece] != raw(tensor[index]):
                        broken(
                            "bytes come back",
                            f"{key} {tensor.dtype} {list(tensor.shape)}, box {start} + {size}: other bytes were read than written.",
                        )
                    break
            else:
                broken("writes every box", f"the piece {piece} lies in none of the boxes that were to be written.")
        return storage, part

    def count(self, piece: Piece) -> int:
        """Elements of a piece."""
        count = 1
        for size in piece.box_size:
            count *= size
        return count

    def check_part(self, storage: MemoryStorage, part: WrittenPart) -> None:
        """What the backend says of its files must be so."""
        names = {f"saving/x/{file.name}" for file in part.files}
        if set(storage.list()) != names:
            broken("lists its files", f"the folder holds {storage.list()}, the backend lists {sorted(names)}.")
        for file in part.files:
            data = storage.read(f"saving/x/{file.name}")
            if file != FileRecord(file.name, len(data), hashlib.sha256(data).hexdigest()):
                broken("lists its files", f"size or SHA-256 of {file.name} is not what the backend says.")
        sizes = {file.name: file.size for file in part.files}
        for piece in part.pieces:
            if piece.file not in sizes or piece.offset < 0 or piece.offset + piece.length > sizes[piece.file]:
                broken("pieces lie in its files", f"{piece} is not inside a file that the backend lists.")

    # ------------------------------------------------------------ promises

    def test_every_dtype_comes_back(self) -> None:
        for backend in self.backends():
            for dtype in DTYPE_BYTES:
                if hasattr(torch, dtype):
                    tensor = noise((5, 3), dtype)
                    self.round_trip(backend, [(item(f"w.{dtype}", tensor), [(Box.whole((5, 3)), tensor)])])

    def test_shapes_come_back(self) -> None:
        for backend in self.backends():
            work: Work = []
            for index, shape in enumerate([(), (1,), (7,), (1, 1, 1), (3, 5, 2), (1, 9), (129,)]):
                tensor = noise(shape, "float32", index)
                work.append((item(f"w{index}", tensor), [(Box.whole(shape), tensor)]))
            self.round_trip(backend, work)

    def test_uneven_boxes_come_back(self) -> None:
        for backend in self.backends():
            boxes = [Box((0, 4), (2, 3)), Box((2, 0), (1, 1)), Box((3, 1), (4, 6))]
            work: Work = [(item("w", torch.empty(0)), [(box, noise(box.size, "bfloat16", i)) for i, box in enumerate(boxes)])]
            self.round_trip(backend, work)

    def test_nothing_to_write(self) -> None:
        for backend in self.backends():
            empty: Work = [(item("w", torch.empty(0)), [])]
            for work in ([], empty):
                _, part = self.round_trip(backend, work)
                if part.pieces:
                    broken("nothing to write is ordinary", f"a rank without boxes has pieces: {part.pieces}.")

    def test_ranks_do_not_clash(self) -> None:
        for backend in self.backends():
            storage, names = MemoryStorage(), []
            for rank in (0, 1, 11, 100_000):
                tensor = noise((4,), "int64", rank)
                part = backend.write(storage, "saving/x", rank, iter([(item("w", tensor), [(Box((4 * rank,), (4,)), tensor)])]))
                names += [file.name for file in part.files]
            if len(set(names)) != len(names):
                broken("ranks do not clash", f"two ranks wrote a file of one name: {sorted(names)}.")

    def test_boxes_are_made_when_their_turn_comes(self) -> None:
        for backend in self.backends():
            alive: list[Any] = []

            def count(alive: list[Any] = alive) -> int:
                return sum(reference() is not None for reference in alive)

            def work(alive: list[Any] = alive, count: Any = count) -> Any:
                for index in range(6):
                    if count() > 2:
                        gc.collect()
                    if count() > 2:
                        broken("keeps no tensor", "earlier tensors are still alive while later ones are made: memory grows with the model.")
                    tensor = noise((1000,), "float32", index)
                    alive.append(weakref.ref(tensor))
                    yield item(f"w{index}", torch.empty(0)), [(Box.whole((1000,)), tensor)]
                    del tensor

            backend.write(MemoryStorage(), "saving/x", 0, work())

    def test_buffers_are_not_changed(self) -> None:
        for backend in self.backends():
            tensor = noise((50, 3), "float32")
            before = raw(tensor)
            self.round_trip(backend, [(item("w", tensor), [(Box.whole((50, 3)), tensor)])])
            if raw(tensor) != before:
                broken("buffers are not changed", "the tensor that was handed over was written to.")

    def test_parts_of_pieces_can_be_read(self) -> None:
        for backend in self.backends():
            tensor = noise((64, 16), "int32")
            storage, part = self.round_trip(backend, [(item("w", tensor), [(Box.whole((64, 16)), tensor)])])
            rows = []
            for piece in part.pieces:
                step = piece.length // piece.box_size[0]
                for row in range(0, piece.box_size[0], 3):
                    start = (piece.box_start[0] + row, *piece.box_start[1:])
                    rows.append(Piece(piece.key, start, (1, *piece.box_size[1:]), piece.file, piece.offset + row * step, step))
            for got, data in self.read(backend, storage, rows[::-1]).items():
                index = tuple(slice(a, a + n) for a, n in zip(got.box_start, got.box_size, strict=True))
                if data != raw(tensor[index]):
                    broken("parts of pieces can be read", f"row {got.box_start[0]} of a piece, asked for by its bytes, is not that row.")

    def test_reads_little_more_than_asked(self) -> None:
        for backend in self.backends():
            tensors = [noise((1 << 18,), "uint8", index) for index in range(8)]
            work: Work = [(item(f"w{index}", tensor), [(Box.whole(tensor.shape), tensor)]) for index, tensor in enumerate(tensors)]
            storage, part = self.round_trip(backend, work)
            counted = CountingStorage(storage)
            asked = [piece for piece in part.pieces if piece.key == "model/w3"]
            self.read(backend, counted, asked)
            if counted.bytes_read > 2 * sum(piece.length for piece in asked) + (64 << 10):
                broken("reads what is asked", f"for one tensor of 256 KiB among 2 MiB the backend read {counted.bytes_read} bytes.")

    def test_a_failed_write_leaves_no_half_file(self) -> None:
        for backend in self.backends():
            tensor = noise((1000,), "float32")
            work: Work = [(item("w", tensor), [(Box.whole((1000,)), tensor)])]
            for operation in ("open", "write", "close"):
                inner = MemoryStorage()
                storage = FaultyStorage(inner, 1, OSError(28, "No space left on device"), operations=(operation,))
                try:
                    backend.write(storage, "saving/x", 0, iter(work))
                except OSError:
                    pass
                else:
                    broken("a failed write raises", f"the storage failed at `{operation}` and write() returned as if all were well.")
                if inner.list():
                    broken("a failed write leaves no half file", f"after a failure at `{operation}` there is {inner.list()}.")

    def test_a_short_file_is_an_error(self) -> None:
        for backend in self.backends():
            tensor = noise((1000,), "float32")
            storage, part = self.round_trip(backend, [(item("w", tensor), [(Box.whole((1000,)), tensor)])])
            for name in storage.list():
                storage.files[name] = storage.files[name][:-9]
            try:
                self.read(backend, storage, list(part.pieces))
            except Exception:
                continue
            broken("a short file is an error", "the file ended before the piece did, and read() delivered something.")


class CountingStorage(FaultyStorage):
    """Counts the bytes that are read."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.bytes_read = 0

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read and count."""
        data = super().read(name, offset, length)
        self.bytes_read += len(data)
        return data
