"""What the loop needs of generators and environment workers. The pools of `intarsia_rl.processes.pools` are these, and so are doubles in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from intarsia.contracts import Task, Turn
from intarsia.contracts.environment import Episode

from intarsia_rl.contracts import Generated, GeneratorFacts, GeneratorStats, Request, WeightVersion
from intarsia_rl.processes.remote import EnvironmentFacts, Scores

__all__ = ["EnvironmentFacts", "Generators", "Scores", "Workers"]


class Generators(Protocol):
    """Some generators as one. A request whose generator dies or stands still is repeated elsewhere; the caller does not see it. Stability: provisional."""

    facts: GeneratorFacts

    @property
    def kills(self) -> int:
        """How many were lost and replaced."""

    async def generate(self, request: Request) -> Generated:
        """The completion, see `intarsia_rl.contracts.Generator`. Cancelling the call aborts the request."""

    def announce(self, weights: WeightVersion) -> None:
        """These weights are published, and will be in `update`: what starts anew before that takes them at once."""

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """Returns when every generator serves these weights, or newer ones that were announced."""

    async def stats(self) -> Mapping[int, GeneratorStats]:
        """How each is that serves now."""

    async def totals(self) -> GeneratorStats:
        """All together; counts never fall."""


class Workers(Protocol):
    """Processes that run the environment, as one. A worker that dies or hangs is replaced, and what it was asked raises EnvironmentFailure(..., retry=True), or `Bystander` where another
    try has or may have ended it. Stability: provisional."""

    @property
    def kills(self) -> int:
        """How many were lost and replaced."""

    def environment_facts(self) -> EnvironmentFacts:
        """Limits and rubrics' weights by name."""

    async def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split."""

    def episode(self, task: Task, seed: int, timeout_s: float | None = None) -> Episode:
        """A try, each of whose answers comes within `timeout_s`."""

    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> Scores:
        """Every rubric's scores of some tries at one task."""
