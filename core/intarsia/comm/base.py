"""What a communicator is, and the groups that need no process group."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from intarsia.comm.prepared import Combine, PlainGather, PlainReduce, Prepared, PreparedReduce, add_parts
from intarsia.errors import DistributedError, UsageError

if TYPE_CHECKING:
    from intarsia.contracts import Transport


ReduceOp = Literal["sum", "max", "min"]

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclasses.dataclass
class Statistic:
    """Calls of one name. `bytes` is what this rank receives from others, by the least that any algorithm needs; `seconds` is time on the device's
    own clock for CUDA tensors and wall time else, waiting for other ranks included. Prepared calls on CUDA are timed where `Communicator.timed` is set, and
    count when they are started or captured, not when a captured graph is replayed. Stability: provisional."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Work:
    """A send or receive under way. Stability: stable."""

    def __init__(self, statistic: Statistic, finish: Callable[[], object]) -> None:
        self._statistic = statistic
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        """Until the tensor may be used: read where it was received, written to where it was sent. On CUDA the current stream waits, not the caller."""
        finish, self._finish, begin = self._finish, None, time.perf_counter()
        if finish is not None:
            finish()
            self._statistic.seconds += time.perf_counter() - begin


class Communicator(abc.ABC):
    """A group of ranks and its collectives. Stability: stable.

    `name` is the group's, `rank` this process's place in it (0 to `size` - 1), `device` where its tensors live by default. Tensors handed to
    `gather_v`, `reduce_scatter_v` and `exchange` are 1-D and contiguous. Results depend on no rank's timing. A subclass implements the underscored
    methods; arguments have been checked when they are called. `timed`: prepared calls on CUDA are timed too. `transport` moves what it can in the place
    of the process group, where `duplicate` was given one. Add to `graphs` the CUDA graphs that have recorded its calls: `close` resets them.
    """

    timed = False
    transport: Transport | None = None

    def __init__(self, name: str, rank: int, size: int, device: torch.device | str = "cpu") -> None:
        self.name, self.rank, self.size, self.device = name, rank, size, torch.device(device)
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._statistics: dict[str, Statistic] = {}
        self._pending: list[tuple[Statistic, Any, Any]] = []

    # ------------------------------------------------------------ collectives

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", what: str = "") -> Tensor:
        """Combine `tensor` (any shape, equal on all ranks) over the ranks, in place. Half precision and below is combined in float32 where the
        backend lacks it. Returns `tensor`."""
        moved = 2 * tensor.nbytes * (self.size - 1) // self.size
        with self._call("all_reduce", what, tensor, [tensor.numel()], moved, op=_checked(op)):
            if tensor.numel():
                self._all_reduce(tensor, op)
        return tensor

    def gather_v(self, local: Tensor, counts: Sequence[int], what: str = "") -> Tensor:
        """All ranks' 1-D tensors one after the other, in rank order. `counts[r]` is rank r's number of elements, the same list on every rank.
        The result may be `local` itself in a group of one."""
        self._expect(local, counts[self.rank] if len(counts) == self.size else -1, counts, "gather_v", what)
        total = sum(counts)
        with self._call("gather_v", what, local, counts, (total - local.numel()) * local.element_size()):
            return self._gather(local, list(counts)) if total else local.new_empty(0)

    def reduce_scatter_v(self, full: Tensor, counts: Sequence[int], op: ReduceOp = "sum", what: str = "") -> Tensor:
        """Combine `full` (1-D, the same size on every rank) over the ranks; rank r gets the r-th part, `counts[r]` elements. The result may
        share memory with `full` in a group of one."""
        self._expect(full, sum(counts) if len(counts) == self.size else -1, counts, "reduce_scatter_v", what)
        moved = (full.numel() - counts[self.rank]) * full.element_size()
        with self._call("reduce_scatter_v", what, full, counts, moved, op=_checked(op)):
            return self._reduce_scatter(full, list(counts), op) if full.numel() else full

    def exchange(self, sends: Sequence[Tensor], receive_counts: Sequence[int], what: str = "") -> list[Tensor]:
        """All-to-all: `sends[r]` (1-D) goes to rank r; returns what each rank sent here, `receive_counts[r]` elements from rank r. All of one dtype."""
        if len(sends) != self.size or len(receive_counts) != self.size or len({tensor.dtype for tensor in sends}) != 1:
            raise DistributedError(
                f"exchange {what!r} in group {self.name!r} of {self.size}: {len(sends)} sends and {len(receive_counts)} receive counts, "
                f"dtypes {sorted({str(tensor.dtype) for tensor in sends})}. It needs one of each for every rank, in one dtype."
            )
        sizes = [tensor.numel() for tensor in sends]
        moved = (sum(receive_counts) - receive_counts[self.rank]) * sends[0].element_size()
        with self._call("exchange", what, sends[0], sizes, moved, receives=list(receive_counts)):
            return self._exchange(list(sends), list(receive_counts))

    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "") -> Tensor:
        """Overwrite `tensor` with rank `root`'s, in place. Returns `tensor`."""
        moved = tensor.nbytes if self.rank != root else 0
        with self._call("broadcast", what, tensor, [tensor.numel()], moved, root=root):
            if tensor.numel():
                self._broadcast(tensor, root)
        return tensor

    def send(self, tensor: Tensor, to: int, what: str = "") -> Work:
        """Begin to send a contiguous tensor of any shape to rank `to`, which calls `receive` for one of the same shape and dtype. Nobody else takes part.

        Between two ranks calls are matched in their order. On CUDA all calls of one communicator are carried out one after the other, each waiting for its
        other side: ranks that send in a circle, or to each other, need a communicator for each direction (`duplicate`).
        """
        return self._pass("send", tensor, to, what)

    def receive(self, tensor: Tensor, source: int, what: str = "") -> Work:
        """Begin to overwrite a contiguous tensor with what rank `source` sends. See `send`."""
        return self._pass("receive", tensor, source, what)

    def barrier(self, what: str = "") -> None:
        """Return when every rank has called it."""
        self.all_reduce(torch.ones(1, dtype=torch.int32), "sum", what or "barrier")

    # ------------------------------------------------------------ prepared collectives

    def prepare_gather(self, local: Tensor, full: Tensor, counts: Sequence[int], what: str = "") -> Prepared:
        """A gather that is run many times: at each run `full` (1-D, contiguous, sum(counts) elements) becomes all ranks' `local` in rank order.
        True sizes, any dtype; `local` may be `full`'s own part."""
        sized = len(counts) == self.size
        self._expect(local, counts[self.rank] if sized else -1, counts, "prepare_gather", what)
        self._expect(full, sum(counts) if sized else -1, counts, "prepare_gather", what, local)
        made = self.transport.prepare_gather(self, local, full, counts, what) if self.transport is not None else None
        return made or self._prepare_gather(local, full, list(counts), what)

    def prepare_reduce_scatter(
        self, full: Tensor, counts: Sequence[int], what: str = "", combine: Combine = add_parts, scratch: Tensor | None = None
    ) -> PreparedReduce:
        """A reduction that is run many times: true sizes travel in `full`'s dtype (1-D, contiguous, sum(counts) elements), then `combine(parts, out)` is
        called. parts[r] is rank r's contribution to this rank's part, counts[rank] elements in `full`'s dtype, the own one a view of `full`; `out`
        is what the run was started with and may have another dtype. `scratch` (`full`'s dtype, size * counts[rank] elements suffice) receives;
        None allocates it once. On CUDA two ranks move the other's half only."""
        self._expect(full, sum(counts) if len(counts) == self.size else -1, counts, "prepare_reduce_scatter", what, scratch)
        made = self.transport.prepare_reduce_scatter(self, full, counts, what, combine, scratch) if self.transport is not None else None
        return made or self._prepare_reduce(full, list(counts), what, combine, scratch)

    def empty(self, numel: int, dtype: torch.dtype, what: str = "") -> Tensor:
        """1-D memory on `device` of which `prepare_gather` may read the local part: the transport's own where one is set. A collective then."""
        if self.transport is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self.transport.empty(self, numel, dtype)

    def fence(self, what: str = "") -> None:
        """To be called after tensors from `empty` have changed and before anyone gathers from them, and again before they change once more. Ordered on the
        current stream; nothing to do without a transport that needs it."""
        if self.transport is not None:
            self.statistic(what or "fence").calls += 1
            self.transport.fence(self)

    def watch(self, what: str) -> None:  # noqa: B027 (most groups have no device to wait for)
        """Say so, as of a collective, where what is enqueued on the current stream now (a captured graph that is replayed, say) does not end in time. `what`
        names it. Nothing to do on CPU."""

    def duplicate(self, name: str, transport: Transport | None = None) -> Communicator:
        """The same ranks with a process group of their own, so that calls here and there never queue behind each other. A collective. `transport`
        moves what it can; it needs a group of several processes and is left out else. UsageError, by its `check`, where the device lacks what it needs."""
        return self.split([list(range(self.size))], name)

    # ------------------------------------------------------------ plain values, without pickle

    def gather_json(self, value: Any, what: str = "") -> list[Any]:
        """Every rank's JSON value, in rank order."""
        return [json.loads(text) for text in self._gather_texts(_canonical(value), what or "gather_json")]

    def broadcast_json(self, value: Any, root: int = 0, what: str = "") -> Any:
        """Rank `root`'s JSON value; what the others pass (None, say) is not looked at."""
        return json.loads(self._gather_texts(_canonical(value), what or "broadcast_json")[root])

    def agree(self, value: Any, what: str) -> None:
        """Raise DistributedError on every rank, showing both sides, unless the JSON `value` is the same on all ranks."""
        text = _canonical(value)
        if len(set(self._gather_texts(hashlib.sha256(text).digest(), f"agree on {what}"))) == 1:
            return
        leaves = [dict(_leaves(json.loads(each))) for each in self._gather_texts(text, f"agree on {what}")]
        paths = dict.fromkeys(path for each in leaves for path in each)
        place = next(path for path in paths if any(each.get(path, "absent") != leaves[0].get(path, "absent") for each in leaves))
        sides: dict[str, list[int]] = {}
        for rank, each in enumerate(leaves):
            sides.setdefault(json.dumps(each[place])[:300] if place in each else "absent", []).append(rank)
        shown = "; ".join(f"{ranks_text(ranks)}: {side}" for side, ranks in sides.items())
        where = f" at {place}" if place else ""
        raise DistributedError(
            f"Ranks of group {self.name!r} disagree on {what}{where}: {shown}. All ranks must run the same recipe and code."
        )

    # ------------------------------------------------------------ the group itself

    @abc.abstractmethod
    def split(self, groups: Sequence[Sequence[int]], name: str) -> Communicator:
        """The communicator of this rank's group, `groups` being a partition of the ranks. A collective: every rank calls it with the same list."""

    def stats(self) -> dict[str, Statistic]:
        """What was done so far, by `what` (the operation's name where it had none)."""
        self._settle(0)
        return self._statistics

    def statistic(self, what: str) -> Statistic:
        """The entry of `stats` for `what`, made if need be. Stability: provisional."""
        return self._statistics.setdefault(what, Statistic())

    def close(self) -> None:  # noqa: B027 (most groups have nothing to leave)
        """Leave. Only the world's communicator needs it."""

    # ------------------------------------------------------------ for subclasses

    @abc.abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Combine in place."""

    @abc.abstractmethod
    def _gather(self, local: Tensor, counts: list[int]) -> Tensor:
        """See `gather_v`."""

    @abc.abstractmethod
    def _reduce_scatter(self, full: Tensor, counts: list[int], op: ReduceOp) -> Tensor:
        """See `reduce_scatter_v`."""

    @abc.abstractmethod
    def _exchange(self, sends: list[Tensor], receive_counts: list[int]) -> list[Tensor]:
        """See `exchange`."""

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite in place."""

    def _point_to_point(self, call: str, tensor: Tensor, peer: int) -> Callable[[], object]:
        """Begin to send or receive; returns what waits for its end."""
        raise DistributedError(f"Groups of type {type(self).__name__} cannot {call}.")

    def _prepare_gather(self, local: Tensor, full: Tensor, counts: list[int], what: str) -> Prepared:
        """See `prepare_gather`."""
        return PlainGather(self, local, full, counts, what)

    def _prepare_reduce(self, full: Tensor, counts: list[int], what: str, combine: Combine, scratch: Tensor | None) -> PreparedReduce:
        """See `prepare_reduce_scatter`."""
        return PlainReduce(self, full, counts, what, combine)

    def _before(self, record: dict[str, Any]) -> None:  # noqa: B027 (nothing to do in most groups)
        """Called with the call's description before it starts."""

    def _failed(self, record: dict[str, Any], error: RuntimeError) -> DistributedError:
        """The error that the user sees when a backend raised `error`."""
        return DistributedError(f"{call_text(record)} in group {self.name!r} failed: {error}")

    # ------------------------------------------------------------ private

    def _pass(self, call: str, tensor: Tensor, peer: int, what: str) -> Work:
        if not 0 <= peer < self.size or peer == self.rank or not tensor.is_contiguous():
            raise DistributedError(
                f"{call} {what!r} on rank {self.rank} of group {self.name!r} (size {self.size}): the other rank is {peer} and the tensor has shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}. It needs another rank of the group, and a contiguous tensor."
            )
        record = {"call": call, "what": what, "dtype": str(tensor.dtype).removeprefix("torch."), "sizes": [tensor.numel()], "peer": peer}
        statistic = self.statistic(what or call)
        statistic.calls += 1
        statistic.bytes += tensor.nbytes if call == "receive" else 0

        def told(action: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return action(*arguments)
            except RuntimeError as error:
                raise self._failed(record, error) from error

        finish = told(self._point_to_point, call, tensor, peer) if tensor.numel() else lambda: None
        return Work(statistic, lambda: told(finish))

    def _expect(self, tensor: Tensor, numel: int, counts: Sequence[int], op: str, what: str, other: Tensor | None = None) -> None:
        if other is not None and (other.dtype, other.device) != (tensor.dtype, tensor.device):
            raise DistributedError(
                f"{op} {what!r} on rank {self.rank} of group {self.name!r}: buffers of {other.dtype} on {other.device} and of {tensor.dtype} on "
                f"{tensor.device}. They must have one dtype and lie on one device."
            )
        if tensor.dim() != 1 or tensor.numel() != numel or min(counts, default=0) < 0 or not tensor.is_contiguous():
            raise DistributedError(
                f"{op} {what!r} on rank {self.rank} of group {self.name!r} (size {self.size}): a tensor of shape {tuple(tensor.shape)} does not "
                f"match the counts {list(counts)}. It must be 1-D, contiguous and of the size that the counts say."
            )

    def _gather_texts(self, text: bytes, what: str) -> list[bytes]:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        counts = self.gather_v(torch.tensor([len(text)]), [1] * self.size, what).tolist()
        gathered = self.gather_v(data, counts, what)
        return [bytes(part.tolist()) for part in gathered.split(counts)]

    @contextlib.contextmanager
    def _call(self, call: str, what: str, tensor: Tensor, sizes: Sequence[int], moved: int, **details: Any) -> Iterator[None]:
        record = {"call": call, "what": what, "dtype": str(tensor.dtype).removeprefix("torch."), "sizes": list(sizes), **details}
        statistic = self.statistic(what or call)
        statistic.calls += 1
        statistic.bytes += moved
        on_device = tensor.is_cuda and not torch.cuda.is_current_stream_capturing()
        begin: Any = torch.cuda.Event(enable_timing=True) if on_device else time.perf_counter()
        try:
            self._before(record)
            if on_device:
                begin.record()
            yield
        except RuntimeError as error:
            raise self._failed(record, error) from error
        if on_device:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self.time_later(statistic, begin, end)
            self.watch_event(end, record)
        else:
            statistic.seconds += time.perf_counter() - begin

    def time_later(self, statistic: Statistic, begin: Any, end: Any) -> None:
        """Add the time between two timing events of the device once they have passed."""
        self._pending.append((statistic, begin, end))
        self._settle(512)

    def watch_event(self, event: Any, record: dict[str, Any]) -> None:  # noqa: B027 (most groups have no device to wait for)
        """Say so where `event`, the end of the call `record`, has not passed on the device in time."""

    def _settle(self, keep: int) -> None:
        """Read the oldest device timers until at most `keep` are open; each that is read is waited for."""
        while len(self._pending) > keep:
            statistic, begin, end = self._pending.pop(0)
            end.synchronize()
            statistic.seconds += begin.elapsed_time(end) / 1000


class FakeCommunicator(Communicator):
    """One rank of a group whose other ranks do not exist: shapes, names and byte counts are those of a real run, contents are this rank's own
    (others' parts are zero). For planning, on the meta device too. Stability: provisional."""

    def __init__(self, rank: int, size: int, device: torch.device | str = "cpu", name: str = "fake") -> None:
        super().__init__(name, rank, size, device)

    def split(self, groups: Sequence[Sequence[int]], name: str) -> Communicator:
        """See `Communicator.split`."""
        mine = next(list(group) for group in groups if self.rank in group)
        return FakeCommunicator(mine.index(self.rank), len(mine), self.device, name)

    def _gather_texts(self, text: bytes, what: str) -> list[bytes]:
        return [text] * self.size

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Nobody to combine with."""

    def _gather(self, local: Tensor, counts: list[int]) -> Tensor:
        if self.size == 1:
            return local
        result = local.new_zeros(sum(counts))
        result.split(counts)[self.rank].copy_(local)
        return result

    def _reduce_scatter(self, full: Tensor, counts: list[int], op: ReduceOp) -> Tensor:
        return full.split(counts)[self.rank]

    def _exchange(self, sends: list[Tensor], receive_counts: list[int]) -> list[Tensor]:
        return [sends[0].new_zeros(count) if rank != self.rank else sends[rank] for rank, count in enumerate(receive_counts)]

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Nobody to hear from."""

    def _point_to_point(self, call: str, tensor: Tensor, peer: int) -> Callable[[], object]:
        return lambda: None


class SelfCommunicator(FakeCommunicator):
    """The group of one process: nobody is missing, so everything is exact. Needs no process group. Stability: stable."""

    def __init__(self, device: torch.device | str = "cpu", name: str = "self") -> None:
        super().__init__(0, 1, device, name)


# ---------------------------------------------------------------- helpers


def _checked(op: str) -> str:
    if op not in COMBINE:
        raise UsageError(f"A reduction is one of {', '.join(COMBINE)}, not {op!r}. For a mean: sum, then divide by a global count.")
    return op


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def call_text(record: dict[str, Any]) -> str:
    details = {key: value for key, value in record.items() if key not in ("call", "what", "number")}
    return f"{record['call']} {record['what']!r} ({', '.join(f'{key} {value}' for key, value in details.items())})"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value in a JSON value with its path (`buckets.0.name`)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        yield path, value
    for key, each in items:
        yield from _leaves(each, f"{path}.{key}" if path else str(key))
