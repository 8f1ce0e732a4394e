"""Collectives with fixed buffers: prepared once, run in every step.

Whatever can be worked out once is: byte views, splits, names, statistics. `intarsia.comm.Communicator` makes them (`prepare_gather`,
`prepare_reduce_scatter`); a transport (`intarsia.contracts.Transport`) derives its own from `Prepared` and `PreparedReduce`.

On CUDA a `start` enqueues on the current stream, may be captured into a graph, and `wait` does nothing: the caller orders streams by events. Elsewhere
`start` begins in the background and `wait` returns when the result is there. The two alternate; between them no one touches the buffers.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._autograd import _enable_record_function
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions

from intarsia.errors import DistributedError

if TYPE_CHECKING:
    from intarsia.comm import Communicator, ProcessGroupCommunicator

Combine = Callable[[Sequence[Tensor], Tensor], None]
_Launch = Callable[[], Any]


def add_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = parts[0] + parts[1] + ..., in `out`'s dtype and in this order. Stability: provisional."""
    out.copy_(parts[0].view_as(out))
    for part in parts[1:]:
        out.add_(part)


class PreparedCall:
    """What every prepared collective has. Stability: provisional.

    `what` is its name in messages and statistics, `bytes` what one run receives from others. A `start` calls `begin` before anything else.
    """

    def __init__(self, comm: Communicator, call: str, what: str, tensor: Tensor, counts: Sequence[int], moved: int) -> None:
        self.what, self.bytes = what or call, moved
        self.comm, self.statistic = comm, comm.statistic(self.what)
        self.record: dict[str, Any] = {"call": call, "what": what, "dtype": str(tensor.dtype).removeprefix("torch."), "sizes": list(counts)}

    def begin(self) -> None:
        """Count a run, and compare it across ranks in check mode."""
        self.statistic.calls += 1
        self.statistic.bytes += self.bytes
        self.comm._before(self.record)

    def wait(self) -> None:
        """Return when the result is there: at once where `start` has done or enqueued all, as on CUDA."""


class Prepared(PreparedCall, abc.ABC):
    """A gather: `full` becomes all ranks' parts in rank order. Stability: provisional."""

    @abc.abstractmethod
    def start(self) -> None:
        """Begin."""


class PreparedReduce(PreparedCall, abc.ABC):
    """A reduction to the owners of parts: `out` becomes the combination of all ranks' contributions to this rank's part. Stability: provisional."""

    @abc.abstractmethod
    def start(self, out: Tensor) -> None:
        """Begin. On CUDA `combine` is enqueued right behind the exchange."""


class PlainGather(Prepared):
    """By the communicator's own primitives, at once: for groups without a process group, or with one that does not reach the tensors' device."""

    def __init__(self, comm: Communicator, local: Tensor, full: Tensor, counts: list[int], what: str) -> None:
        super().__init__(comm, "gather", what, full, counts, (full.numel() - local.numel()) * full.element_size())
        self._local, self._full, self._counts = local, full, counts

    def start(self) -> None:
        """See `Prepared`."""
        self.begin()
        gathered = self.comm._gather(self._local, self._counts)
        if gathered.data_ptr() != self._full.data_ptr():
            self._full.copy_(gathered)


class PlainReduce(PreparedReduce):
    """As `PlainGather`, for reductions."""

    def __init__(self, comm: Communicator, full: Tensor, counts: list[int], what: str, combine: Combine) -> None:
        mine = counts[comm.rank]
        super().__init__(comm, "reduce", what, full, counts, (comm.size - 1) * mine * full.element_size())
        self._parts, self._receives, self._combine = list(full.split(counts)), [mine] * comm.size, combine

    def start(self, out: Tensor) -> None:
        """See `PreparedReduce`."""
        self.begin()
        parts = self.comm._exchange(self._parts, self._receives) if self.comm.size > 1 else self._parts
        parts[self.comm.rank] = self._parts[self.comm.rank]
        self._combine(parts, out)


class _GroupCall(PreparedCall):
    """Calls of a process group's backend: in the background on CPU, on the current stream else."""

    comm: ProcessGroupCommunicator
    _launches: Sequence[_Launch]

    def _prepare(self, tensor: Tensor) -> None:
        self._on_host = not tensor.is_cuda
        self._works: list[Any] = []
        self._event = None if self._on_host else torch.cuda.Event()

    def _launch(self) -> None:
        if self._works:
            raise DistributedError(f"{self.what!r} in group {self.comm.name!r} was started again before it was waited for.")
        self.begin()
        try:
            if self._on_host:
                # Hidden from a profiler: a background call that ends after the profiler writes its end into memory that is no longer the profiler's.
                _enable_record_function(False)
                try:
                    self._works = [work for launch in self._launches if (work := launch()) is not None]
                finally:
                    _enable_record_function(True)
            else:
                self._enqueue()
        except RuntimeError as error:
            raise self.comm._failed(self.record, error) from error

    def _enqueue(self) -> None:
        captured = torch.cuda.is_current_stream_capturing()
        end: Any = self._event
        if self.comm.timed and not captured:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.comm.time_later(self.statistic, begin, end)
        for launch in self._launches:
            work = launch()
            # None where the call went to the current stream, as it was asked to.
            if work is not None:
                work.wait()
        if not captured:
            end.record()
            self.comm.watch_event(end, self.record)

    def wait(self) -> None:
        """See `PreparedCall`."""
        if not self._works:
            return
        began = time.perf_counter()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self.comm._failed(self.record, error) from error
        self._works = []
        self.statistic.seconds += time.perf_counter() - began


class GroupGather(_GroupCall, Prepared):
    """A gather over a process group. Equal counts: one all-gather. Else true sizes: broadcasts (gloo), or sends and receives (NCCL)."""

    start = _GroupCall._launch

    def __init__(
        self, comm: ProcessGroupCommunicator, backend: Any, local: Tensor, full: Tensor, counts: list[int], what: str, gloo: bool
    ) -> None:
        super().__init__(comm, "gather", what, full, counts, (full.numel() - local.numel()) * full.element_size())
        self._prepare(full)
        data, whole = local.view(torch.uint8), full.view(torch.uint8)
        sizes = [count * full.element_size() for count in counts]
        parts, me = list(whole.split(sizes)), comm.rank
        if len(set(counts)) == 1:
            options = _options(AllgatherOptions(), self._on_host)
            self._launches = [partial(backend._allgather_base, whole, data, options)] if counts[0] else []
            return
        copies = [partial(_copy, parts[me], data)] if data.data_ptr() != parts[me].data_ptr() else []
        if gloo:
            roots = [(_options(BroadcastOptions(), True, rootRank=rank), [part]) for rank, part in enumerate(parts) if part.numel()]
            self._launches = [*copies, *(partial(backend.broadcast, part, options) for options, part in roots)]
        else:
            sends = [data[:0] if rank == me else data for rank in range(comm.size)]
            parts[me] = parts[me][:0]
            self._launches = [*copies, _all_to_all(backend, me, parts, sends)]


class GroupReduce(_GroupCall, PreparedReduce):
    """A reduction over a process group: an exchange of true sizes in `full`'s dtype, then `combine`. What a rank has itself is not moved where the
    backend allows that."""

    def __init__(
        self,
        comm: ProcessGroupCommunicator,
        backend: Any,
        full: Tensor,
        counts: list[int],
        what: str,
        combine: Combine,
        scratch: Tensor | None,
        gloo: bool,
    ) -> None:
        me, size, mine, width = comm.rank, comm.size, counts[comm.rank], full.element_size()
        super().__init__(comm, "reduce", what, full, counts, (size - 1) * mine * width)
        self._prepare(full)
        self._combine, self._out = combine, full
        through_self = gloo and size > 2
        needed = mine * (size if through_self else size - 1)
        scratch = full.new_empty(needed) if scratch is None else scratch[:needed]
        comm._expect(scratch, needed, counts, "scratch of reduce", what)
        contributions = full.split(counts)
        received = iter(scratch.split(mine) if mine else [scratch] * size)
        self._parts = [next(received) if through_self or rank != me else contributions[me] for rank in range(size)]
        if not full.numel():
            self._launches = []
        elif through_self:
            splits = ([mine * width] * size, [count * width for count in counts])
            options = _options(AllToAllOptions(), True)
            whole = (scratch.view(torch.uint8), full.view(torch.uint8))
            self._launches = [partial(backend.alltoall_base, *whole, *splits, options)]
        else:
            receives, sends = ([part.view(torch.uint8) for part in parts] for parts in (self._parts, contributions))
            receives[me] = sends[me] = sends[me][:0]
            self._launches = [_all_to_all(backend, me, receives, sends)]
        self._parts[me] = contributions[me]

    def start(self, out: Tensor) -> None:
        """See `PreparedReduce`."""
        self._launch()
        if self._on_host:
            self._out = out
        else:
            self._combine(self._parts, out)

    def wait(self) -> None:
        """See `PreparedReduce`."""
        super().wait()
        if self._on_host:
            self._combine(self._parts, self._out)
            self._out = self._parts[0]  # A call that is over keeps no result alive.


def _all_to_all(backend: Any, me: int, receives: list[Tensor], sends: list[Tensor]) -> _Launch:
    """Bytes to and from every other rank. Two ranks: one tensor each way, which every backend does; more: by pointers (NCCL)."""
    on_host = not sends[me].is_cuda
    if len(sends) > 2:
        return partial(backend.alltoall, receives, sends, _options(AllToAllOptions(), on_host))
    other = 1 - me
    splits = [[tensor.numel() for tensor in tensors] for tensors in (receives, sends)]
    return partial(backend.alltoall_base, receives[other], sends[other], *splits, _options(AllToAllOptions(), on_host))


def _options(options: Any, background: bool, **values: int) -> Any:
    """`options` that ask for the current stream (or, in the background, for work to wait for)."""
    options.asyncOp = background
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
