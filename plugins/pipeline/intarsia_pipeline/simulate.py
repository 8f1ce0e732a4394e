"""How long a schedule takes, where it stands idle and what it keeps, for given times of its actions. Torch-free; time in proportion to the number of actions.

Published bubbles, all of which `simulate` gives (F forward, I backward for inputs, W for weights, B = I + W, of one stage; R ranks; messages take no time):

    gpipe, 1f1b     (R - 1)(F + B)                    arXiv 1811.06965, 2104.04473
    interleaved     (R - 1)(F + B)                    V stages a rank: 1 / V of 1F1B's, since a stage is 1 / V of a rank's work (2104.04473, section 2.2)
    zb_h1           (R - 1)(F + I - W)                arXiv 2401.10241, table 1
    zbv             0 within each rank's own time     where F = I = W (2401.10241, section 6)
    dualpipev       (R - 1)(F&B + B - 3 W)            the table in DeepSeek's DualPipe repository, R = S / 2 for S stages; F&B is a pair; where I = F
                                                      and W is not longer (the largest of any rank)

Two bubbles are in use. `idle` counts from the first action of any rank to the last of any: what a step loses when all ranks wait for each other at its end.
`bubble` counts from a rank's own first action to its own last, the largest of any rank: what arXiv 2401.10241 calls the cost of a stage. They are equal for schedules whose first
rank both begins and ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from intarsia.errors import UsageError

from intarsia_pipeline.actions import COMPUTE, Action, Schedule
from intarsia_pipeline.order import Done, give, walk
from intarsia_pipeline.validate import ScheduleError, peak_live

# Sums of so many actions as there are must stay numbers.
LONGEST = 1e15


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds, or any other unit, that actions take. A number for all stages, or one for each stage. Stability: provisional.

    `b` whole backward (None: i + w); `pair` a forward and a backward beside each other (None: their sum, nothing gained); `comm` a message between ranks;
    `unshard` and `reduce` run beside the computation, which waits for an unshard only.
    """

    f: float | Sequence[float] = 1.0
    i: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    b: float | Sequence[float] | None = None
    pair: float | None = None
    comm: float = 0.0
    unshard: float = 0.0
    reduce: float = 0.0

    def of(self, action: Action) -> float:
        """The time of one action by itself. Actions that the device does beside the computation take none of its time."""
        stage = action.stage
        if action.kind == "F":
            return _at(self.f, stage)
        if action.kind == "I":
            return _at(self.i, stage)
        if action.kind == "W":
            return _at(self.w, stage)
        if action.kind == "B":
            return _at(self.i, stage) + _at(self.w, stage) if self.b is None else _at(self.b, stage)
        return 0.0


def _at(value: float | Sequence[float], stage: int) -> float:
    return value if isinstance(value, int | float) else value[stage]


class Span(NamedTuple):
    """One action in time."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` found. Stability: provisional.

    `makespan`: from the first action to the last. `work[rank]`: time spent computing. `idle[rank]` = makespan - work. `bubble`: the largest of any rank's own span less its work.
    `peak_live[rank]`: activations kept at most, each of one stage. `spans[rank]`: when each action ran.
    """

    makespan: float
    work: tuple[float, ...]
    idle: tuple[float, ...]
    bubble: float
    peak_live: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def idle_share(self) -> float:
        """The mean over ranks of the share of the makespan in which a rank stands idle."""
        return sum(self.idle) / (len(self.idle) * self.makespan) if self.makespan else 0.0

    def facts(self) -> dict[str, object]:
        """As JSON values, without the spans."""
        return {
            "makespan": self.makespan,
            "idle": list(self.idle),
            "idle_share": self.idle_share,
            "bubble": self.bubble,
            "peak_live": list(self.peak_live),
        }


def simulate(schedule: Schedule, times: Times | None = None) -> Simulation:
    """Run the schedule on paper: every action starts as soon as its rank is free and what it needs has arrived. ScheduleError where it cannot end. Stability: provisional."""
    times = times or Times()
    _check_times(times, schedule.stages)
    free = [0.0] * schedule.ranks
    ends: dict[Done, float] = {}
    there: dict[int, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.plan]
    placement, comm = schedule.placement, times.comm

    def visit(rank: int, actions: Sequence[Action], needs: Sequence[Done | None]) -> None:
        first = actions[0]
        if first.kind not in COMPUTE:
            if first.kind == "UNSHARD":
                there[first.stage] = free[rank] + times.unshard
            return
        length = times.of(first) if len(actions) == 1 else sum(map(times.of, actions)) if times.pair is None else times.pair
        start = free[rank]
        for action, need in zip(actions, needs, strict=True):
            if need is not None:
                start = max(start, ends[need] + (comm if placement[need[1]] != rank else 0.0))
            if there and action.kind != "W":
                start = max(start, there.get(action.stage, 0.0))
        end = free[rank] = start + length
        for action in actions:
            result = give(action)
            if result is not None:
                ends[result] = end
            spans[rank].append(Span(action, start, end))

    stuck = walk(schedule, visit)
    if stuck:
        rank, (position, _) = min(stuck.items())
        raise ScheduleError(f"Schedule {schedule.name!r} cannot end: rank {rank} stands at position {position}.", rank, position)
    return _summary(schedule, spans)


def _summary(schedule: Schedule, spans: list[list[Span]]) -> Simulation:
    begin = min((each[0].start for each in spans if each), default=0.0)
    end = max((each[-1].end for each in spans if each), default=0.0)
    work = tuple(sum(span.end - span.start for span in each if not span.action.beside) for each in spans)
    own = [each[-1].end - each[0].start if each else 0.0 for each in spans]
    return Simulation(
        makespan=end - begin,
        work=work,
        idle=tuple(end - begin - each for each in work),
        bubble=max(span - each for span, each in zip(own, work, strict=True)),
        peak_live=tuple(peak_live(actions)[0] for actions in schedule.plan),
        spans=tuple(map(tuple, spans)),
    )


def _check_times(times: Times, stages: int) -> None:
    values: Mapping[str, object] = {field.name: getattr(times, field.name) for field in dataclasses.fields(times)}
    for name, value in values.items():
        if value is None:
            continue
        each = [value] if isinstance(value, int | float) else list(value)  # type: ignore[call-overload]
        if not isinstance(value, int | float) and len(each) != stages:
            raise UsageError(
                f"times: {name} has {len(each)} values, and there are {stages} stages: give one number, or one for each stage."
            )
        if any(not 0 <= number <= LONGEST for number in each):
            raise UsageError(f"times: {name} is {value}; times are 0 or more, and at most {LONGEST:g}.")
