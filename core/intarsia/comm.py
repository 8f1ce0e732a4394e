"""The only place that calls collectives.

A `Communicator` is a group of ranks. Every call is named by `what` (messages and statistics use it), timed, counted in bytes, and in check mode
compared across ranks before it starts, so that ranks that have diverged get an error with both sides instead of a hang. Sizes are the true
ones: counts may differ by rank and may be zero. Data travels as the dtype it has; gaps of a backend (gloo has no uneven all-gather, no list
all-to-all, no reduction in float8, slow or missing ones in half precision) are closed here and nowhere else.

Process rules: every rank of a group makes the same calls in the same order. A rank without data joins with zero counts.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from intarsia.errors import DistributedError, UsageError
from intarsia.prepared import Combine, GroupGather, GroupReduce, PlainGather, PlainReduce, Prepared, PreparedReduce, add_parts

if TYPE_CHECKING:
    from intarsia.contracts import Transport

__all__ = [
    "Combine",
    "Communicator",
    "FakeCommunicator",
    "Prepared",
    "PreparedReduce",
    "ProcessGroupCommunicator",
    "ReduceOp",
    "SelfCommunicator",
    "Statistic",
    "add_parts",
    "init_world",
]

ReduceOp = Literal["sum", "max", "min"]

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_TORCH_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# Newer torch renames these two and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclasses.dataclass
class Statistic:
    """Calls of one name. `bytes` is what this rank receives from others, by the least that any algorithm needs; `seconds` is time on the device's
    own clock for CUDA tensors and wall time else, waiting for other ranks included. Prepared calls on CUDA are timed where `Communicator.timed` is set, and
    count when they are started or captured, not when a captured graph is replayed. Stability: provisional."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Communicator(abc.ABC):
    """A group of ranks and its collectives. Stability: stable.

    `name` is the group's, `rank` this process's place in it (0 to `size` - 1), `device` where its tensors live by default. Tensors handed to
    `gather_v`, `reduce_scatter_v` and `exchange` are 1-D and contiguous. Results depend on no rank's timing. A subclass implements the underscored
    methods; arguments have been checked when they are called. `timed`: prepared calls on CUDA are timed too. `transport` moves what it can in the place
    of the process group, where `duplicate` was given one.
    """

    timed = False
    transport: Transport | None = None

    def __init__(self, name: str, rank: int, size: int, device: torch.device | str = "cpu") -> None:
        self.name, self.rank, self.size, self.device = name, rank, size, torch.device(device)
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

    def barrier(self, what: str = "") -> None:
        """Return when every rank has called it."""
        self.all_reduce(torch.ones(1, dtype=torch.int32), "sum", what or "barrier")

    # ------------------------------------------------------------ prepared collectives

    def prepare_gather(self, local: Tensor, full: Tensor, counts: Sequence[int], what: str = "") -> Prepared:
        """A gather that is run many times: at each run `full` (1-D, contiguous, sum(counts) elements) becomes all ranks' `local` in rank order.
        True sizes, any dtype; `local` may be `full`'s own part."""
        sized = len(counts) == self.size
        self._expect(local, counts[self.rank] if sized else -1, counts, "prepare_gather", what)
        self._expect(full, sum(counts) if sized else -1, counts, "prepare_gather", what)
        self._same_dtype(local, full, "prepare_gather", what)
        made = self.transport.prepare_gather(self, local, full, counts, what) if self.transport is not None else None
        return made or self._prepare_gather(local, full, list(counts), what)

    def prepare_reduce_scatter(
        self, full: Tensor, counts: Sequence[int], what: str = "", combine: Combine = add_parts, scratch: Tensor | None = None
    ) -> PreparedReduce:
        """A reduction that is run many times: true sizes travel in `full`'s dtype (1-D, contiguous, sum(counts) elements), then `combine(parts, out)` is
        called. parts[r] is rank r's contribution to this rank's part, counts[rank] elements in `full`'s dtype, the own one a view of `full`; `out`
        is what the run was started with and may have another dtype. `scratch` (`full`'s dtype, size * counts[rank] elements suffice) receives;
        None allocates it once. On CUDA two ranks move the other's half only."""
        self._expect(full, sum(counts) if len(counts) == self.size else -1, counts, "prepare_reduce_scatter", what)
        self._same_dtype(full if scratch is None else scratch, full, "prepare_reduce_scatter", what)
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
        shown = "; ".join(f"{_ranks_text(ranks)}: {side}" for side, ranks in sides.items())
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
        return DistributedError(f"{_call_text(record)} in group {self.name!r} failed: {error}")

    # ------------------------------------------------------------ private

    def _expect(self, tensor: Tensor, numel: int, counts: Sequence[int], op: str, what: str) -> None:
        if tensor.dim() != 1 or tensor.numel() != numel or min(counts, default=0) < 0 or not tensor.is_contiguous():
            raise DistributedError(
                f"{op} {what!r} on rank {self.rank} of group {self.name!r} (size {self.size}): a tensor of shape {tuple(tensor.shape)} does not "
                f"match the counts {list(counts)}. It must be 1-D, contiguous and of the size that the counts say."
            )

    def _same_dtype(self, one: Tensor, other: Tensor, op: str, what: str) -> None:
        if one.dtype != other.dtype or one.device != other.device:
            raise DistributedError(
                f"{op} {what!r} on rank {self.rank} of group {self.name!r}: buffers of {one.dtype} on {one.device} and of {other.dtype} on {other.device}. "
                "They must have one dtype and lie on one device."
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


class SelfCommunicator(FakeCommunicator):
    """The group of one process: nobody is missing, so everything is exact. Needs no process group. Stability: stable."""

    def __init__(self, device: torch.device | str = "cpu", name: str = "self") -> None:
        super().__init__(0, 1, device, name)


class ProcessGroupCommunicator(Communicator):
    """Collectives over a torch process group of gloo (CPU tensors), NCCL (CUDA tensors) or both. Stability: stable.

    `store` is the key-value store through which ranks say where they are: in check mode before each call, else when one has failed. `ranks` are the
    group's members as ranks of the default group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        name: str = "world",
        store: dist.Store | None = None,
        timeout_s: float = 600.0,
        check: bool = False,
    ) -> None:
        super().__init__(name, dist.get_rank(group), dist.get_world_size(group), device)
        self.group, self.timeout_s, self.check = group, timeout_s, check
        self.ranks = dist.get_process_group_ranks(group)
        # Groups of one name (the rows of a mesh, say) are told apart by their first member.
        self.store = None if store is None else dist.PrefixStore(f"intarsia/{name}/{self.ranks[0]}", store)
        self._backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
        self._sequence, self._owns_world = 0, False
        self._parts: list[ProcessGroupCommunicator] = []
        if check and store is None:
            raise UsageError(f"Group {name!r}: checking collectives needs a store.")

    def split(self, groups: Sequence[Sequence[int]], name: str) -> Communicator:
        timeout = datetime.timedelta(seconds=self.timeout_s)
        created = [dist.new_group([self.ranks[rank] for rank in group], timeout=timeout) for group in groups]
        mine = [made for made, group in zip(created, groups, strict=True) if self.rank in group]
        if not mine:
            raise DistributedError(f"Rank {self.rank} of group {self.name!r} is in none of the groups {groups} of {name!r}.")
        # Groups that were made one after the other may have one name.
        store = None if self.store is None else dist.PrefixStore(f"part{len(self._parts)}", self.store)
        self._parts.append(ProcessGroupCommunicator(mine[-1], self.device, name, store, self.timeout_s, self.check))
        return self._parts[-1]

    def duplicate(self, name: str, transport: Transport | None = None) -> Communicator:
        made = self.split([list(range(self.size))], name)
        if transport is not None and self.size > 1:
            transport.check(made)
            made.transport = transport
        return made

    def close(self) -> None:
        for part in self._parts:
            part.close()
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        # Only with the last reference do gloo's threads end. One that still lets go of a tensor while the interpreter ends would abort the process.
        self.__dict__.pop("group", None)

    # ------------------------------------------------------------ primitives

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        work = self._reducible(self._staged(tensor)).contiguous()
        dist.all_reduce(work, _TORCH_OPS[op], self.group)
        if work is not tensor:
            tensor.copy_(work)

    def _gather(self, local: Tensor, counts: list[int]) -> Tensor:
        data = self._staged(local).view(torch.uint8)
        sizes = [count * local.element_size() for count in counts]
        full = data.new_empty(sum(sizes))
        if len(set(sizes)) == 1:
            _all_gather(full, data, self.group)
        elif self._is_gloo(data):
            parts = list(full.split(sizes))
            parts[self.rank].copy_(data)
            # gloo gathers equal sizes only; a broadcast from each rank moves the true ones.
            pairs = [(self.ranks[index], part) for index, part in enumerate(parts) if part.numel()]
            for work in [dist.broadcast(part, root, self.group, async_op=True) for root, part in pairs]:
                work.wait()
        else:
            dist.all_gather(list(full.split(sizes)), data, self.group)
        return full.view(local.dtype).to(local.device)

    def _reduce_scatter(self, full: Tensor, counts: list[int], op: ReduceOp) -> Tensor:
        work = self._staged(full)
        if self._is_gloo(work):
            # One all-to-all, then a sum in rank order: true sizes, the same bits in every run, and half precision summed in float32.
            received = self._exchange(list(work.split(counts)), [counts[self.rank]] * self.size)
            total = self._reducible(received[0])
            for part in received[1:]:
                total = _COMBINE[op](total, part.to(total.dtype))
            return total.to(full.dtype).to(full.device)
        work = self._reducible(work)
        result = work.new_empty(counts[self.rank])
        if len(set(counts)) == 1:
            _reduce_scatter(result, work, _TORCH_OPS[op], self.group)
        else:
            dist.reduce_scatter(result, list(work.split(counts)), _TORCH_OPS[op], self.group)
        return result.to(full.dtype)

    def _exchange(self, sends: list[Tensor], receive_counts: list[int]) -> list[Tensor]:
        width = sends[0].element_size()
        data = self._staged(torch.cat(sends)).view(torch.uint8)
        receive_sizes = [count * width for count in receive_counts]
        received = data.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, data, receive_sizes, [tensor.numel() * width for tensor in sends], self.group)
        return list(received.view(sends[0].dtype).to(sends[0].device).split(receive_counts))

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        work = self._staged(tensor).contiguous()
        dist.broadcast(work.view(-1).view(torch.uint8), self.ranks[root], self.group)
        if work is not tensor:
            tensor.copy_(work)

    def _prepare_gather(self, local: Tensor, full: Tensor, counts: list[int], what: str) -> Prepared:
        if self.size == 1 or self._staged(full[:0]).device != full.device:
            return super()._prepare_gather(local, full, counts, what)
        return GroupGather(self, self.group._get_backend(full.device), local, full, counts, what, self._is_gloo(full))

    def _prepare_reduce(self, full: Tensor, counts: list[int], what: str, combine: Combine, scratch: Tensor | None) -> PreparedReduce:
        if self.size == 1 or self._staged(full[:0]).device != full.device:
            return super()._prepare_reduce(full, counts, what, combine, scratch)
        return GroupReduce(self, self.group._get_backend(full.device), full, counts, what, combine, scratch, self._is_gloo(full))

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self._backends.get(tensor.device.type) == "gloo"

    def _staged(self, tensor: Tensor) -> Tensor:
        """`tensor` on a device that this group can move: itself, or a copy (a CUDA tensor in a group of gloo, a CPU tensor in one of NCCL)."""
        backend = self._backends.get(tensor.device.type)
        if backend is None or (backend == "gloo" and tensor.device.type != "cpu"):
            return tensor.to("cpu" if self._backends.get("cpu") == "gloo" else self.device)
        return tensor

    def _reducible(self, tensor: Tensor) -> Tensor:
        narrow = tensor.dtype.is_floating_point and tensor.element_size() < (4 if self._is_gloo(tensor) else 2)
        return tensor.float() if narrow else tensor

    # ------------------------------------------------------------ saying where a rank is

    def _before(self, record: dict[str, Any]) -> None:
        self._sequence += 1
        record["number"] = self._sequence
        if not self.check:
            return
        assert self.store is not None
        self._publish(record)
        self.store.set(f"{self._sequence}/{self.rank}", json.dumps(record))
        keys = [f"{self._sequence}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, datetime.timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self._failed(record, error) from error
        records = [json.loads(self.store.get(key)) for key in keys]
        fault = _mismatch(records)
        if fault is not None:
            problem, one, other = fault
            raise DistributedError(
                f"Ranks of group {self.name!r} have diverged at collective {self._sequence} ({problem}). Rank {one} calls "
                f"{_call_text(records[one])}; rank {other} calls {_call_text(records[other])}. Every rank must make the same calls in the same order."
            )
        # Whoever has come to this call has read the records of all calls before the last one.
        if self._sequence > 2:
            self.store.delete_key(f"{self._sequence - 2}/{self.rank}")

    def _publish(self, record: dict[str, Any]) -> None:
        if self.store is not None:
            self.store.set(f"at/{self.rank}", json.dumps(record))

    def _failed(self, record: dict[str, Any], error: RuntimeError) -> DistributedError:
        lines = []
        missing = []
        try:
            self._publish(record)
            places = self._places()
        except RuntimeError as lost:
            places, lines = {}, [f"the store is gone too ({str(lost).splitlines()[0][:100]})"]
        for rank in range(self.size):
            there = places.get(rank)
            if there is None:
                missing.append(rank)
            elif rank != self.rank:
                lines.append(f"rank {rank} is at collective {there['number']}, {_call_text(there)}")
        if missing and places:
            lines.append(f"{_ranks_text(missing)} said nothing: busy elsewhere, or ended (look for an earlier error there)")
        cause = (str(error).splitlines() or [type(error).__name__])[0][:300]
        return DistributedError(
            f"Rank {self.rank} of {self.size} in group {self.name!r}: collective {record.get('number', '?')}, {_call_text(record)}, did not "
            f"finish within {self.timeout_s:g} s or failed; {'; '.join(lines) or 'nothing is known of the other ranks'}. Cause: {cause}"
        )

    def _places(self, patience_s: float = 2.0) -> dict[int, dict[str, Any]]:
        """Where each rank that says so is now; the others are given `patience_s` to fail as well and say so."""
        if self.store is None:
            return {}
        end = time.monotonic() + patience_s
        while True:
            known = [rank for rank in range(self.size) if self.store.check([f"at/{rank}"])]
            if len(known) == self.size or time.monotonic() > end:
                return {rank: json.loads(self.store.get(f"at/{rank}")) for rank in known}
            time.sleep(0.05)


def init_world(
    device: torch.device | str = "cpu", timeout_s: float | None = None, check: bool | None = None, store: dist.Store | None = None
) -> Communicator:
    """The communicator of all processes of the run, from torchrun's environment; a SelfCommunicator where there is only this process.

    `device` is this process's (`intarsia.device.select` gives it). `timeout_s` bounds every wait for another rank
    (default: the environment variable INTARSIA_TIMEOUT_S, else 600). `check` turns check mode on
    (default: the environment variable INTARSIA_CHECK_COLLECTIVES is 1). Processes meet at MASTER_ADDR:MASTER_PORT, or at the URL in
    INTARSIA_RENDEZVOUS (`file:///shared/path`), or through `store`. Stability: provisional.
    """
    device = torch.device(device)
    size, rank = (_environment_integer(name) for name in ("WORLD_SIZE", "RANK"))
    if (size is None) != (rank is None):
        raise UsageError("Only one of RANK and WORLD_SIZE is set. Start several processes with torchrun, or unset both for one process.")
    if size is None or rank is None or size == 1:
        return SelfCommunicator(device, "world")
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are 0 to {size - 1}.")
    timeout_s = timeout_s or _environment_integer("INTARSIA_TIMEOUT_S") or 600.0
    timeout = datetime.timedelta(seconds=timeout_s)
    url = os.environ.get("INTARSIA_RENDEZVOUS", "env://")
    if store is None and url == "env://" and not os.environ.get("MASTER_ADDR"):
        raise UsageError("WORLD_SIZE is set, but MASTER_ADDR is not. Start the processes with torchrun, or set INTARSIA_RENDEZVOUS.")
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    try:
        if store is None:
            store, rank, size = next(dist.rendezvous(url, rank, size, timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=timeout, **options)
    except RuntimeError as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise DistributedError(f"Rank {rank} of {size} did not meet the others within {timeout_s:g} s. Cause: {cause}") from error
    if check is None:
        check = os.environ.get("INTARSIA_CHECK_COLLECTIVES") == "1"
    group = dist.group.WORLD
    assert group is not None
    world = ProcessGroupCommunicator(group, device, "world", store, timeout_s, check)
    world._owns_world = True
    return world


# ---------------------------------------------------------------- helpers


def _environment_integer(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not text.isdigit():
        raise UsageError(f"The environment variable {name} must be a whole number, not {text!r}.")
    return None if text is None else int(text)


def _checked(op: str) -> str:
    if op not in _COMBINE:
        raise UsageError(f"A reduction is one of {', '.join(_COMBINE)}, not {op!r}. For a mean: sum, then divide by a global count.")
    return op


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _call_text(record: dict[str, Any]) -> str:
    details = {key: value for key, value in record.items() if key not in ("call", "what", "number")}
    return f"{record['call']} {record['what']!r} ({', '.join(f'{key} {value}' for key, value in details.items())})"


def _mismatch(records: Sequence[dict[str, Any]]) -> tuple[str, int, int] | None:
    """What differs between all ranks' records of one call, and on which two ranks; None when they fit."""
    first = records[0]
    free = ("sizes", "receives") if first["call"] == "exchange" else ()
    for rank, other in enumerate(records):
        for field in sorted(first.keys() | other.keys()):
            if field not in free and first.get(field) != other.get(field):
                return f"different {field}", 0, rank
    for sender in range(len(records)) if free else ():
        for receiver in range(len(records)):
            if records[sender]["sizes"][receiver] != records[receiver]["receives"][sender]:
                return f"rank {sender} sends what rank {receiver} does not expect", sender, receiver
    return None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value in a JSON value with its path (`buckets.0.name`)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        yield path, value
    for key, each in items:
        yield from _leaves(each, f"{path}.{key}" if path else str(key))
