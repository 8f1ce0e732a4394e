"""A communicator over a torch process group, and the world's."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from intarsia.comm.base import COMBINE, Communicator, ReduceOp, SelfCommunicator, call_text, ranks_text
from intarsia.comm.prepared import Combine, GroupGather, GroupReduce, Prepared, PreparedReduce
from intarsia.comm.watch import MARGIN_S, Watcher
from intarsia.errors import DistributedError, UsageError

if TYPE_CHECKING:
    from intarsia.contracts import Transport

_TORCH_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# What gloo and NCCL say where the other end of a connection is gone, which is no matter of time.
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")

# Newer torch renames these two and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupCommunicator(Communicator):
    """Collectives over a torch process group of gloo (CPU tensors), NCCL (CUDA tensors) or both. Stability: stable.

    `store` is the key-value store through which ranks say where they are: in check mode before each call, else when one has failed. `ranks` are the
    group's members as ranks of the default group. `timeout_s` bounds a call's wait for another rank; `meeting_s` bounds how long ranks wait for each other
    to form a part (`split`), for connecting many processes may take long where nothing hangs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        name: str = "world",
        store: dist.Store | None = None,
        timeout_s: float = 600.0,
        check: bool = False,
        watcher: Watcher | None = None,
        meeting_s: float = 600.0,
    ) -> None:
        super().__init__(name, dist.get_rank(group), dist.get_world_size(group), device)
        self.group, self.meeting_s, self.check = group, meeting_s, check
        self.ranks = dist.get_process_group_ranks(group)
        # Groups of one name (the rows of a mesh, say) are told apart by their first member.
        self.store = None if store is None else dist.PrefixStore(f"intarsia/{name}/{self.ranks[0]}", store)
        self._backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
        self._sequence, self._owns_world = 0, False
        self._parts: list[ProcessGroupCommunicator] = []
        self.watcher = Watcher() if watcher is None else watcher
        if self.device_backend() is not None:
            self.watcher.groups.append(self)
        self.set_timeout(timeout_s)
        if check and store is None:
            raise UsageError(f"Group {name!r}: checking collectives needs a store.")

    def set_timeout(self, timeout_s: float) -> None:
        """Bound the waits of all later calls of this group and of its parts, on this rank."""
        self.timeout_s = timeout_s
        for device_type, kind in self._backends.items():
            backend: Any = self.group._get_backend(torch.device(device_type))
            limit = getattr(backend, "_set_default_timeout", None) or backend.set_timeout
            limit(datetime.timedelta(seconds=timeout_s + (MARGIN_S if kind == "nccl" else 0.0)))
        for part in self._parts:
            part.set_timeout(timeout_s)

    def split(self, groups: Sequence[Sequence[int]], name: str) -> Communicator:
        mine = [[self.ranks[rank] for rank in group] for group in groups if self.rank in group]
        if not mine:
            raise DistributedError(f"Rank {self.rank} of group {self.name!r} is in none of the groups {groups} of {name!r}.")
        # Named by its members: groups beside this one, whose ranks make parts of their own now, have other names.
        made = dist.new_group(mine[-1], timeout=datetime.timedelta(seconds=self.meeting_s), use_local_synchronization=True)
        # Groups that were made one after the other may have one name.
        store = None if self.store is None else dist.PrefixStore(f"part{len(self._parts)}", self.store)
        part = ProcessGroupCommunicator(made, self.device, name, store, self.timeout_s, self.check, self.watcher, self.meeting_s)
        self._parts.append(part)
        return part

    def duplicate(self, name: str, transport: Transport | None = None) -> Communicator:
        made = self.split([list(range(self.size))], name)
        if transport is not None and self.size > 1:
            transport.check(made)
            made.transport = transport
        return made

    def close(self) -> None:
        self.watcher.stop()
        # NCCL waits for graphs that have recorded its calls to be gone before it lets a group go.
        for graph in self.graphs:
            graph.reset()
        for part in self._parts:
            part.close()
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        # Gloo's threads end with the group's last reference. A thread that outlives it is why a rank of the command ends as it does (`intarsia.cli.run`).
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
                total = COMBINE[op](total, part.to(total.dtype))
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

    def _point_to_point(self, call: str, tensor: Tensor, peer: int) -> Callable[[], object]:
        staged = self._staged(tensor)
        data, other = staged.detach().view(-1).view(torch.uint8), self.ranks[peer]
        work = dist.isend(data, other, self.group) if call == "send" else dist.irecv(data, other, self.group)
        assert work is not None

        def finish() -> None:
            work.wait()
            if call == "receive" and staged is not tensor:
                tensor.copy_(staged)
            if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
                self.watch(f"{call}, rank {peer}")

        return finish

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
        least = 4 if self._is_gloo(tensor) else 2
        return tensor.float() if tensor.dtype.is_floating_point and tensor.element_size() < least else tensor

    # ------------------------------------------------------------ saying where a rank is

    def device_backend(self) -> Any:
        """What moves tensors of the device; None where that is gloo too."""
        return self.group._get_backend(torch.device("cuda")) if self._backends.get("cuda") == "nccl" and "group" in self.__dict__ else None

    def watch_event(self, event: Any, record: dict[str, Any]) -> None:
        self.watcher.add(self, event, record)

    def watch(self, what: str) -> None:
        if self.device_backend() is not None:
            event = torch.cuda.Event()
            event.record()
            self.watcher.add(self, event, {"call": "device work", "what": what, "number": self._sequence})

    def _before(self, record: dict[str, Any]) -> None:
        if self.watcher.error is not None:
            raise self.watcher.error
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
                f"{call_text(records[one])}; rank {other} calls {call_text(records[other])}. Every rank must make the same calls in the same order."
            )
        # Whoever has come to this call has read the records of all calls before the last one.
        if self._sequence > 2:
            self.store.delete_key(f"{self._sequence - 2}/{self.rank}")

    def _publish(self, record: dict[str, Any]) -> None:
        if self.store is not None:
            self.store.set(f"at/{self.rank}", json.dumps(record))

    def _failed(self, record: dict[str, Any], error: RuntimeError) -> DistributedError:
        lines, missing = [], []
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
                lines.append(f"rank {rank} is at collective {there['number']}, {call_text(there)}")
        if missing and places:
            lines.append(f"{ranks_text(missing)} said nothing: busy elsewhere, or ended (look for an earlier error there)")
        cause = (str(error).splitlines() or [type(error).__name__])[0][:300]
        closed = any(words in cause for words in _CLOSED)
        how = "ended because another rank closed the connection" if closed else f"did not finish within {self.timeout_s:g} s or failed"
        return DistributedError(
            f"Rank {self.rank} of {self.size} in group {self.name!r}: "
            f"{'collective ' + str(record['number']) + ', ' if 'number' in record else ''}{call_text(record)}, {how}; "
            f"{'; '.join(lines) or 'nothing is known of the other ranks'}. Cause: {cause}"
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
    device: torch.device | str = "cpu",
    timeout_s: float | None = None,
    check: bool | None = None,
    store: dist.Store | None = None,
    meeting_s: float | None = None,
) -> Communicator:
    """The communicator of all processes of the run, from torchrun's environment; a SelfCommunicator where there is only this process.

    `device` is this process's (`intarsia.device.select` gives it); `cuda` without an index is the GPU that LOCAL_RANK numbers, else RANK modulo their number. `timeout_s` bounds every wait of a call
    for another rank (default: the environment variable INTARSIA_TIMEOUT_S, else 600). `meeting_s` bounds how long the processes wait for each other here and where they form a
    part of the world: a node that starts late is no hang (default: INTARSIA_MEETING_S, else the longer of 600 and `timeout_s`). `check` turns check mode on
    (default: the environment variable INTARSIA_CHECK_COLLECTIVES is 1). Processes meet at MASTER_ADDR:MASTER_PORT, or at the URL in
    INTARSIA_RENDEZVOUS (`file:///shared/path`), or through `store`. Stability: provisional.
    """
    device = torch.device(device)
    size, rank, local = (_environment_integer(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", (rank or 0) % max(1, torch.cuda.device_count()) if local is None else local)
    if (size is None) != (rank is None):
        raise UsageError("Only one of RANK and WORLD_SIZE is set. Start several processes with torchrun, or unset both for one process.")
    if size is None or rank is None or size == 1:
        return SelfCommunicator(device, "world")
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are 0 to {size - 1}.")
    timeout_s = timeout_s or _environment_integer("INTARSIA_TIMEOUT_S") or 600.0
    meeting_s = meeting_s or _environment_integer("INTARSIA_MEETING_S") or max(600.0, timeout_s)
    timeout = datetime.timedelta(seconds=meeting_s)
    url = os.environ.get("INTARSIA_RENDEZVOUS", "env://")
    if store is None and url == "env://" and not os.environ.get("MASTER_ADDR"):
        raise UsageError("WORLD_SIZE is set, but MASTER_ADDR is not. Start the processes with torchrun, or set INTARSIA_RENDEZVOUS.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options: Any = {"backend": "cpu:gloo,cuda:nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    try:
        if store is None:
            store, rank, size = next(dist.rendezvous(url, rank, size, timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=timeout, **options)
    except RuntimeError as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise DistributedError(f"Rank {rank} of {size} did not meet the others within {meeting_s:g} s. Cause: {cause}") from error
    if check is None:
        check = os.environ.get("INTARSIA_CHECK_COLLECTIVES") == "1"
    group: Any = dist.group.WORLD
    world = ProcessGroupCommunicator(group, device, "world", store, timeout_s, check, meeting_s=meeting_s)
    world._owns_world = True
    return world


def _environment_integer(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not text.isdigit():
        raise UsageError(f"The environment variable {name} must be a whole number, not {text!r}.")
    return None if text is None else int(text)


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
