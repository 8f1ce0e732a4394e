"""Profiler traces of chosen steps, in Chrome's format (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from intarsia.config import ProfileConfig


def profiled(config: ProfileConfig, step: int, rank: int, directory: Path) -> contextlib.AbstractContextManager[object]:
    """A context for step `step` that writes `traces/step-STEP-rank-RANK.json` when the recipe asks for this step, and does nothing otherwise."""
    if step not in config.steps:
        return contextlib.nullcontext()
    return _traced(config.memory, directory / "traces" / f"step-{step:06}-rank-{rank:04}.json")


@contextlib.contextmanager
def _traced(memory: bool, path: Path):  # type: ignore[no-untyped-def]
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities, profile_memory=memory, record_shapes=memory) as profiler:
        yield profiler
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
