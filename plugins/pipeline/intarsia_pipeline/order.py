"""Walking through a schedule in an order in which it can run. Torch-free.

Validator and simulator share it. Sends never wait: they are taken by the process group as they are posted. What waits is computation, for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from intarsia_pipeline.actions import Action, Schedule

Done = tuple[str, int, int]
"""A result: ("F" or "B" (of a whole backward or its I), stage, micro-batch)."""


def need(action: Action, stages: int) -> Done | None:
    """The result of the stage before (of the stage behind, for backward) that a computation waits for; None where it waits for nothing but what its own rank did before."""
    if action.kind == "F":
        return ("F", action.stage - 1, action.micro_batch) if action.stage else None
    if action.kind in ("B", "I"):
        return ("B", action.stage + 1, action.micro_batch) if action.stage + 1 < stages else None
    return None


def give(action: Action) -> Done | None:
    """The result that others may wait for."""
    if action.kind == "F":
        return ("F", action.stage, action.micro_batch)
    return ("B", action.stage, action.micro_batch) if action.kind in ("B", "I") else None


def walk(schedule: Schedule, visit: Callable[[int, Sequence[Action], list[Done | None]], None]) -> dict[int, tuple[int, Done]]:
    """Call `visit(rank, actions, needs)` for every action, in an order in which each finds what it needs done; an action with those beside it is one visit.

    Returns, for ranks that cannot end, where each stands and what it waits for: {} for a schedule without deadlock. Takes time in proportion to the number of actions.
    """
    plan, stages = schedule.plan, schedule.stages
    done: set[Done] = set()
    waiting: dict[Done, int] = {}
    at = [0] * len(plan)
    ready = list(range(len(plan)))
    while ready:
        rank = ready.pop()
        actions, position = plan[rank], at[rank]
        length = len(actions)
        while position < length:
            end = position + 1
            while end < length and actions[end].beside:
                end += 1
            group = actions[position:end]
            needs = [need(action, stages) for action in group]
            missing = [each for each in needs if each is not None and each not in done]
            if missing:
                waiting[missing[0]] = rank
                break
            visit(rank, group, needs)
            for action in group:
                result = give(action)
                if result is not None:
                    done.add(result)
                    if result in waiting:
                        ready.append(waiting.pop(result))
            position = end
        at[rank] = position
    return {rank: (at[rank], result) for result, rank in waiting.items()}
