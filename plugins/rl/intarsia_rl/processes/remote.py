"""Generators, environments and episodes that are in other processes, as the contracts have them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from intarsia.contracts import Limits, Observation, StepResult, Task, Turn
from intarsia.contracts.environment import Boundary, EnvironmentFailure
from intarsia.errors import PluginError, UsageError

from intarsia_rl.contracts import Bystander, Generated, GeneratorFacts, GeneratorStats, Process, ProcessDied, Request, WeightVersion

if TYPE_CHECKING:
    from intarsia_rl.processes.workers import WorkerMember, WorkerPool


CLOSE_S = 5.0
"""How long a generator may take to end its requests before its process is ended."""


class RemoteGenerator:
    """A Generator that is in another process. Made by `connect`; all calls may raise ProcessDied, but for those of one that was closed: UsageError."""

    def __init__(self, process: Process, facts: GeneratorFacts) -> None:
        self.process, self.facts = process, facts
        self._closing: asyncio.Future[None] | None = None
        self._listeners: dict[str, Callable[[Sequence[int]], None]] = {}
        process.on_message(self._hear)

    @classmethod
    async def connect(cls, process: Process) -> RemoteGenerator:
        """The generator of a process that was started with `generator_service`."""
        return cls(process, expect(await process.call("facts"), GeneratorFacts, process.name))

    async def generate(self, request: Request, on_tokens: Callable[[Sequence[int]], None] | None = None) -> Generated:
        """See Generator. PluginError where the generator answers with something else than this request's completion."""
        if on_tokens is not None:
            self._listeners[request.id] = on_tokens
        try:
            found = expect(await self._call("generate", request, on_tokens is not None), Generated, self.process.name)
        finally:
            self._listeners.pop(request.id, None)
        if found.request != request.id or not len(found.tokens) == len(found.log_probs) == len(found.versions):
            counts = f"{len(found.tokens)} tokens, {len(found.log_probs)} log-probabilities, {len(found.versions)} versions"
            raise PluginError(f"{self.facts.name} answered request {request.id!r} with {counts} for request {found.request!r}.")
        return found

    async def abort(self, requests: Sequence[str] | None = None) -> None:
        """See Generator."""
        await self._call("abort", None if requests is None else list(requests))

    async def pause(self, keep: bool = True) -> None:
        """See Generator."""
        await self._call("pause", keep)

    async def resume(self) -> None:
        """See Generator."""
        await self._call("resume")

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """See Generator."""
        await self._call("update", weights, in_flight)

    async def stats(self, timeout_s: float | None = None) -> GeneratorStats:
        """See Generator. TimeoutError where there is no answer in `timeout_s`."""
        return expect(await self._call("stats", timeout_s=timeout_s), GeneratorStats, self.process.name)

    async def close(self) -> None:
        """End the generator, which ends what runs, and its process. May be called twice."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._end())
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            with contextlib.suppress(ProcessDied, TimeoutError):
                await self.process.call("close", timeout_s=CLOSE_S)
        finally:
            await self.process.stop()

    async def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if self._closing is not None:
            raise UsageError(f"{self.process.name} was closed: it takes no `{method}` any more.")
        return await self.process.call(method, *arguments, timeout_s=timeout_s)

    def _hear(self, kind: str, value: Any) -> None:
        if kind == "tokens" and value[0] in self._listeners:
            self._listeners[value[0]](value[1])


@dataclasses.dataclass(frozen=True)
class EnvironmentFacts:
    """What an environment says of itself: its limits, and the weights of its rubrics by name."""

    limits: Limits
    rubrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Scores:
    """What rubrics give: by name one score for each episode, or in words what was given where that is no finite number; and their weights by name."""

    values: Mapping[str, tuple[float | str, ...]]
    weights: Mapping[str, float]


class RemoteWorker:
    """The service of an environment worker (`environment_service`). Calls may raise ProcessDied, and TimeoutError which says how long was waited."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def facts(self, timeout_s: float) -> EnvironmentFacts:
        """Limits and rubrics."""
        limits, rubrics = await self.process.call("facts", timeout_s=timeout_s)
        return EnvironmentFacts(expect(limits, Limits, self.process.name), rubrics)

    async def tasks(self, split: str, start: int, count: int, timeout_s: float) -> tuple[list[Task], bool]:
        """`count` tasks of a split from `start`, and whether there are more."""
        found, more = await self.process.call("tasks", split, start, count, timeout_s=timeout_s)
        return [expect(task, Task, self.process.name) for task in found], more

    async def reset(self, episode: str, task: Task, seed: int, timeout_s: float) -> Observation:
        """Begin an episode."""
        return expect(await self.process.call("reset", episode, task, seed, timeout_s=timeout_s), Observation, self.process.name)

    async def step(self, episode: str, action: Turn, timeout_s: float) -> StepResult:
        """Take a turn of it."""
        return expect(await self.process.call("step", episode, action, timeout_s=timeout_s), StepResult, self.process.name)

    async def close_episode(self, episode: str, timeout_s: float) -> None:
        """Release it."""
        await self.process.call("close_episode", episode, timeout_s=timeout_s)

    async def score(self, name: str, task: Task, episodes: Sequence[Sequence[Turn]], timeout_s: float) -> Scores:
        """Rubrics over a group."""
        values, weights = await self.process.call("score", name, task, [list(turns) for turns in episodes], timeout_s=timeout_s)
        return Scores({name: tuple(scores) for name, scores in values.items()}, weights)

    async def ping(self, timeout_s: float) -> None:
        """Whether its loop turns."""
        await self.process.call("ping", timeout_s=timeout_s)


class WorkerLost(Exception):
    """The worker that was called died, or was ended since it stood still. `own`: this call did it; None: nobody knows; False: another one may have, or has."""

    def __init__(self, text: str, own: bool | None, stood_still: bool) -> None:
        super().__init__(text)
        self.own, self._stood_still = own, stood_still

    def failure(self, boundary: Boundary, what: str) -> EnvironmentFailure:
        """What it is to whoever called. A call that is known to stand still is not made again."""
        text = f"{what}: {self}"
        return (
            Bystander(boundary, text)
            if self.own is False
            else EnvironmentFailure(boundary, text, retry=not (self.own and self._stood_still))
        )


class RemoteEpisode:
    """An Episode on a worker of a pool. What fails is an EnvironmentFailure; `close` releases what there is and raises nothing."""

    def __init__(self, pool: WorkerPool, name: str, task: Task, seed: int, timeout_s: float) -> None:
        self.name, self.task, self.seed, self.timeout_s = name, task, seed, timeout_s
        self._pool = pool
        self._place: tuple[int, WorkerMember] | None = None
        self._closed = False

    async def reset(self) -> Observation:
        """The first observation."""
        if self._closed or self._place is not None:
            raise UsageError(f"episode of task {self.task.id!r}: `reset` is called once, before `close`.")
        self._place = await self._pool.choose()
        self._pool.running[self.name] = f"an episode of task {self.task.id!r}"
        return await self._call("reset", lambda worker: worker.reset(self.name, self.task, self.seed, self.timeout_s))

    async def step(self, action: Turn) -> StepResult:
        """Take the policy's turn."""
        if self._closed or self._place is None:
            raise UsageError(f"episode of task {self.task.id!r}: `step` comes after `reset` and before `close`.")
        return await self._call("step", lambda worker: worker.step(self.name, action, self.timeout_s))

    async def close(self) -> None:
        """Release everything there; also after a failure."""
        place, self._place, self._closed = self._place, None, True
        if place is None:
            return
        index, member = place
        try:
            await self._pool.bounded(
                index, member, member.worker.close_episode(self.name, self.timeout_s), "environment", "close", self.name
            )
        except WorkerLost:
            pass  # and the episode with it
        except EnvironmentFailure as error:
            self._pool.say(f"closing an episode of task {self.task.id!r} failed: {error}")
        finally:
            member.load -= 1
            del self._pool.running[self.name]

    async def _call(self, what: str, call: Callable[[RemoteWorker], Any]) -> Any:
        assert self._place is not None
        index, member = self._place
        try:
            return await self._pool.bounded(index, member, call(member.worker), "environment", what, self.name)
        except WorkerLost as error:
            raise error.failure("environment", what) from error


def expect(value: Any, kind: type, name: str) -> Any:
    """The value if it is of this class. PluginError else: the service broke its contract."""
    if not isinstance(value, kind):
        raise PluginError(f"{name} answered with {type(value).__name__}, which is no {kind.__name__}.")
    return value
