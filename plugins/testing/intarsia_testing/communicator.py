"""Several ranks in one process: each is a thread. For tests of what ranks do together where no backend is the subject."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from intarsia import logical
from intarsia.comm import Communicator, ReduceOp
from intarsia.contracts import Transport
from intarsia.errors import DistributedError
from torch import Tensor

Result = TypeVar("Result")


class ThreadWorld:
    """Where the ranks of one group meet."""

    def __init__(self, size: int, timeout_s: float = 300.0):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.slots: list[Any] = [None] * size
        self.timeout_s = timeout_s
        self.parts: list[ThreadWorld] = []
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = {}

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, when all have come."""
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def abort(self) -> None:
        """Let nobody wait any longer, here or in a part: a rank has failed."""
        self.barrier.abort()
        for part in list(self.parts):
            part.abort()

    def box(self, source: int, to: int, number: int) -> queue.SimpleQueue[Tensor]:
        """Where the tensor lies that is the `number`-th from `source` to `to`."""
        return self._boxes.setdefault((source, to, number), queue.SimpleQueue())

    def take(self, source: int, to: int, number: int) -> Tensor:
        """That tensor, waited for until the time is up or another rank has failed."""
        end = time.monotonic() + self.timeout_s
        while True:
            try:
                return self.box(source, to, number).get(timeout=0.05)
            except queue.Empty:
                if self.barrier.broken:
                    raise threading.BrokenBarrierError from None
                if time.monotonic() > end:
                    raise DistributedError(
                        f"Rank {source} has not sent its tensor {number} to rank {to} within {self.timeout_s:g} s."
                    ) from None


class ThreadCommunicator(Communicator):
    """One rank of a ThreadWorld. Numbers are combined in rank order."""

    def __init__(self, world: ThreadWorld, rank: int, name: str = "threads"):
        super().__init__(name, rank, world.size)
        self.world = world
        self._numbers: collections.Counter[tuple[int, int]] = collections.Counter()

    def split(self, groups: Sequence[Sequence[int]], name: str) -> Communicator:
        mine = next(list(group) for group in groups if self.rank in group)
        part = ThreadWorld(len(mine), self.world.timeout_s)
        self.world.parts.append(part)
        worlds = self.world.swap(self.rank, part)
        return ThreadCommunicator(worlds[mine[0]], mine.index(self.rank), name)

    def duplicate(self, name: str, transport: Transport | None = None) -> Communicator:
        made = super().duplicate(name)
        if transport is not None and self.size > 1:
            transport.check(made)
            made.transport = transport
        return made

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        stacked = torch.stack(self.world.swap(self.rank, tensor.clone()))
        tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0))

    def _gather(self, local: Tensor, counts: list[int]) -> Tensor:
        return torch.cat(self.world.swap(self.rank, local.clone()))

    def _reduce_scatter(self, full: Tensor, counts: list[int], op: ReduceOp) -> Tensor:
        whole = full.clone()
        self._all_reduce(whole, op)
        return whole.split(counts)[self.rank]

    def _exchange(self, sends: list[Tensor], receive_counts: list[int]) -> list[Tensor]:
        return [sent[self.rank] for sent in self.world.swap(self.rank, [tensor.clone() for tensor in sends])]

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        tensor.copy_(self.world.swap(self.rank, tensor.clone())[root])

    def _point_to_point(self, call: str, tensor: Tensor, peer: int) -> Callable[[], object]:
        way = (self.rank, peer) if call == "send" else (peer, self.rank)
        number = self._numbers[way]
        self._numbers[way] += 1
        if call == "receive":
            return lambda: tensor.detach().copy_(self.world.take(*way, number))
        self.world.box(*way, number).put(tensor.detach().clone())
        return lambda: None


def run_ranks(size: int, work: Callable[[Communicator], Result], timeout_s: float = 300.0) -> list[Result]:
    """`work(communicator)` on each of `size` ranks at once; results in rank order. The first error that is not a peer's absence is raised."""
    world = ThreadWorld(size, timeout_s)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadCommunicator(world, rank))
        except BaseException as error:
            errors.append(error)
            world.abort()
        finally:
            # What a rank installed would be there for threads that have nothing of their own: later tests.
            logical.reset()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True, name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError) and not isinstance(error.__cause__, threading.BrokenBarrierError):
            raise error
    if errors or any(thread.is_alive() for thread in threads):
        raise errors[0] if errors else TimeoutError(f"ranks did not end within {timeout_s} s")
    return results
