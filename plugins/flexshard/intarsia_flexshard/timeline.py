"""Where a step's time goes, bucket by bucket.

    with timeline(sharded) as found:
        ...  # a training step
    found.facts()

The stream that computes is cut up without a gap: at every moment it runs a bucket's forward or backward, waits for a gather or for a sum (that is what is *exposed*), updates,
or does the rest (loss, norm, whatever belongs to no bucket), so that all times add up to the step's. Gathers and reductions are measured on streams of their own. On a device
all times are its own, between CUDA events; on a CPU they are the host's, and a gather or a reduction lasts until it has been waited for.

While it is there a timeline is `Lanes.observer`; else that is None, and nothing is measured or named.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from intarsia.errors import UsageError

if TYPE_CHECKING:
    from intarsia.contracts import Run

    from intarsia_flexshard.runtime import FlexShardModel

Label = tuple[str, str]
REST: Label = ("rest", "")
# What the computing stream waits for, and what that ends.
WAITS = {"wait": "gather", "wait for sum of": "reduce"}


class Timeline:
    """The observer of one step of a sharded model. With `trace` every phase also appears by name in a profiler's trace: `gather layers.3` and so on. Stability: provisional."""

    def __init__(self, sharded: FlexShardModel, trace: bool = True) -> None:
        self._sharded, self._lanes, self._trace = sharded, sharded.lanes, trace
        self._marks: list[tuple[Label, Any]] = []
        self._stack: list[tuple[Label, Any]] = []
        # What runs beside: its begin and its range in the trace; then (label, begin, end).
        self._open: dict[Label, tuple[Any, Any]] = {}
        self._beside: list[tuple[Label, Any, Any]] = []
        self._before: dict[str, tuple[int, int]] = {}
        self._moved: dict[str, tuple[int, int]] = {}
        self._is_over = False
        self._nothing = torch.zeros(1, device=sharded.buckets[0].groups.gather.device)

    # ------------------------------------------------------------ begin and end

    def start(self) -> None:
        """Measure from here on. Raises UsageError where a step is captured, which makes no calls that could be measured, or where somebody measures already."""
        if self._sharded.self_contained:
            raise UsageError("A captured step has no timeline: it is one launch. Measure the step before it is captured.")
        if self._lanes.observer is not None:
            raise UsageError("This model's step is being measured already: stop the first timeline before the next begins.")
        self._before = self._counts()
        self._lanes.observer = self
        self._mark(REST)

    def stop(self, now: bool = True) -> None:
        """Measure no longer, and wait for what is under way. The step ends now, or else where the runtime last said something."""
        if self._is_over:
            return
        if now:
            self.clear()
        self._is_over = True
        if self._lanes.on_device:
            torch.cuda.synchronize()
        else:
            for bucket in self._sharded.buckets:
                bucket.settle()
        self._lanes.observer = None
        counts = self._counts()
        self._moved = {name: (calls - self._before[name][0], size - self._before[name][1]) for name, (calls, size) in counts.items()}

    def _counts(self) -> dict[str, tuple[int, int]]:
        """Calls and received bytes by bucket and phase, until now."""
        found = {}
        for bucket in self._sharded.buckets:
            for phase, group, whats in (
                ("gather", bucket.groups.gather, (f"unshard {bucket.name}",)),
                ("reduce", bucket.groups.reduce, (f"reduce {bucket.name}", f"reduce {bucket.name} over replicas")),
                ("replicas", bucket.groups.replicas, (f"reduce {bucket.name} over replicas",)),
            ):
                if phase == "replicas" and group is bucket.groups.reduce:
                    continue
                done = [group.stats()[what] for what in whats if what in group.stats()]
                found[f"{phase} {bucket.name}"] = (sum(each.calls for each in done), sum(each.bytes for each in done))
        return found

    # ------------------------------------------------------------ what the runtime says

    def enter(self, phase: str, name: str) -> None:
        """The computing stream begins a phase of a bucket, inside the one it is in. A backward pass that is entered again goes on."""
        label = (phase, name)
        if phase == "backward" and any(label == other for other, _ in self._stack):
            return
        self._stack.append((label, self._range(label)))
        if self._trace and phase in WAITS and self._lanes.on_device:
            self._nothing.add_(1)  # A range's time on the device is that of its kernels.
        self._mark(label)

    def leave(self, phase: str, name: str) -> None:
        """It has ended, and what was entered inside it with it."""
        label = (phase, name)
        if not any(label == other for other, _ in self._stack):
            return
        while True:
            ended, named = self._stack.pop()
            self._mark(self._stack[-1][0] if self._stack else REST)
            if self._trace and ended[0] in WAITS and self._lanes.on_device:
                self._nothing.add_(1)
            _close(named)
            if ended == label:
                break
        beside = (WAITS.get(phase, ""), name)
        if not self._lanes.on_device and beside in self._open:
            # What is still under way as the step ends is measured up to there.
            self._beside.append((beside, self._open.pop(beside)[0], self._marks[-1][1] if self._is_over else time.perf_counter()))

    def clear(self) -> None:
        """Whatever was entered has ended: backward passes are not left where no gradient leaves them."""
        while self._stack:
            self.leave(*self._stack[0][0])
        self._mark(REST)

    def begin(self, phase: str, name: str) -> None:
        """Something begins beside, on the current stream."""
        label = (phase, name)
        self._open[label] = (self._now(beside=True), self._range(label))

    def end(self, phase: str, name: str) -> None:
        """All of it has been enqueued."""
        label = (phase, name)
        begin, named = self._open[label]
        _close(named)
        if self._lanes.on_device:
            del self._open[label]
            self._beside.append((label, begin, self._now(beside=True)))
        else:
            self._open[label] = (begin, None)

    def _mark(self, label: Label) -> None:
        if not self._is_over:
            self._marks.append((label, self._now()))

    def _now(self, beside: bool = False) -> Any:
        if not self._lanes.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream() if beside else self._lanes.compute)
        return event

    def _range(self, label: Label) -> Any:
        return torch.profiler.record_function(" ".join(label)).__enter__() if self._trace else None

    # ------------------------------------------------------------ the answer

    def facts(self) -> dict[str, Any]:
        """The table, as JSON; milliseconds and bytes of this rank. See `timeline` in docs/reference/run-directory.md."""
        self.stop()
        spent: dict[Label, float] = collections.defaultdict(float)
        for (label, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            spent[label] += self._ms(begin, end)
        beside: dict[Label, float] = collections.defaultdict(float)
        for label, begin, end in self._beside:
            beside[label] += self._ms(begin, end)
        names = [bucket.name for bucket in self._sharded.buckets]
        rows = [self._row(name, spent, beside) for name in names]
        return {
            "clock": "device" if self._lanes.on_device else "host",
            "step_ms": sum(spent.values()),
            "compute_ms": sum(row["compute_ms"] for row in rows),
            "exposed_ms": sum(row["exposed_ms"] for row in rows),
            "update_ms": sum(ms for (phase, _), ms in spent.items() if phase == "update"),
            "rest_ms": spent[REST],
            "buckets": rows,
        }

    def _row(self, name: str, spent: Mapping[Label, float], beside: Mapping[Label, float]) -> dict[str, Any]:
        gathers, gathered = self._moved[f"gather {name}"]
        reductions, reduced = self._moved[f"reduce {name}"]
        wait, wait_sum = (spent.get((phase, name), 0.0) for phase in WAITS)
        return {
            "bucket": name,
            "gathers": gathers,
            "gather_ms": beside.get(("gather", name), 0.0),
            "wait_ms": wait,
            "compute_ms": spent.get(("forward", name), 0.0) + spent.get(("backward", name), 0.0),
            "reductions": reductions,
            "reduce_ms": beside.get(("reduce", name), 0.0),
            "wait_sum_ms": wait_sum,
            "exposed_ms": wait + wait_sum,
            "gathered_bytes": gathered,
            "reduced_bytes": reduced + self._moved.get(f"replicas {name}", (0, 0))[1],
        }

    def _ms(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self._lanes.on_device else (end - begin) * 1000.0


def _close(named: Any) -> None:
    if named is not None:
        named.__exit__(None, None, None)


@contextlib.contextmanager
def timeline(sharded: FlexShardModel, trace: bool = True) -> Iterator[Timeline]:
    """Measure the step inside it; `facts()` of what it gives is the table. See `Timeline`. Stability: provisional."""
    found = Timeline(sharded, trace)
    found.start()
    try:
        yield found
    finally:
        found.stop()


# ---------------------------------------------------------------- in a run


def begin_step(run: Run, step: int) -> None:
    """Before every step, on every rank: measure it if the recipe asks for it (`profile.steps`)."""
    sharded = run.parts["parameters"]
    lanes = getattr(sharded, "lanes", None)
    if lanes is None:
        return
    if isinstance(lanes.observer, Timeline):  # Of the step before, on a rank that writes nothing.
        lanes.observer.stop()
    if step in run.recipe.profile.steps:
        Timeline(sharded).start()


def end_step(run: Run, step: int) -> None:
    """After a measured step, on rank 0: write its table into the run's events."""
    measured = getattr(getattr(run.parts["parameters"], "lanes", None), "observer", None)
    if isinstance(measured, Timeline):
        measured.stop(now=False)  # A trace has been written since, which is no part of the step.
        run.record("timeline", step=step + 1, rank=run.rank, **measured.facts())
