"""The transport copy_engine on the GPUs of one host: it keeps every promise, and gives NCCL's bits. Two GPUs are enough.

    pytest -m gpu -s tests/gpu/test_comms_gpu.py

prints the bandwidth of both as well.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _spawn import spawn
from intarsia.comm import Communicator, Prepared, init_world
from intarsia.device import select
from intarsia_comms.copy_engine import CopyEngine, PulledGather, PulledReduce
from intarsia_comms.symmetric import NO_MULTICAST
from intarsia_testing import TransportConformance

GPUS = min(torch.cuda.device_count(), 4)
# Of each test: starting torch and NCCL in its processes takes most of it.
LIMIT_S = 280.0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="copies between GPUs need two of them on this host")]


class TestCopyEngine(TransportConformance):
    entry, device, sizes = "intarsia-comms:copy_engine", "cuda", (2,)
    timeout_s = LIMIT_S


# ---------------------------------------------------------------- in each process


def worlds() -> tuple[CopyEngine, Communicator, Communicator, Communicator]:
    """The transport, a communicator that it serves, one of NCCL, the world."""
    world = init_world(select("cuda"), 300.0)
    transport = CopyEngine()
    return transport, world.duplicate("copies", transport), world.duplicate("nccl"), world


def draw(like: torch.Tensor, seed: int) -> None:
    """Other bits of every value for every seed."""
    generator = torch.Generator(like.device).manual_seed(seed)
    data = like.view(torch.uint8)
    data.copy_(torch.randint(0, 255, data.shape, generator=generator, device=like.device, dtype=torch.uint8))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def gathers_as_nccl() -> dict[str, Any]:
    transport, copies, nccl, world = worlds()
    rank, size, device, wrong = world.rank, world.size, world.device, []
    for dtype in (torch.bfloat16, torch.uint8):
        for case, counts in {
            "even": [1 << 20] * size,
            "uneven": [(1 << 18) + 4097 * each + 1 for each in range(size)],
            "one empty": [0] + [999_999] * (size - 1),
        }.items():
            local = copies.empty(counts[rank], dtype)
            full, wanted = (torch.zeros(sum(counts), dtype=dtype, device=device) for _ in range(2))
            pulled, reference = copies.prepare_gather(local, full, counts, case), nccl.prepare_gather(local, wanted, counts, case)
            assert isinstance(pulled, PulledGather) and not isinstance(reference, PulledGather)
            assert pulled.bytes == reference.bytes
            for turn in range(10):
                draw(local, 100 * turn + rank)
                copies.fence()
                for prepared in (pulled, reference):
                    prepared.start()
                    prepared.wait()
                copies.fence()
                if not same_bits(full, wanted):
                    wrong.append(f"{dtype} {case} turn {turn}")
    copies.timed = True
    pulled.start()
    seconds = copies.stats()["one empty"].seconds
    return {"wrong": wrong, "seconds": seconds, "symmetric": transport.bytes_allocated, "multicast": os.environ[NO_MULTICAST]}


def captured_gathers() -> list[str]:
    _, copies, nccl, world = worlds()
    counts, wrong = [(1 << 20) + 3 * rank for rank in range(world.size)], []
    local = copies.empty(counts[world.rank], torch.bfloat16)
    full, wanted = (torch.zeros(sum(counts), dtype=torch.bfloat16, device=world.device) for _ in range(2))
    pulled, reference = copies.prepare_gather(local, full, counts, "captured"), nccl.prepare_gather(local, wanted, counts, "captured")
    reduced = copies.empty(sum(counts), torch.bfloat16)
    reduce = copies.prepare_reduce_scatter(reduced, counts, "captured reduce")
    reference_reduce = nccl.prepare_reduce_scatter(reduced, counts, "captured reduce")
    out, out_wanted = (torch.zeros(counts[world.rank], device=world.device) for _ in range(2))
    copies.fence()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        copies.fence()
        # Gathers on a stream of their own beside the reduction, as a step has them.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pulled.start()
        reduced.fill_(1)
        reduce.start(out)
        torch.cuda.current_stream().wait_stream(side)
        copies.fence()
    for turn in range(20):
        local.fill_(turn * world.size + world.rank)
        graph.replay()
        reference.start()
        reference_reduce.start(out_wanted)
        copies.fence()
        if not (same_bits(full, wanted) and same_bits(out, out_wanted) and bool((out == world.size).all())):
            wrong.append(f"replay {turn}")
    return wrong


def reduces_as_the_group() -> list[str]:
    _, copies, nccl, world = worlds()
    wrong = []
    for case, counts in {"even": [1 << 18] * world.size, "uneven": [77_777 + 5 * rank for rank in range(world.size)]}.items():
        full, plain = copies.empty(sum(counts), torch.bfloat16), torch.zeros(sum(counts), dtype=torch.bfloat16, device=world.device)
        pulled, reference = copies.prepare_reduce_scatter(full, counts, case), nccl.prepare_reduce_scatter(plain, counts, case)
        assert isinstance(pulled, PulledReduce)
        for turn in range(10):
            plain.normal_(generator=torch.Generator(world.device).manual_seed(turn * world.size + world.rank))
            full.copy_(plain)
            out, wanted = (torch.zeros(counts[world.rank], device=world.device) for _ in range(2))
            pulled.start(out)
            full.fill_(float("nan"))
            reference.start(wanted)
            if not same_bits(out, wanted):
                wrong.append(f"{case} turn {turn}")
    return wrong


def bandwidths() -> dict[str, float]:
    """GB/s that one GPU receives in a gather of 218 MB parts; microseconds of a fence."""
    _, copies, nccl, world = worlds()
    counts = [109_051_904] * world.size
    local = copies.empty(counts[0], torch.bfloat16).fill_(1)
    full = torch.zeros(sum(counts), dtype=torch.bfloat16, device=world.device)
    calls: dict[str, Prepared] = {
        "copy engines": copies.prepare_gather(local, full, counts),
        "NCCL": nccl.prepare_gather(local, full, counts),
    }
    copies.fence()

    def milliseconds(run: Callable[[], None], repeats: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        world.barrier()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats

    found: dict[str, list[float]] = {}
    for _ in range(6):
        for name, prepared in calls.items():
            found.setdefault(name, []).append(prepared.bytes / milliseconds(prepared.start, 5) / 1e6)
        found.setdefault("fence", []).append(1000 * milliseconds(copies.fence, 50))
    return {name: statistics.median(values[1:]) for name, values in found.items()}


# ---------------------------------------------------------------- the tests


def test_gathers_give_nccls_bits_run_after_run() -> None:
    for found in spawn(gathers_as_nccl, GPUS, world=False, timeout_s=LIMIT_S):
        assert found["wrong"] == [] and found["seconds"] > 0 and found["symmetric"] > 0 and found["multicast"] == "1"


def test_gathers_and_exchanges_are_captured_and_replayed() -> None:
    assert spawn(captured_gathers, GPUS, world=False, timeout_s=LIMIT_S) == [[]] * GPUS


def test_exchanges_give_the_process_groups_bits_and_free_their_buffer() -> None:
    assert spawn(reduces_as_the_group, GPUS, world=False, timeout_s=LIMIT_S) == [[]] * GPUS


def test_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    found = spawn(bandwidths, GPUS, world=False, timeout_s=LIMIT_S)
    with capsys.disabled():
        for name in found[0]:
            values = [each[name] for each in found]
            unit = "us" if name == "fence" else "GB/s received by each GPU"
            print(f"\n{name}: {min(values):.1f} to {max(values):.1f} {unit}, {GPUS} GPUs", end="")
    assert all(value > 0 for each in found for value in each.values())
