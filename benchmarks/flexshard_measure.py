"""How `flexshard_gpu.py` measures: interleaved rounds by events, peak memory, exposed communication from a trace, host time."""

from __future__ import annotations

import collections
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from exposure import exposure
from flexshard_variants import Batch, Ours, Variant
from intarsia.comm import Communicator

# Kernels and copies that move data between ranks: NCCL's, copies between devices, and the flags of symmetric memory.
COMMUNICATION = ("nccl", "ptop", "p2p", "barrier", "signal", "multimem")
TRACED = 2


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_steps(variant: Variant, batch: Batch, count: int, device: torch.device) -> list[float]:
    """Milliseconds of `count` steps one right after the other, on the device's clock."""
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(count):
            variant.step(batch)
            times.append(time.perf_counter())
        return [(end - begin) * 1e3 for begin, end in itertools.pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        variant.step(batch)
        event.record()
    synchronise(device)
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def race(
    variants: Mapping[str, Variant],
    batch: Batch,
    rounds: int,
    steps: int,
    comm: Communicator,
    record: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Rounds in which each variant makes `steps` steps, in turn; the first step of each round does not count.

    Adds to `record[name]` the lists `first_ms` (by round) and `steps_ms[rank][round][step]`.
    """
    device = comm.device
    for _ in range(rounds):
        for name, variant in variants.items():
            comm.barrier("round")
            synchronise(device)
            mine = timed_steps(variant, batch, steps, device)
            entry = record[name]
            for rank, times in enumerate(comm.gather_json([round(value, 4) for value in mine], "step times")):
                entry.setdefault("first_ms", {}).setdefault(str(rank), []).append(times[0])
                entry.setdefault("steps_ms", {}).setdefault(str(rank), []).append(times[1:])
        save()


@contextlib.contextmanager
def reserved_growth(device: torch.device, entry: dict[str, Any]) -> Iterator[None]:
    """Write how much more the allocator holds after the body than before, unused blocks given back: private pools of graphs are in it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    yield
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    entry["reserved_growth_bytes"] = torch.cuda.memory_reserved(device) - before


def occupied(device: torch.device) -> tuple[int, int]:
    """Bytes that are allocated on the device, and those that the allocator holds, unused ones given back."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def measure_memory(
    variant: Variant, batch: Batch, before: tuple[int, int], device: torch.device, entry: dict[str, Any], steps: int = 3
) -> None:
    """Peaks of allocated and of held memory over some steps, less what was `occupied` before the variant was built; and what lies still between steps. What a graph computes in is held, not allocated."""
    entry["symmetric_bytes"] = variant.symmetric_bytes
    if device.type != "cuda":
        return
    synchronise(device)
    occupied(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        variant.step(batch)
    synchronise(device)
    allocated, held = before
    entry["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device) - allocated
    entry["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device) - held
    entry["static_bytes"] = torch.cuda.memory_allocated(device) - allocated


def profile(variant: Variant, batch: Batch, comm: Communicator, top: int = 20) -> dict[str, Any]:
    """A traced pair of steps on this rank: milliseconds of each step by what runs, and the largest kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    variant.step(batch)
    synchronise(comm.device)
    comm.barrier("trace")
    with trace(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(TRACED):
            variant.step(batch)
        synchronise(comm.device)
    spans, total, calls = [], collections.Counter[str](), collections.Counter[str]()
    for event in traced.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        span = event.time_range
        spans.append((span.start, span.end, any(word in event.name.lower() for word in COMMUNICATION)))
        total[event.name[:120]] += span.end - span.start
        calls[event.name[:120]] += 1
    times = {f"{what}_ms": value / TRACED / 1e3 for what, value in exposure(spans).items()}
    moving = [(end - begin) / TRACED / 1e3 for begin, end, kind in spans if kind]
    rows = [{"ms": round(value / TRACED / 1e3, 4), "calls": calls[name] / TRACED, "kernel": name} for name, value in total.most_common(top)]
    return {
        **times,
        "communication_ms": sum(moving),
        "communication_calls": len(moving) / TRACED,
        "launches": len(spans) / TRACED,
        "top": rows,
    }


def traffic(variant: Ours, batch: Batch, device: torch.device) -> dict[str, dict[str, int]]:
    """Collectives and received bytes of one step by what."""
    variant.step(batch)
    synchronise(device)
    before = variant.traffic()
    variant.step(batch)
    synchronise(device)
    after = variant.traffic()
    found = {}
    for what, entry in after.items():
        old = before.get(what, {"calls": 0, "bytes": 0})
        if entry["calls"] > old["calls"]:
            found[what] = {key: entry[key] - old[key] for key in entry}
    return found


class HostClock:
    """Seconds of the CPU in FlexShard's hooks: what a call of a bucket's module begins and ends with, and what backward calls as it enters and leaves one. `update_seconds` are those of
    optimizer steps inside of them."""

    def __init__(self, sharded: Any) -> None:
        self.seconds = self.update_seconds = 0.0
        for _, module in sharded.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number, hook in hooks.items():
                    if not hasattr(hook, "timed"):
                        hooks[number] = self._timed(hook)
        sharded._enter, sharded._leave_known = self._timed(sharded._enter), self._timed(sharded._leave_known)
        sharded._update_early = self._timed(sharded._update_early, "update_seconds")

    def _timed(self, hook: Callable[..., Any], into: str = "seconds") -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return hook(*arguments)
            finally:
                setattr(self, into, getattr(self, into) + time.perf_counter() - begin)

        timed.timed = True  # type: ignore[attr-defined]
        return timed


def host_time(variant: Ours, batch: Batch, device: torch.device, steps: int = 12) -> dict[str, Any]:
    """Milliseconds of the CPU for unshard and reduce of one bucket, by step, and apart from them for its update inside backward; medians leave the first two out. The variant is slower
    afterwards."""
    clock, count, times, updates = HostClock(variant.sharded), len(variant.sharded.buckets), [], []
    for _ in range(steps):
        clock.seconds = clock.update_seconds = 0.0
        variant.step(batch)
        synchronise(device)
        times.append(round((clock.seconds - clock.update_seconds) / count * 1e3, 5))
        updates.append(round(clock.update_seconds / count * 1e3, 5))
    return {
        "ms_per_bucket": statistics.median(times[2:]),
        "update_ms_per_bucket": statistics.median(updates[2:]),
        "steps_ms_per_bucket": times,
        "buckets": count,
    }
