"""The transport `copy_engine`: every rank pulls what it needs out of its peers' memory, one copy for each peer.

A copy between GPUs runs on a copy engine and takes no compute unit, where a process group's kernel takes several from the model for as long as it
lasts. What a process group does by waiting inside its kernels, ranks do here by a barrier on the device: `fence`, and two of them in each exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from intarsia.comm import Combine, Communicator, Prepared, PreparedReduce, Statistic
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_comms.config import CopyEngineConfig
from intarsia_comms.copies import exchange_copies, gather_copies, received_at, starts
from intarsia_comms.symmetric import Block, DeviceMemory, Memory

Pair = tuple[Tensor, Tensor]

ALIGNMENT = 512
FENCE, EXCHANGE = 0, 1
"""Channels of a block's barriers: fences and exchanges of one communicator may be on different streams."""


def build(config: CopyEngineConfig) -> CopyEngine:
    """The transport of the recipe."""
    return CopyEngine()


class Pulled:
    """What both calls do besides their copies: count, be timed and be watched, as calls of a process group are."""

    comm: Communicator
    statistic: Statistic
    record: dict[str, Any]
    pairs: Sequence[Pair]
    """(destination, source) as bytes."""
    is_recordable: ClassVar[bool] = True
    """On CUDA a start may be recorded as a graph: buffers are permanent and nothing is allocated. Several copies then cost the host one launch."""
    event: Any = None
    """Marks the end of a run; None on CPU, where a run is over when `start` returns."""

    def wait(self) -> None:
        """Nothing: the stream orders what follows."""

    def begun(self) -> Any:
        """The event from which the run's time is measured, if it is."""
        if self.event is None or not self.comm.timed or torch.cuda.is_current_stream_capturing():
            return None
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        return begin

    def ended(self, begin: Any) -> None:
        """Let the communicator see that the run comes to its end."""
        if self.event is None or torch.cuda.is_current_stream_capturing():
            return
        end = self.event
        if begin is not None:
            end = torch.cuda.Event(enable_timing=True)
            self.comm.time_later(self.statistic, begin, end)
        end.record()
        self.comm.watch_event(end, self.record)


class PulledGather(Pulled, Prepared):
    """A gather as copies; nothing but the copies is enqueued."""

    def __init__(self, comm: Communicator, full: Tensor, counts: Sequence[int], what: str, moved: int, pairs: Sequence[Pair]) -> None:
        super().__init__(comm, "gather", what, full, counts, moved)
        self.pairs, self.event = tuple(pairs), torch.cuda.Event() if full.is_cuda else None

    def start(self) -> None:
        """Enqueue the copies."""
        self.begin()
        begin = self.begun()
        for destination, source in self.pairs:
            destination.copy_(source)
        self.ended(begin)


class PulledReduce(Pulled, PreparedReduce):
    """An exchange of parts as copies between two barriers, and their combination."""

    def __init__(
        self,
        comm: Communicator,
        full: Tensor,
        counts: Sequence[int],
        what: str,
        moved: int,
        pairs: Sequence[Pair],
        signals: Block,
        parts: Sequence[Tensor],
        combine: Combine,
    ) -> None:
        super().__init__(comm, "reduce", what, full, counts, moved)
        self.pairs, self.event = tuple(pairs), torch.cuda.Event() if full.is_cuda else None
        self._signals, self._parts, self._combine = signals, parts, combine

    def start(self, out: Tensor) -> None:
        """Enqueue: when every rank has filled its buffer, fetch this rank's parts; when every rank has fetched, combine. What the stream does
        afterwards may change the buffer."""
        self.begin()
        begin = self.begun()
        self._signals.barrier(EXCHANGE)
        for destination, source in self.pairs:
            destination.copy_(source)
        self._signals.barrier(EXCHANGE)
        self.ended(begin)
        self._combine(self._parts, out)


class CopyEngine:
    """The transport. Memory that it has given out lives as long as it does.

    Its methods but `fence` are collectives on the host, for when things are built: every rank calls them in the same order.
    In a group of one there is nothing to move: it checks nothing, gives ordinary memory and leaves the rest to the communicator.
    """

    name = "copy_engine"

    def __init__(self, memory: Memory | None = None) -> None:
        self.bytes_allocated = 0
        """Bytes of the device that it has taken, which no statistic of torch's allocator shows."""
        self._memory = memory or DeviceMemory()
        self._blocks: dict[tuple[int, ...], list[Block]] = {}
        # Of each communicator: its own blocks, and how much of each is given out. The first one's signals are the communicator's.
        self._own: weakref.WeakKeyDictionary[Communicator, list[tuple[Block, list[int]]]] = weakref.WeakKeyDictionary()

    def check(self, comm: Communicator) -> None:
        """UsageError, the same on every rank, where the group cannot be served."""
        if comm.size == 1:
            return
        fault = self._memory.fault(comm)
        facts = comm.gather_json({"fault": fault} if fault else self._memory.facts(comm), f"check transport {self.name}")
        faults = [f"on rank {rank} {each['fault']}" for rank, each in enumerate(facts) if "fault" in each]
        if not faults:
            faults = [found for rank in range(comm.size) if (found := self._memory.unreachable(facts, rank)) is not None]
        if faults:
            raise UsageError(
                f"The transport {self.name} cannot serve group {comm.name!r} of {comm.size}: {faults[0]}. Without a transport "
                f"(sharder.transport=none) the process group moves the same data; between hosts, let only mesh.dp_replicate span them."
            )

    def empty(self, comm: Communicator, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements (may differ by rank, may be 0), not initialised, which peers can read. Blocks are as large as the rank with the most needs;
        what rounding leaves of one is given out before another is taken."""
        comm.agree(str(dtype), f"the dtype of memory from transport {self.name}")
        largest = max(comm.gather_json(numel, f"memory from transport {self.name}"))
        if comm.size == 1 or largest == 0:
            return torch.empty(numel, dtype=dtype, device=comm.device)
        size = -(-largest * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        held = self._own.setdefault(comm, [])
        block, used = next((each for each in held if each[1][0] + size <= each[0].views[0].numel()), None) or self._take(comm, size)
        begin = used[0]
        used[0] += size
        return block.views[comm.rank][begin : begin + numel * dtype.itemsize].view(dtype)

    def prepare_gather(self, comm: Communicator, local: Tensor, full: Tensor, counts: Sequence[int], what: str) -> Prepared | None:
        """See `intarsia.contracts.Transport.prepare_gather`. None, on all ranks alike, unless every part that is not empty lies in memory from `empty`.

        What peers have changed is read only behind a `fence`. The own part is not copied where `local` is `full`'s own part.
        """
        sources = self._sources(comm, local, counts, what)
        if sources is None:
            return None
        sizes = [count * full.element_size() for count in counts]
        target, rank = as_bytes(full), comm.rank
        pairs = [
            (target[copy.destination : copy.destination + copy.size], sources[copy.peer][copy.source : copy.source + copy.size])
            for copy in gather_copies(rank, sizes)
        ]
        own = target[starts(sizes)[rank] :][: sizes[rank]]
        if own.numel() and own.data_ptr() != local.data_ptr():
            pairs.append((own, as_bytes(local)))
        return PulledGather(comm, full, counts, what, sum(sizes) - sizes[rank], pairs)

    def prepare_reduce_scatter(
        self, comm: Communicator, full: Tensor, counts: Sequence[int], what: str, combine: Combine, scratch: Tensor | None = None
    ) -> PreparedReduce | None:
        """See `intarsia.contracts.Transport.prepare_reduce_scatter`. None, on all ranks alike, unless every rank's `full` lies in memory from `empty`.

        Of `scratch`, (size - 1) x counts[rank] elements are used. It needs no `fence`: each run waits until all buffers are filled, and ends when all
        have been read.
        """
        sources = self._sources(comm, full, [sum(counts)] * comm.size, what)
        if sources is None:
            return None
        rank, count = comm.rank, counts[comm.rank]
        received = full.new_empty((comm.size - 1) * count) if scratch is None else scratch[: (comm.size - 1) * count]
        sizes = [each * full.element_size() for each in counts]
        target = as_bytes(received)
        pairs = [
            (target[copy.destination : copy.destination + copy.size], sources[copy.peer][copy.source : copy.source + copy.size])
            for copy in exchange_copies(rank, sizes)
        ]
        own = full[starts(counts)[rank] :][:count]
        places = [received_at(rank, peer) * count for peer in range(comm.size)]
        parts = [own if peer == rank else received[place : place + count] for peer, place in enumerate(places)]
        return PulledReduce(comm, full, counts, what, target.numel(), pairs, self._signals(comm), parts, combine)

    def fence(self, comm: Communicator) -> None:
        """A barrier of all ranks on the current stream of each; it can be captured, but for a communicator's first.

        Ordered by it: what a rank wrote to memory from `empty` before its fence is what every rank's gathers after theirs read; what a rank reads by
        gathers before its fence was read before any rank's writes after theirs. Only work on the stream on which the fence is called is ordered, and
        what that stream has been made to wait for. All fences of one communicator must be in one order on the device: on one stream, or on streams that
        wait for each other.
        """
        if comm.size > 1 and (comm in self._own or self._blocks.get(ranks_of(comm))):
            self._signals(comm).barrier(FENCE)

    # ------------------------------------------------------------ private

    def _take(self, comm: Communicator, size: int) -> tuple[Block, list[int]]:
        """A new block of at least `size` bytes, of which nothing is given out."""
        block = self._memory.block(comm, self._memory.usable(size))
        self.bytes_allocated += self._memory.footprint(size)
        self._blocks.setdefault(ranks_of(comm), []).append(block)
        self._own.setdefault(comm, []).append((block, [0]))
        return self._own[comm][-1]

    def _signals(self, comm: Communicator) -> Block:
        """The block whose barriers are this communicator's."""
        return (self._own.get(comm) or [self._take(comm, ALIGNMENT)])[0][0]

    def _sources(self, comm: Communicator, tensor: Tensor, counts: Sequence[int], what: str) -> list[Tensor] | None:
        """Each rank's memory, readable here, from the byte on at which its `tensor` begins; None unless all that count elements lie in blocks."""
        if comm.size == 1:
            return None
        blocks = self._blocks.get(ranks_of(comm), [])
        places = comm.gather_json(place_of(tensor, [block.views[comm.rank] for block in blocks]), f"prepare {what}")
        if any(place is None and count for place, count in zip(places, counts, strict=True)):
            return None
        nowhere = tensor.new_empty(0, dtype=torch.uint8)
        return [nowhere if place is None else blocks[place[0]].views[rank][place[1] :] for rank, place in enumerate(places)]


def ranks_of(comm: Communicator) -> tuple[int, ...]:
    """The group's members; memory of one communicator serves others of the same."""
    ranks: Any = getattr(comm, "ranks", range(comm.size))
    return tuple(ranks)


def place_of(tensor: Tensor, memories: Sequence[Tensor]) -> list[int] | None:
    """Which of the memories (1-D, uint8) holds the tensor, and at which byte it begins there; None when none does."""
    storage = tensor.untyped_storage().data_ptr()
    for number, memory in enumerate(memories):
        if memory.untyped_storage().data_ptr() == storage:
            return [number, tensor.data_ptr() - memory.data_ptr()]
    return None


def as_bytes(tensor: Tensor) -> Tensor:
    """A 1-D tensor's memory as uint8. Detached from its version counter: parameters that are views of a gathered buffer get the same values
    again for backward, and autograd would take the copy for a change."""
    return tensor.data.view(torch.uint8)
