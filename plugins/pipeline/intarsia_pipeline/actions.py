"""What a pipeline schedule is: for each rank a list of actions. Torch-free.

Stages are numbered in the order of the model; a rank has one or several (virtual stages). An action is one thing that one stage does for one micro-batch:

    F       forward                                B       backward, whole
    I       backward for the inputs alone          W       what is left of it: the gradients of weight matrices
    SEND_F, RECEIVE_F   what a forward hands on    SEND_B, RECEIVE_B   the gradient of it, the other way
    UNSHARD, RESHARD    bring the stage's whole parameters, give them back
    REDUCE              sum the stage's gradients over the ranks that share it

A schedule says what each rank computes (F, B, I, W); `intarsia_pipeline.lower` adds the other actions unless the schedule has them already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECEIVE_F", "SEND_B", "RECEIVE_B", "UNSHARD", "RESHARD", "REDUCE"]

KINDS: tuple[str, ...] = ("F", "B", "I", "W", "SEND_F", "RECEIVE_F", "SEND_B", "RECEIVE_B", "UNSHARD", "RESHARD", "REDUCE")
COMPUTE = frozenset("FBIW")
MESSAGES = frozenset(("SEND_F", "RECEIVE_F", "SEND_B", "RECEIVE_B"))
WHOLE_STAGE = frozenset(("UNSHARD", "RESHARD", "REDUCE"))


class Action(NamedTuple):
    """One action. Stability: provisional.

    `micro_batch` is -1 for UNSHARD, RESHARD and REDUCE. `beside`: it may run at the same time as the action before it on the rank, which is of the other direction
    (DualPipe's overlapped forward and backward); such a pair starts when both can and ends as one.
    """

    kind: Kind
    stage: int
    micro_batch: int = -1
    beside: bool = False

    def __str__(self) -> str:
        number = "" if self.kind in WHOLE_STAGE else f", micro-batch {self.micro_batch}"
        return f"{self.kind}(stage {self.stage}{number})"


Plan = tuple[tuple[Action, ...], ...]
"""For each rank its actions, in order."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule for given sizes. Stability: provisional.

    `placement[stage]` is the rank that has the stage; `plan[rank]` what the rank does.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    plan: Plan

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.plan)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    @property
    def split(self) -> bool:
        """Whether backward is split into I and W anywhere."""
        return any(action.kind == "I" for actions in self.plan for action in actions)

    def own(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)


@runtime_checkable
class PipelineSchedule(Protocol):
    """What an entry of kind "pipeline schedule" builds by `target(config)`. Pure: the same answer whenever and on whichever rank it is asked. Stability: provisional."""

    def placement(self, ranks: int) -> Sequence[int]:
        """The rank of each stage, in the order of stages. Every rank has equally many. UsageError where there is none for this number of ranks."""

    def least(self, ranks: int) -> int:
        """How many micro-batches it needs so that no rank stands idle for lack of them. With fewer it must still be legal."""

    def plan(self, ranks: int, micro_batches: int) -> Sequence[Iterable[Action]]:
        """For each rank what it computes, in order, for any `micro_batches` from 1 on. UsageError for numbers that it cannot serve, with the nearest that it can."""


def loop(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stages dealt out round and round: 0 1 2 3 0 1 2 3. Stability: provisional."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def v_shape(ranks: int) -> tuple[int, ...]:
    """Down and up again, two stages on each rank: 0 1 2 3 3 2 1 0. Stability: provisional."""
    return (*range(ranks), *reversed(range(ranks)))


def restrict(plan: Iterable[Iterable[Action]], micro_batches: int) -> list[list[Action]]:
    """`plan` without what it does for micro-batches that do not exist. What is legal stays legal: micro-batches never wait for each other, only for a rank.

    An action beside one that is gone stands alone. Stability: provisional.
    """
    kept: list[list[Action]] = []
    for actions in plan:
        mine: list[Action] = []
        partner = False
        for action in actions:
            exists = action.micro_batch < micro_batches
            if exists:
                mine.append(action._replace(beside=False) if action.beside and not partner else action)
            partner = exists
        kept.append(mine)
    return kept


def freeze(plan: Iterable[Iterable[Action]]) -> Plan:
    """As a Plan."""
    return tuple(tuple(actions) for actions in plan)


def positions(actions: Sequence[Action]) -> Mapping[Action, int]:
    """Where each action of a rank stands; actions are compared without `beside`."""
    return {action._replace(beside=False): place for place, action in enumerate(actions)}
