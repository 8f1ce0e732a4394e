"""The plan of copies for any number of ranks, as arithmetic on bytes; the transport `copy_engine` over memory of threads; what it refuses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from intarsia import plugins
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.errors import UsageError
from intarsia_comms.config import CopyEngineConfig
from intarsia_comms.copies import Copy, exchange_copies, gather_copies, received_at, turns
from intarsia_comms.copy_engine import EXCHANGE, FENCE, CopyEngine, as_bytes
from intarsia_comms.symmetric import NO_MULTICAST, DeviceMemory
from intarsia_testing.base import Conformance
from intarsia_testing.communicator import ThreadCommunicator, run_ranks
from intarsia_testing.transport_promises import PROMISES, examine
from torch import Tensor

RANKS = (2, 3, 4, 7, 8, 16)


def sizes_of(ranks: int) -> list[list[int]]:
    random_sizes = random.Random(ranks)
    drawn = [[random_sizes.choice((0, 1, 2, 62, 63)) for _ in range(ranks)] for _ in range(5)]
    return [[8] * ranks, [0] * ranks, [0] * (ranks - 1) + [5], [5] + [0] * (ranks - 1), *drawn]


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize("ranks", RANKS)
def test_in_each_turn_every_rank_is_read_by_one_other(ranks: int) -> None:
    orders = [turns(rank, ranks) for rank in range(ranks)]
    for rank, order in enumerate(orders):
        assert sorted([rank, *order]) == list(range(ranks))
    for step in range(ranks - 1):
        assert sorted(order[step] for order in orders) == list(range(ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_gather_copies_bring_every_part_to_its_place(ranks: int) -> None:
    for sizes in sizes_of(ranks):
        parts = [bytes([rank + 1]) * size for rank, size in enumerate(sizes)]
        for rank in range(ranks):
            full, order = bytearray(sum(sizes)), []
            for copy in gather_copies(rank, sizes):
                assert copy.peer != rank and copy.size and copy.destination + copy.size <= len(full)
                full[copy.destination : copy.destination + copy.size] = parts[copy.peer][copy.source : copy.source + copy.size]
                order.append(copy.peer)
            begin = sum(sizes[:rank])
            full[begin : begin + sizes[rank]] = parts[rank]
            assert bytes(full) == b"".join(parts)
            assert order == [peer for peer in turns(rank, ranks) if sizes[peer]]


@pytest.mark.parametrize("ranks", RANKS)
def test_exchange_copies_collect_what_peers_have_for_this_rank(ranks: int) -> None:
    for sizes in sizes_of(ranks):
        wholes = [b"".join(bytes([16 * owner + source]) * size for owner, size in enumerate(sizes)) for source in range(ranks)]
        for rank in range(ranks):
            received = bytearray((ranks - 1) * sizes[rank])
            copies = exchange_copies(rank, sizes)
            assert [copy.peer for copy in copies] == (turns(rank, ranks) if sizes[rank] else [])
            for copy in copies:
                received[copy.destination : copy.destination + copy.size] = wholes[copy.peer][copy.source : copy.source + copy.size]
            for peer in turns(rank, ranks):
                place = received_at(rank, peer) * sizes[rank]
                assert received[place : place + sizes[rank]] == bytes([16 * rank + peer]) * sizes[rank]


def test_the_plan_of_three_ranks() -> None:
    assert gather_copies(1, [2, 3, 0]) == (Copy(peer=0, source=0, destination=0, size=2),)
    assert gather_copies(2, [2, 3, 4]) == (Copy(0, 0, 0, 2), Copy(1, 0, 2, 3))
    assert exchange_copies(1, [2, 3, 4]) == (Copy(2, 2, 3, 3), Copy(0, 2, 0, 3))


# ---------------------------------------------------------------- the transport, over memory of threads


class ThreadBlock:
    """Tensors of the other threads."""

    def __init__(self, comm: ThreadCommunicator, size: int, log: list[Any]) -> None:
        self.comm, self.log = comm, log
        self.views: Sequence[Tensor] = comm.world.swap(comm.rank, torch.full((size,), 0xEE, dtype=torch.uint8))
        assert len({view.numel() for view in self.views}) == 1

    def barrier(self, channel: int) -> None:
        self.log.append(channel)
        self.comm.world.barrier.wait()


class ThreadMemory:
    """Memory of threads, in blocks of whole kilobytes, of which 100 bytes are lost; what ranks reach is as the test says."""

    def __init__(self, faults: dict[int, str] | None = None) -> None:
        self.log: list[Any] = []
        self.faults = faults or {}

    def fault(self, comm: Communicator) -> str | None:
        return self.faults.get(comm.rank)

    def facts(self, comm: Communicator) -> dict[str, Any]:
        return {"rank": comm.rank}

    def unreachable(self, facts: Sequence[dict[str, Any]], rank: int) -> str | None:
        assert [each["rank"] for each in facts] == list(range(len(facts)))
        return None

    def usable(self, size: int) -> int:
        return self.footprint(size) - 100

    def footprint(self, size: int) -> int:
        return -(-(size + 100) // 1024) * 1024

    def block(self, comm: Communicator, size: int) -> ThreadBlock:
        assert isinstance(comm, ThreadCommunicator)
        return ThreadBlock(comm, size, self.log)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_keeps_every_promise(size: int) -> None:
    found = run_ranks(size, lambda comm: dict(examine(CopyEngine(ThreadMemory()), comm)))
    assert found[0] == {promise.__name__: None for promise in PROMISES}


def test_blocks_are_as_large_as_the_largest_rank_needs_and_their_rest_is_used() -> None:
    def work(comm: Communicator) -> list[int]:
        transport, taken = CopyEngine(ThreadMemory()), []
        for numel in (10 + 300 * comm.rank, 0, 20, 100, 0):
            assert transport.empty(comm, numel if comm.rank == 0 else 2 * numel, torch.float32).data_ptr() % 4 == 0
            taken.append(transport.bytes_allocated)
        return taken

    # 620 floats are 2,560 bytes with alignment, in 3,072; a rest of 412 bytes holds nothing of 512, so the 40 floats take a block, whose rest is used up.
    assert run_ranks(2, work) == [[3072, 3072, 4096, 6144, 6144]] * 2


def test_own_part_is_copied_unless_it_is_there() -> None:
    def work(comm: Communicator) -> list[int]:
        transport = CopyEngine(ThreadMemory())
        full = transport.empty(comm, 8, torch.bfloat16)
        other = torch.zeros(8, dtype=torch.bfloat16)
        local = full.split([5, 3])[comm.rank]
        prepared = [transport.prepare_gather(comm, local, target, [5, 3], "x") for target in (full, other)]
        return [len(each.pairs) for each in prepared if each is not None]

    assert run_ranks(2, work) == [[1, 2]] * 2


def test_an_exchange_waits_twice_and_fences_have_a_channel_of_their_own() -> None:
    def work(comm: Communicator) -> list[int]:
        memory = ThreadMemory()
        transport = CopyEngine(memory)
        transport.fence(comm)
        assert memory.log == [] and transport.bytes_allocated == 0
        full = transport.empty(comm, 4, torch.float32)
        scratch = torch.full((2,), 7.0)
        prepared = transport.prepare_reduce_scatter(
            comm, full.fill_(comm.rank + 1), [2, 2], "x", lambda parts, out: out.copy_(parts[1]), scratch
        )
        assert prepared is not None
        out = torch.zeros(2)
        prepared.start(out)
        prepared.wait()
        transport.fence(comm)
        # The scratch receives; the own contribution stays where it is.
        assert out.tolist() == [2, 2] and scratch.tolist() == [2.0 - comm.rank] * 2
        return memory.log

    assert run_ranks(2, work) == [[EXCHANGE, EXCHANGE, FENCE]] * 2


def test_memory_of_one_communicator_serves_another_of_the_same_ranks() -> None:
    def work(comm: Communicator) -> list[float]:
        transport, other = CopyEngine(ThreadMemory()), comm.duplicate("other")
        local, full = transport.empty(comm, 1, torch.float32), torch.zeros(2)
        prepared = transport.prepare_gather(other, local.fill_(comm.rank), full, [1, 1], "x")
        assert prepared is not None
        transport.fence(other)
        prepared.start()
        transport.fence(other)
        return full.tolist()

    assert run_ranks(2, work) == [[0, 1]] * 2


def test_a_copy_is_no_change_to_autograd() -> None:
    full = torch.zeros(4, dtype=torch.bfloat16)
    before = full._version
    as_bytes(full).fill_(1)
    assert full._version == before and bool((full != 0).all())


def test_ranks_that_ask_for_different_dtypes_are_told() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(Exception, match="disagree on the dtype of memory from transport copy_engine") as caught:
            CopyEngine(ThreadMemory()).empty(comm, 4, torch.float32 if comm.rank else torch.bfloat16)
        return str(caught.value)

    assert all("float32" in text and "bfloat16" in text for text in run_ranks(2, work))


# ---------------------------------------------------------------- what it refuses


def test_every_rank_hears_of_one_ranks_fault() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            CopyEngine(ThreadMemory({1: "the GPU is on fire"})).check(comm)
        return str(caught.value)

    one, two = run_ranks(2, work)
    assert one == two and "on rank 1 the GPU is on fire" in one and "sharder.transport=none" in one and "copy_engine" in one


def test_a_cpu_is_refused_by_name() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            plugins.current().build(CopyEngineConfig()).check(comm)
        return str(caught.value)

    assert "on rank 0 its tensors are on the device 'cpu', which has no copy engines" in run_ranks(2, work)[0]


def test_a_group_of_one_needs_nothing() -> None:
    transport, alone = CopyEngine(), SelfCommunicator()
    transport.check(alone)
    memory = transport.empty(alone, 3, torch.bfloat16)
    transport.fence(alone)
    assert memory.shape == (3,) and transport.bytes_allocated == 0
    assert transport.prepare_gather(alone, memory, memory, [3], "x") is None
    assert transport.prepare_reduce_scatter(alone, memory, [3], "x", lambda parts, out: None) is None


class OnCuda(SelfCommunicator):
    """A communicator of CUDA tensors, where no device is needed to judge it."""

    def __init__(self, group: Any) -> None:
        super().__init__("cuda:0")
        self.group = group


def test_what_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(NO_MULTICAST, "1")
    monkeypatch.delenv("TORCH_SYMMMEM", raising=False)
    assert memory.fault(OnCuda(object())) is None
    assert "no torch process group" in (memory.fault(OnCuda(None)) or "")
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")
    assert "TORCH_SYMMMEM=NVSHMEM" in (memory.fault(OnCuda(object())) or "")
    monkeypatch.delenv("TORCH_SYMMMEM")
    for value in ("0", "true", ""):
        monkeypatch.setenv(NO_MULTICAST, value)
        assert f"{NO_MULTICAST} is {value!r}" in (memory.fault(OnCuda(object())) or "")
        with pytest.raises(UsageError, match="multicast must stay off"):
            memory.block(OnCuda(object()), 1024)
    monkeypatch.delenv(NO_MULTICAST)
    assert memory.fault(OnCuda(object())) is None
    import os

    assert os.environ[NO_MULTICAST] == "1"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "lacks CUDA" in (memory.fault(OnCuda(object())) or "")
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed._symmetric_memory", None)
    assert "has no symmetric memory" in (memory.fault(OnCuda(object())) or "")


def fact(rank: int, **changes: Any) -> dict[str, Any]:
    gpus = ["a", "b", "c"]
    return {"host": "h", "index": rank, "gpu": gpus[rank], "sees": gpus, "reaches": gpus, "sockets": "/tmp", **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"host": "other"}, "ranks 0 and 1 run on different hosts (h, other)"),
        ({"gpu": "a", "index": 0}, "ranks 0 and 1 share one GPU (a)"),
        ({"gpu": "z"}, "rank 0 does not see the GPU of rank 1"),
        ({"index": 0}, "rank 0 does not see the GPU of rank 1 under its own number"),
        ({"sockets": "/scratch"}, "ranks 0 and 1 have different TMPDIR (/tmp, /scratch)"),
    ],
)
def test_ranks_that_do_not_reach_each_other_are_named(changes: dict[str, Any], words: str | None) -> None:
    found = DeviceMemory().unreachable([fact(0), fact(1, **changes), fact(2)], 0)
    assert found is None if words is None else words in (found or "")


def test_gpus_without_peer_access_are_named() -> None:
    found = DeviceMemory().unreachable([fact(0, reaches=["a", "c"]), fact(1), fact(2)], 0)
    assert found is not None and "ranks 0 and 1 (cuda:0, cuda:1) have no access" in found


def test_memory_is_counted_in_the_drivers_pages() -> None:
    memory = DeviceMemory()
    assert memory.footprint(1) == 2 << 20 and memory.footprint(2 << 20) == 4 << 20
    assert memory.footprint(memory.usable(1)) == memory.footprint(1)


# ---------------------------------------------------------------- the distribution


def test_the_entry_is_light_and_names_what_exists() -> None:
    class Entry(Conformance):
        kind, entry = "transport", "intarsia-comms:copy_engine"

    Entry().test_entry_modules_import_no_torch()
    Entry().test_entry_names_what_exists()
    assert isinstance(plugins.current().build(CopyEngineConfig()), plugins.import_reference("intarsia.contracts:Transport"))
