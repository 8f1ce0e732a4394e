"""Adding to a schedule what follows from it: when parameters come and go, when gradients are summed, what is sent and received. Torch-free."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from intarsia.errors import UsageError, did_you_mean

from intarsia_pipeline.actions import COMPUTE, MESSAGES, WHOLE_STAGE, Action, Schedule, freeze
from intarsia_pipeline.validate import Message, message, receiver

UNSHARD, REDUCE = ("step", "action"), ("last", "each")

# A receive is posted this many computations before the one that needs it, so that the message travels meanwhile.
RECEIVE_AHEAD = 1


def with_sharding(schedule: Schedule, unshard: str = "step", ahead: int = 1, reduce: str = "last") -> Schedule:
    """With UNSHARD and RESHARD unless the schedule has any of these, and with REDUCE unless it has any.

    `unshard`: "step" brings a stage's parameters before its first action and gives them back after its last; "action" does so around each run of actions of
    one stage that need them (W does not). They are asked for `ahead` computations early. `reduce`: "last" sums a stage's gradients after its last B or W, "each" after every one.
    """
    for name, value, known in (("unshard", unshard, UNSHARD), ("reduce", reduce, REDUCE)):
        if value not in known:
            raise UsageError(f"engine.{name} is {value!r}. {did_you_mean(value, known)}")
    if ahead < 0:
        raise UsageError(f"engine.unshard_ahead is {ahead}; it is 0 or more computations.")
    there = {action.kind for actions in schedule.plan for action in actions} & WHOLE_STAGE
    brings, sums = not there & {"UNSHARD", "RESHARD"}, "REDUCE" not in there
    if not brings and not sums:
        return schedule
    plan = [
        _sharded(list(actions), schedule.own(rank), unshard if brings else "", ahead, reduce if sums else "")
        for rank, actions in enumerate(schedule.plan)
    ]
    return dataclasses.replace(schedule, plan=freeze(plan))


def _sharded(actions: list[Action], stages: tuple[int, ...], unshard: str, ahead: int, reduce: str) -> list[Action]:
    """As `with_sharding` says; nothing for an empty `unshard` or `reduce`."""
    before: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    computing = [position for position, action in enumerate(actions) if action.kind in COMPUTE]
    for stage in stages:
        made = [position for position in computing if actions[position].stage == stage and actions[position].kind in ("B", "W")]
        for position in made if reduce == "each" else made[-1:] if reduce else ():
            after[position].append(Action("REDUCE", stage))
    using = [(number, actions[position].stage) for number, position in enumerate(computing) if actions[position].kind != "W"]
    for stage, runs in _runs(using, stages, unshard).items() if unshard else ():
        freed = -1
        for first, last in runs:
            # Never before it was given back, nor between two actions that run beside each other.
            start = max(first - ahead, freed + 1, 0)
            while actions[computing[start]].beside:
                start -= 1
            end = last
            while end + 1 < len(computing) and actions[computing[end + 1]].beside:
                end += 1
            before[computing[start]].append(Action("UNSHARD", stage))
            after[computing[end]].insert(0, Action("RESHARD", stage))
            freed = end
    full: list[Action] = []
    for position, action in enumerate(actions):
        full += [*before[position], action]
        held = after[position]
        # What comes after the first of a pair comes after both.
        if position + 1 < len(actions) and actions[position + 1].beside:
            after[position + 1] = [*held, *after[position + 1]]
        else:
            full += held
    return full


def _runs(using: list[tuple[int, int]], stages: tuple[int, ...], unshard: str) -> dict[int, list[tuple[int, int]]]:
    """For each stage the (first, last) numbers of computations between which its parameters are kept."""
    runs: dict[int, list[tuple[int, int]]] = {stage: [] for stage in stages}
    previous = -1
    for number, stage in using:
        mine = runs[stage]
        if mine and (unshard == "step" or previous == stage):
            mine[-1] = (mine[-1][0], number)
        else:
            mine.append((number, number))
        previous = stage
    return runs


def with_messages(schedule: Schedule) -> Schedule:
    """With sends and receives, unless the schedule has any.

    A send follows at once what made it. Receives are posted in the order of the sender's sends, just early enough: from one rank to another messages are one
    queue, so no rank can wait for a message behind one that nobody takes.
    """
    if any(action.kind in MESSAGES for actions in schedule.plan for action in actions):
        return schedule
    queues: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, actions in enumerate(schedule.plan):
        for action in actions:
            target = _sends_to(schedule, rank, action)
            if target is not None:
                queues[rank, target].append(("F" if action.kind == "F" else "B", action.stage, action.micro_batch))
    return dataclasses.replace(schedule, plan=freeze(_communicating(schedule, rank, queues) for rank in range(schedule.ranks)))


def _sends_to(schedule: Schedule, rank: int, action: Action) -> int | None:
    """The other rank that needs what the action gives."""
    if action.kind not in ("F", "B", "I"):
        return None
    stage = action.stage + 1 if action.kind == "F" else action.stage - 1
    if not 0 <= stage < schedule.stages or schedule.placement[stage] == rank:
        return None
    return schedule.placement[stage]


def _waits_for(schedule: Schedule, rank: int, action: Action) -> tuple[int, Message] | None:
    """The rank and the message that the action waits for."""
    if action.kind not in ("F", "B", "I"):
        return None
    stage = action.stage - 1 if action.kind == "F" else action.stage + 1
    if not 0 <= stage < schedule.stages or schedule.placement[stage] == rank:
        return None
    return schedule.placement[stage], ("F" if action.kind == "F" else "B", stage, action.micro_batch)


def _communicating(schedule: Schedule, rank: int, queues: dict[tuple[int, int], list[Message]]) -> list[Action]:
    actions = schedule.plan[rank]
    place = {
        message: (source, number) for (source, target), queue in queues.items() if target == rank for number, message in enumerate(queue)
    }
    posted: dict[int, int] = defaultdict(int)
    computing = [position for position, action in enumerate(actions) if action.kind in COMPUTE]
    number_of = {position: number for number, position in enumerate(computing)}
    full: list[Action] = []
    sends: list[Action] = []

    def receive_up_to(wanted: Message) -> None:
        if wanted not in place:
            return  # Nobody sends it: the validator says so.
        source, number = place[wanted]
        for kind, stage, micro_batch in queues[source, rank][posted[source] : number + 1]:
            full.append(Action("RECEIVE_F", stage + 1, micro_batch) if kind == "F" else Action("RECEIVE_B", stage - 1, micro_batch))
        posted[source] = max(posted[source], number + 1)

    for position, action in enumerate(actions):
        if action.kind in COMPUTE and not action.beside:
            # With it come the messages of what runs beside it, and of the next.
            first = number_of[position]
            last = first + RECEIVE_AHEAD
            while first + 1 < len(computing) and actions[computing[first + 1]].beside:
                first, last = first + 1, last + 1
            for ahead in range(number_of[position], min(last + 1, len(computing))):
                waited = _waits_for(schedule, rank, actions[computing[ahead]])
                if waited is not None:
                    receive_up_to(waited[1])
        full.append(action)
        if _sends_to(schedule, rank, action) is not None:
            kind = "SEND_F" if action.kind == "F" else "SEND_B"
            sends.append(Action(kind, action.stage, action.micro_batch))  # type: ignore[arg-type]
        if not (position + 1 < len(actions) and actions[position + 1].beside):
            full += sends
            sends = []
    return full


def releases(schedule: Schedule, rank: int) -> dict[Message, list[Message]]:
    """For each message that comes to `rank`: messages that `rank` had sent to the same other rank, and which that one had received before it sent this one. Once it is here their memory is free."""
    found: dict[Message, list[Message]] = {}
    for other in set(schedule.placement) - {rank}:
        received: list[Message] = []
        for action in schedule.plan[other]:
            waited = _waits_for(schedule, other, action)
            if waited is not None and waited[0] == rank:
                received.append(waited[1])
            elif action.kind.startswith("SEND"):
                sent = message(action)
                if schedule.placement[receiver(sent)] == rank and received:
                    found[sent], received = received, []
    return found
