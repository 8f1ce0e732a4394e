"""What makes a schedule right: nothing missing, nothing twice, nobody waits for ever, and what it keeps alive. Torch-free."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence, Set

from intarsia.errors import PluginError, UsageError

from intarsia_pipeline.actions import COMPUTE, KINDS, MESSAGES, WHOLE_STAGE, Action, Schedule
from intarsia_pipeline.order import Done, walk


class ScheduleError(PluginError):
    """A schedule that must not run. `rank` and `position` say where in its plan, -1 where the fault is of no one action. Stability: provisional."""

    def __init__(self, text: str, rank: int = -1, position: int = -1) -> None:
        super().__init__(text)
        self.rank, self.position = rank, position


@dataclasses.dataclass(frozen=True)
class Facts:
    """What validation found. `peak_live[rank]`: activations kept at most, each of one stage and one micro-batch, from its F to its B or W. Stability: provisional."""

    peak_live: tuple[int, ...]
    actions: int


def validate(schedule: Schedule, max_live: int | None = None) -> Facts:
    """Raise ScheduleError, which names rank, action and position, unless the schedule can run and computes every stage's forward and backward of every micro-batch once.

    `max_live`: raise UsageError where a rank keeps more activations alive. Stability: provisional.
    """
    _check_placement(schedule)
    kinds = {action.kind for actions in schedule.plan for action in actions}
    for rank, actions in enumerate(schedule.plan):
        _check_actions(schedule, rank, actions)
        _check_complete(schedule, rank, actions)
        _check_order(schedule, rank, actions)
        _check_whole_stages(schedule, rank, actions, kinds)
    _check_messages(schedule)
    _check_deadlock(schedule)
    peaks = tuple(peak_live(actions) for actions in schedule.plan)
    for rank, (peak, position) in enumerate(peaks):
        if max_live is not None and peak > max_live:
            raise UsageError(
                f"Schedule {schedule.name!r} keeps {peak} activations alive on rank {rank}, at position {position} ({schedule.plan[rank][position]}), and "
                f"max_live is {max_live}. Allow {peak}, or choose a schedule that keeps less: `intarsia pipeline show NAME` says how much each one keeps."
            )
    return Facts(tuple(peak for peak, _ in peaks), sum(map(len, schedule.plan)))


def _fault(schedule: Schedule, rank: int, position: int, text: str) -> ScheduleError:
    action = schedule.plan[rank][position] if 0 <= position < len(schedule.plan[rank]) else None
    where = f"rank {rank}" + (f", position {position}, {action}" if action is not None else "")
    return ScheduleError(
        f"Schedule {schedule.name!r} ({schedule.ranks} ranks, {schedule.micro_batches} micro-batches): {where}: {text}", rank, position
    )


def _check_placement(schedule: Schedule) -> None:
    counts = Counter(schedule.placement)
    if schedule.micro_batches < 1:
        raise ScheduleError(f"Schedule {schedule.name!r} is made for {schedule.micro_batches} micro-batches; there is at least 1.")
    if set(counts) != set(range(schedule.ranks)) or len(set(counts.values())) != 1:
        shown = ", ".join(f"rank {rank}: {counts.get(rank, 0)}" for rank in sorted({*range(schedule.ranks), *counts})[:16])
        raise ScheduleError(
            f"Schedule {schedule.name!r}: every one of {schedule.ranks} ranks must have equally many stages, and they have {shown}."
        )


def _check_actions(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """Each action is one that exists, of a stage and a micro-batch that exist, on the stage's rank."""
    for position, action in enumerate(actions):
        if action.kind not in KINDS:
            raise _fault(schedule, rank, position, f"there is no action {action.kind!r}. Known: {', '.join(KINDS)}.")
        if not 0 <= action.stage < schedule.stages:
            raise _fault(schedule, rank, position, f"there is no stage {action.stage}; stages are 0 to {schedule.stages - 1}.")
        if schedule.placement[action.stage] != rank:
            raise _fault(schedule, rank, position, f"stage {action.stage} is rank {schedule.placement[action.stage]}'s.")
        if action.kind not in WHOLE_STAGE and not 0 <= action.micro_batch < schedule.micro_batches:
            raise _fault(schedule, rank, position, f"there is no such micro-batch; they are 0 to {schedule.micro_batches - 1}.")
        if action.beside and (position == 0 or _direction(action) == _direction(actions[position - 1]) or actions[position - 1].beside):
            raise _fault(
                schedule, rank, position, "it runs beside the action before it, which must be one of the other direction (F beside B or I)."
            )


def _direction(action: Action) -> str:
    return {"F": "forward", "B": "backward", "I": "backward"}.get(action.kind, "none")


def _check_complete(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """F once, and either B once or I and W once each."""
    found: dict[tuple[str, int, int], int] = {}
    for position, action in enumerate(actions):
        if action.kind in COMPUTE:
            key = (action.kind, action.stage, action.micro_batch)
            if key in found:
                raise _fault(schedule, rank, position, f"it is there already, at position {found[key]}.")
            found[key] = position
    for stage in schedule.own(rank):
        for number in range(schedule.micro_batches):
            there = "".join(kind for kind in "FBIW" if (kind, stage, number) in found)
            if there in ("FB", "FIW"):
                continue
            last = max((found[kind, stage, number] for kind in there), default=-1)
            if "B" in there and ("I" in there or "W" in there):
                problem = f"stage {stage}, micro-batch {number} has a whole backward (B) and parts of one ({', '.join(there[2:])}): it is either B, or I and W"
            else:
                wanted = "F" if "F" not in there else "W" if "I" in there else "I" if "W" in there else "B (or I and W)"
                problem = f"stage {stage}, micro-batch {number} lacks {wanted}"
            raise _fault(schedule, rank, last, f"{problem}.")


def _check_order(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """On its own rank backward follows forward, and W follows I."""
    seen: set[tuple[str, int, int]] = set()
    before = {"B": "F", "I": "F", "W": "I"}
    for position, action in enumerate(actions):
        need = before.get(action.kind)
        if need is not None and (need, action.stage, action.micro_batch) not in seen:
            raise _fault(
                schedule, rank, position, f"it comes before {need}(stage {action.stage}, micro-batch {action.micro_batch}), which it needs."
            )
        if action.kind in COMPUTE:
            seen.add((action.kind, action.stage, action.micro_batch))


def _check_whole_stages(schedule: Schedule, rank: int, actions: Sequence[Action], kinds: Set[str]) -> None:
    """Where the schedule says, on any rank, when parameters come and go: they are there when they are needed, and no gradient is left unsummed."""
    if kinds & {"UNSHARD", "RESHARD"}:
        whole: set[int] = set()
        for position, action in enumerate(actions):
            if action.kind == "UNSHARD":
                whole.add(action.stage)
            elif action.kind == "RESHARD":
                if action.stage not in whole:
                    raise _fault(schedule, rank, position, "the stage's parameters are not there: it was not unsharded before.")
                whole.discard(action.stage)
            elif action.kind in ("F", "B", "I") and action.stage not in whole:
                raise _fault(schedule, rank, position, f"it needs the parameters of stage {action.stage}, which are not unsharded.")
        if whole:
            raise _fault(schedule, rank, -1, f"stage {min(whole)} is unsharded and never resharded.")
    if "REDUCE" in kinds:
        fresh: dict[int, int] = {}
        for position, action in enumerate(actions):
            if action.kind in ("B", "W"):
                fresh[action.stage] = position
            elif action.kind == "REDUCE":
                fresh.pop(action.stage, None)
        for stage, position in sorted(fresh.items()):
            raise _fault(schedule, rank, position, f"its gradients are not reduced: no REDUCE(stage {stage}) follows.")


Message = tuple[str, int, int]
"""("F" or "B", the stage that it comes from, micro-batch)."""


def message(action: Action) -> Message:
    """Which message a send or receive is of. The stage of a receive is where it arrives."""
    direction = action.kind[-1]
    if action.kind.startswith("SEND"):
        return direction, action.stage, action.micro_batch
    return direction, action.stage - 1 if direction == "F" else action.stage + 1, action.micro_batch


def receiver(sent: Message) -> int:
    """The stage where a message arrives."""
    return sent[1] + 1 if sent[0] == "F" else sent[1] - 1


def _check_messages(schedule: Schedule) -> None:
    """Where the schedule has sends and receives: they pair up, in one order on both sides, after what is sent was made and before what needs it."""
    if not any(action.kind in MESSAGES for actions in schedule.plan for action in actions):
        return
    sent: dict[tuple[int, int], list[tuple[Message, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[Message, int]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.plan):
        made: set[Done] = set()
        posted: set[Message] = set()
        for position, action in enumerate(actions):
            if action.kind in MESSAGES:
                what = message(action)
                source, target = (what[1], receiver(what))
                if not (0 <= source < schedule.stages and 0 <= target < schedule.stages):
                    raise _fault(schedule, rank, position, "there is no stage at the other end.")
                other = schedule.placement[target if action.kind.startswith("SEND") else source]
                if other == rank:
                    raise _fault(schedule, rank, position, f"stages {source} and {target} are both on this rank: nothing is sent.")
                if action.kind.startswith("SEND"):
                    if what not in made:
                        raise _fault(schedule, rank, position, "what it sends has not been computed yet.")
                    sent[rank, other].append((what, position))
                else:
                    posted.add(what)
                    received[other, rank].append((what, position))
            elif action.kind in ("F", "B", "I"):
                kind = "F" if action.kind == "F" else "B"
                made.add((kind, action.stage, action.micro_batch))
                source = action.stage - 1 if kind == "F" else action.stage + 1
                is_end = not 0 <= source < schedule.stages
                if not is_end and schedule.placement[source] != rank and (kind, source, action.micro_batch) not in posted:
                    raise _fault(
                        schedule,
                        rank,
                        position,
                        f"RECEIVE_{kind}(stage {action.stage}, micro-batch {action.micro_batch}) does not come before it.",
                    )
    for source, target in sorted({*sent, *received}):
        _check_edge(schedule, source, target, sent[source, target], received[source, target])


def _check_edge(
    schedule: Schedule, source: int, target: int, sends: list[tuple[Message, int]], receives: list[tuple[Message, int]]
) -> None:
    for number in range(max(len(sends), len(receives))):
        if number >= len(receives):
            raise _fault(schedule, source, sends[number][1], f"rank {target} never receives it.")
        if number >= len(sends):
            raise _fault(schedule, target, receives[number][1], f"rank {source} never sends it.")
        if sends[number][0] != receives[number][0]:
            other = schedule.plan[target][receives[number][1]]
            raise _fault(
                schedule,
                source,
                sends[number][1],
                f"as message {number} from rank {source} to rank {target} it meets {other} at position {receives[number][1]} there. "
                "Both ranks must have them in one order.",
            )


def _check_deadlock(schedule: Schedule) -> None:
    stuck = walk(schedule, lambda rank, actions, needs: None)
    if not stuck:
        return
    lines = []
    for rank, (position, (kind, stage, number)) in sorted(stuck.items()):
        owner = schedule.placement[stage]
        lines.append(
            f"rank {rank} stands at position {position}, {schedule.plan[rank][position]}, and waits for {kind}(stage {stage}, micro-batch {number}) of rank {owner}"
        )
    shown = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more ranks" if len(lines) > 4 else "")
    rank, (position, _) = min(stuck.items())
    raise ScheduleError(
        f"Schedule {schedule.name!r} ({schedule.ranks} ranks, {schedule.micro_batches} micro-batches) cannot end: {shown}.", rank, position
    )


def peak_live(actions: Sequence[Action]) -> tuple[int, int]:
    """The most activations that a rank keeps at one time, and the position where. An activation lives from its F to its B or W."""
    live = peak = place = 0
    for position, action in enumerate(actions):
        if action.kind == "F":
            live += 1
            if live > peak:
                peak, place = live, position
        elif action.kind in ("B", "W"):
            live -= 1
    return peak, place
