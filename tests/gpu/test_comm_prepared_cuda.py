"""Prepared collectives over NCCL, one process for each GPU: what they mean, captured and replayed too, what a start costs the host, and a rank that stays away.

Run: pytest -m gpu tests/gpu/test_comm_prepared_cuda.py -s        (two GPUs or more; with more, the exchanges between more than two ranks are tested as well)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _spawn import spawn
from intarsia.comm import Communicator, ProcessGroupCommunicator, init_world
from intarsia.errors import DistributedError

# Of each test: starting torch and NCCL in its processes takes most of it.
LIMIT_S = 280.0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def world_of() -> Communicator:
    return init_world(f"cuda:{os.environ['LOCAL_RANK']}", 300.0)


def close(world: Communicator) -> None:
    torch.cuda.synchronize()
    world.barrier()
    world.close()


def sizes(ranks: int) -> list[list[int]]:
    return [
        [1024] * ranks,
        [(rank * 3 + 1) % 5 * 64 for rank in range(ranks)],
        [0] * (ranks - 1) + [3],
        [5] + [0] * (ranks - 1),
        [0] * ranks,
    ]


def meanings() -> list[str]:
    world, wrong = world_of(), []
    gather, reduce, me, size = world.duplicate("gather"), world.duplicate("reduce"), world.rank, world.size
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        for counts in sizes(size):
            for in_place in (False, True):
                full = torch.full((sum(counts) * dtype.itemsize,), 77, dtype=torch.uint8, device=world.device).view(dtype)
                local = full.split(counts)[me] if in_place else torch.empty(counts[me], dtype=dtype, device=world.device)
                prepared = gather.prepare_gather(local, full, counts, "unshard")
                for run in range(3):
                    local.copy_(torch.full((counts[me],), float(me + run + 1)).to(dtype))
                    prepared.start()
                    prepared.wait()
                    wanted = [float(rank + run + 1) for rank in range(size) for _ in range(counts[rank])]
                    if full.float().tolist() != wanted:
                        wrong.append(f"gather {dtype} {counts} {in_place} {run}")
            if dtype.itemsize == 1:
                continue
            source, out = torch.empty(sum(counts), dtype=dtype, device=world.device), torch.empty(counts[me], device=world.device)
            parts: list[Any] = []
            prepared_reduce = reduce.prepare_reduce_scatter(source, counts, "reduce")
            ordered = reduce.prepare_reduce_scatter(
                source, counts, "ordered", lambda found, out, kept=parts: kept.append([part.clone() for part in found])
            )
            for run in range(3):
                source.copy_(torch.arange(sum(counts)).remainder(7).add(me + run))
                prepared_reduce.start(out)
                ordered.start(out)
                mine = [torch.arange(sum(counts)).remainder(7).add(rank + run).float().split(counts)[me] for rank in range(size)]
                if out.tolist() != sum(mine).tolist() or [part.float().tolist() for part in parts[run]] != [each.tolist() for each in mine]:
                    wrong.append(f"reduce {dtype} {counts} {run}")
    statistic = gather.stats()["unshard"]
    if not statistic.calls or statistic.seconds:
        wrong.append(f"not timed unless asked: {statistic}")
    gather.timed = True
    full = torch.empty(1024 * size, device=world.device)
    gather.prepare_gather(full[:1024], full.clone(), [1024] * size, "timed").start()
    if not gather.stats()["timed"].seconds > 0:
        wrong.append("timed")
    close(world)
    return wrong


def captured() -> list[str]:
    """A gather and a reduction in one graph, in the strictest mode of capture while the watcher is at work; replayed with other values."""
    world, wrong, graphs = world_of(), [], []
    gather, reduce, me, size = world.duplicate("gather"), world.duplicate("reduce"), world.rank, world.size
    for counts in sizes(size)[:2]:
        local, full = torch.ones(counts[me], device=world.device), torch.zeros(sum(counts), device=world.device)
        source, out = torch.ones(sum(counts), device=world.device), torch.zeros(counts[me], device=world.device)
        one, other = gather.prepare_gather(local, full, counts, "unshard"), reduce.prepare_reduce_scatter(source, counts, "reduce")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            one.start()
            other.start(out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graphs.append(graph)
        # NCCL lets no group go while a graph has recorded its calls: `close` must reset this one, which is still there then.
        gather.graphs.add(graph)
        with torch.cuda.graph(graph, stream=stream):
            one.start()
            time.sleep(1.5)  # The watcher asks once a second.
            other.start(out)
        for run in range(3):
            local.fill_(me + run)
            source.fill_(me * 2 + run)
            graph.replay()
            world.watch("replay")
            if full.tolist() != [float(rank + run) for rank in range(size) for _ in range(counts[rank])]:
                wrong.append(f"gather {counts} {run}")
            if out.tolist() != [float(sum(rank * 2 + run for rank in range(size)))] * counts[me]:
                wrong.append(f"reduce {counts} {run}")
    close(world)
    return wrong


def absent(timeout_s: float) -> dict[str, Any]:
    world = world_of()
    group = world.duplicate("unshard")
    counts = [1024] * world.size
    full = torch.zeros(sum(counts), device=world.device)
    prepared = group.prepare_gather(full[:1024].clone(), full, counts, "unshard layers.3")
    prepared.start()
    torch.cuda.synchronize()
    assert isinstance(world, ProcessGroupCommunicator) and world.store is not None
    if world.rank == 1:
        # Away, but not gone, until the other has seen it.
        while not world.store.check(["seen"]):
            time.sleep(0.1)
        return {}
    world.set_timeout(timeout_s)
    message = "no error"
    try:
        prepared.start()
        torch.cuda.synchronize()
        prepared.start()
    except DistributedError as error:
        message = str(error)
    world.store.set("seen", "1")
    return {"message": message}


def cost() -> dict[str, float]:
    """Microseconds of the host for a start, beside the process group's own method."""
    world = world_of()
    group = world.duplicate("gather")
    assert isinstance(group, ProcessGroupCommunicator)
    counts = [256] * world.size
    full, local = torch.empty(sum(counts), device=world.device), torch.empty(256, device=world.device)
    prepared = group.prepare_gather(local, full, counts, "unshard")
    source, out = torch.empty(sum(counts), dtype=torch.bfloat16, device=world.device), torch.empty(256, device=world.device)
    reduce = group.prepare_reduce_scatter(source, counts, "reduce", lambda parts, out: None)
    options = torch.distributed.distributed_c10d.AllgatherOptions()
    options.asyncOp = False

    def measure(action: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(50):
                action()
            best = min(best, (time.perf_counter() - begin) / 50 * 1e6)
        return best

    found = {
        "start": measure(prepared.start),
        "process group": measure(lambda: group.group._allgather_base(full, local, options)),
        "torch.distributed": measure(lambda: torch.distributed.all_gather_into_tensor(full, local, group=group.group)),
        "reduce": measure(lambda: reduce.start(out)),
    }
    close(world)
    return found


@pytest.mark.parametrize("ranks", sorted({2, min(torch.cuda.device_count(), 4)}))
def test_they_mean_the_same_on_gpus(ranks: int) -> None:
    assert spawn(meanings, ranks, world=False, timeout_s=LIMIT_S) == [[]] * ranks


@pytest.mark.parametrize("ranks", sorted({2, min(torch.cuda.device_count(), 4)}))
def test_they_are_captured_and_replayed(ranks: int) -> None:
    assert spawn(captured, ranks, world=False, timeout_s=LIMIT_S) == [[]] * ranks


def test_a_rank_that_stays_away_is_named_within_the_limit() -> None:
    result = spawn(absent, 2, 4.0, world=False, errors=True, timeout_s=LIMIT_S)[0]["result"]
    assert "within 4 s" in result["message"]
    assert "gather 'unshard layers.3'" in result["message"] and "rank 1 said nothing" in result["message"]


def test_a_start_costs_little_more_than_the_process_group() -> None:
    for found in spawn(cost, 2, world=False, timeout_s=LIMIT_S):
        print({name: round(value, 1) for name, value in found.items()})
        assert found["start"] < found["process group"] + 5.0
