"""Environments for reinforcement learning, as values and one Protocol. Torch-free.

The loop owns tokens: an environment receives the policy's messages with their token ids and answers with messages; it never tokenises. A failure of
an environment is raised as an `EnvironmentFailure` and is never a reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from intarsia.contracts.data import Parts

Boundary = Literal["model", "tool", "sandbox", "scorer", "environment"]


class EnvironmentFailure(Exception):
    """Something other than the policy failed. `boundary` says whose fault; `retry` whether the same task may be tried again. Stability: provisional."""

    def __init__(self, boundary: Boundary, message: str, *, retry: bool = False):
        super().__init__(f"{boundary}: {message}")
        self.boundary: Boundary = boundary
        self.retry = retry


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy asks for. `arguments` is JSON as generated; parsing it is the environment's. Stability: provisional."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool offered to the policy; `parameters` is a JSON schema. Stability: provisional."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One message of an episode: text, or texts and media in turns (a loop puts a medium's ids in its place before it renders them). `tokens` are the exact ids where the policy generated it. `actor` names the policy in self-play. Stability: provisional."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Parts
    tokens: tuple[int, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    actor: str = "policy"


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One problem. `id` is stable across runs; `data` is the environment's own, JSON. Stability: provisional."""

    id: str
    data: Mapping[str, Any]
    split: str = "train"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an episode; None is unbounded. Stability: provisional."""

    turns: int | None = None
    tokens_per_turn: int | None = None
    tokens: int | None = None
    seconds_per_turn: float | None = None
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees next. Stability: provisional.

    `turns` are appended to the history; with `rewrites` they replace it, which begins a new segment of the sample (compaction). `next_actor`
    names the policy that acts next.
    """

    turns: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...] = ()
    rewrites: bool = False
    next_actor: str = "policy"


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to an action. `reward` is what this step earned (None: scored at the end by rubrics). Stability: provisional.

    `ended` is the task's own end; `truncated` an end forced by a limit. `metrics` are numbers to log.
    """

    observation: Observation | None
    reward: float | None = None
    ended: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Episode(Protocol):
    """One try at one task; used by one coroutine at a time, closed exactly once. Stability: provisional."""

    async def reset(self) -> Observation:
        """The first observation."""

    async def step(self, action: Turn) -> StepResult:
        """Take the policy's turn."""

    async def close(self) -> None:
        """Release everything; also after a failure."""


@runtime_checkable
class Rubric(Protocol):
    """Scores finished episodes. Stability: provisional."""

    name: str
    weight: float

    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> Sequence[float]:
        """One score for each episode of the group (several tries at one task), so that group-wise rubrics are possible. Raises EnvironmentFailure("scorer", ...)."""


@runtime_checkable
class Environment(Protocol):
    """Built by `target(config)`. Stability: provisional."""

    limits: Limits

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split; [] for an unknown one is an error of the caller: raise UsageError with the splits there are."""

    def episode(self, task: Task, seed: int) -> Episode:
        """A new try. Equal (task, seed) and actions give equal observations."""

    def rubrics(self) -> Sequence[Rubric]:
        """What scores the finished episodes; may be empty where steps carry rewards."""
