"""A transport on CPUs: files in shared memory that every process of one host maps. For tests of what uses transports; it is slow and right."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from intarsia.comm import Combine, Communicator, Prepared, PreparedReduce
from intarsia.errors import UsageError
from torch import Tensor


class SharedMemoryTransport:
    """Ranks read each other's files; a fence is the communicator's barrier. It leaves reductions to the process group."""

    name = "shared_memory"

    def __init__(self) -> None:
        self.bytes_allocated = 0
        self._maps: list[list[Tensor]] = []

    def check(self, comm: Communicator) -> None:
        """UsageError on anything but a CPU."""
        if comm.device.type != "cpu":
            raise UsageError(f"The transport shared_memory serves CPU tensors, and group {comm.name!r} is on {comm.device}. Use none.")

    def empty(self, comm: Communicator, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements that the other processes can read; ordinary ones where there are none."""
        if comm.size == 1:
            return torch.empty(numel, dtype=dtype)
        sizes = comm.gather_json(numel * dtype.itemsize, "shared memory")
        folder = Path(comm.broadcast_json(tempfile.mkdtemp(prefix="transport-") if comm.rank == 0 else None, what="shared memory"))
        own = mapped(folder / str(comm.rank), sizes[comm.rank])
        comm.barrier("shared memory is there")
        self._maps.append([own if rank == comm.rank else mapped(folder / str(rank), size) for rank, size in enumerate(sizes)])
        comm.barrier("shared memory is mapped")
        if comm.rank == 0:
            shutil.rmtree(folder)
        self.bytes_allocated += own.numel()
        return own[: sizes[comm.rank]].view(dtype)

    def prepare_gather(self, comm: Communicator, local: Tensor, full: Tensor, counts: Sequence[int], what: str) -> Prepared | None:
        """Copies from the other ranks' files."""
        if comm.size == 1:
            return None
        starts = [maps[comm.rank].untyped_storage().data_ptr() for maps in self._maps]
        storage = local.untyped_storage().data_ptr()
        place = [starts.index(storage), local.storage_offset() * local.element_size()] if storage in starts else None
        places = comm.gather_json(place, f"prepare {what}")
        if any(each is None and count for each, count in zip(places, counts, strict=True)):
            return None
        sources = []
        for rank, (each, count) in enumerate(zip(places, counts, strict=True)):
            size = count * full.element_size()
            sources.append(self._maps[each[0]][rank][each[1] : each[1] + size] if size else torch.empty(0, dtype=torch.uint8))
        return CopiedGather(comm, local, full, counts, what, sources)

    def prepare_reduce_scatter(
        self, comm: Communicator, full: Tensor, counts: Sequence[int], what: str, combine: Combine, scratch: Tensor | None = None
    ) -> PreparedReduce | None:
        """None: the process group reduces."""
        return None

    def fence(self, comm: Communicator) -> None:
        """A barrier."""
        if comm.size > 1:
            comm.barrier("fence")


class CopiedGather(Prepared):
    """Done by `start`."""

    def __init__(
        self, comm: Communicator, local: Tensor, full: Tensor, counts: Sequence[int], what: str, sources: Sequence[Tensor]
    ) -> None:
        super().__init__(comm, "gather", what, full, counts, (full.numel() - local.numel()) * full.element_size())
        self._targets, self._sources = full.view(torch.uint8).split([source.numel() for source in sources]), sources

    def start(self) -> None:
        """Copy every part."""
        self.begin()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)

    def wait(self) -> None:
        """Nothing is left to do."""


def mapped(path: Path, size: int) -> Tensor:
    """A file of at least `size` bytes as uint8, made where it is missing."""
    return torch.from_file(str(path), shared=True, size=max(size, 1), dtype=torch.uint8)
