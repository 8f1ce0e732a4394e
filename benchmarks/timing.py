"""Times of calls, by events of the GPU where there is one. For the benchmarks beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

CUDA = torch.cuda.is_available()


def milliseconds(call: Callable[[], Any]) -> float:
    """One call."""
    if not CUDA:
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def by_turns(calls: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Times of every call, one of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmup + rounds):
        for name, call in calls.items():
            taken = milliseconds(call)
            if number >= warmup:
                times[name].append(taken)
    return times
