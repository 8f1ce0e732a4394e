"""Profiler traces of chosen steps, in Chrome's format (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from intarsia.config import ProfileConfig


@contextlib.contextmanager
def profiled(config: ProfileConfig, step: int, rank: int, directory: Path) -> Iterator[None]:
    """A context for step `step` that writes `traces/step-STEP-rank-RANK.json` when the recipe asks for this step, and does nothing otherwise."""
    if step not in config.steps:
        yield
        return
    with torch.profiler.profile(profile_memory=config.memory, record_shapes=config.memory) as profiler:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(directory / "traces" / f"step-{step:06}-rank-{rank:04}.json"))
