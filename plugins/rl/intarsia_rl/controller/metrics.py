"""Numbers of a step's rollouts and of an evaluation, as JSON."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Any

from intarsia_rl.contracts import GeneratorStats, Sample
from intarsia_rl.controller.buffer import Block, lag_of


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, mean and greatest; nothing of no values."""
    return {"min": min(values), "mean": statistics.fmean(values), "max": max(values)} if values else {}


def of_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Reward, its parts, lengths, limits and failures of samples. Means are over those that did not fail."""
    live = [sample for sample in samples if sample.failure is None]
    failures = collections.Counter(sample.failure.boundary for sample in samples if sample.failure is not None)
    parts: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for sample in live:
        for into, found in ((parts, sample.rewards), (metrics, sample.metrics)):
            for name, value in found.items():
                into.setdefault(name, []).append(value)
    return {
        "reward": statistics.fmean(sample.reward for sample in live) if live else None,
        "rewards": {name: statistics.fmean(values) for name, values in sorted(parts.items())},
        "metrics": {name: statistics.fmean(values) for name, values in sorted(metrics.items())},
        "samples": len(samples),
        "truncated": sum(sample.truncated for sample in live),
        "failures": dict(sorted(failures.items())),
        "tokens": sum(sample.trained_tokens for sample in live),
        "length": spread([float(sample.trained_tokens) for sample in live]),
        "seconds_s": {
            name: statistics.fmean(sample.timings_s.get(name, 0.0) for sample in live) for name in ("generate", "environment", "total") if live
        },
    }  # fmt: skip


def of_block(block: Block, step: int) -> dict[str, Any]:
    """What a step trains on, and what was left out on the way."""
    kept = [sample for group in block.kept for sample in group.samples if sample.failure is None]
    everything = [sample for group in (*block.kept, *block.left_out) for sample in group.samples]
    return {
        **of_samples(everything),
        "lag": spread([float(lag_of(sample, step)) for sample in kept]),
        "groups": len(block.kept),
        "groups_filtered": sum(group.status == "filtered" for group in block.left_out),
        "groups_failed": sum(group.status == "failed" for group in block.left_out),
        "trained_samples": len(kept),
        "trained_tokens": sum(sample.trained_tokens for sample in kept),
        "first_use": block.first,
    }


class Idle:
    """How long each side had nothing to do between two steps, and how fast generators were."""

    def __init__(self, now: float):
        self._since, self._waited = now, 0.0
        self._last = GeneratorStats()

    def waited(self, seconds: float) -> None:
        """The trainer waited for the controller."""
        self._waited += seconds

    def take(self, now: float, totals: GeneratorStats, generators: int) -> dict[str, Any]:
        """The numbers since the last call. `idle` are shares of the time: 0 is busy all along."""
        wall, last = max(now - self._since, 1e-9), self._last
        busy = (totals.busy_s - last.busy_s) / (wall * generators)
        found = {
            "interval_s": wall,
            "idle": {"trainer": min(1.0, self._waited / wall), "generators": min(1.0, max(0.0, 1.0 - busy))},
            "generated_tokens_per_s": max(0, totals.generated_tokens - last.generated_tokens) / wall,
            "cached_tokens": max(0, totals.cached_tokens - last.cached_tokens),
            "cache_used": totals.cache_used,
            "running_requests": totals.running,
            "waiting_requests": totals.waiting,
        }
        self._since, self._waited, self._last = now, 0.0, totals
        return found
