"""Environment workers: environments in processes of their own. What ends one of them costs whoever did it, and nobody beside it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from intarsia.config.bases import EnvironmentConfig
from intarsia.contracts import Limits, Task, Turn
from intarsia.contracts.environment import Boundary, EnvironmentFailure
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import Plugins, current

from intarsia_rl.contracts import Process, ProcessDied, ProcessLauncher
from intarsia_rl.processes.keeper import Keeper, Kept, Restarts, log
from intarsia_rl.processes.plain import plain_config
from intarsia_rl.processes.remote import EnvironmentFacts, RemoteEpisode, RemoteWorker, Scores, WorkerLost

PAGE = 2048
"""Most tasks that a worker sends at a time."""


@dataclasses.dataclass(eq=False)
class WorkerMember:
    """A worker that serves, with the number of episodes and scorings it has; `doom` is why it is ended where it is; `at` the name of the call that runs there (empty: none does; None: it does not
    tell); `alone` whether it had a single one when it was lost."""

    worker: RemoteWorker
    load: int = 0
    doom: str = ""
    at: str | None = None
    alone: bool | None = None


class WorkerPool(Kept):
    """Environments in processes of their own. Made by `start`. Stability: provisional.

    Whatever goes wrong there is an EnvironmentFailure: the environment's own as it raised it; any other exception as `environment` (of a rubric: `scorer`) with its text; a worker that dies, or an answer that takes
    longer than `timeout_s`, with `retry`. A worker that does not even answer a ping after such an answer is ended; a new one is started for one that died.

    Workers that are started after a death tell who runs, which costs a little. When such a one dies it is known who did it: all others that it had are told so (`Bystander`), and who made it stand still is not tried
    again. `running` describes calls by name.
    """

    def __init__(self, timeout_s: float, ping_s: float, answer_bytes: int) -> None:
        self.timeout_s, self.ping_s, self.answer_bytes = timeout_s, ping_s, answer_bytes
        self._keeper: Keeper[WorkerMember]
        self._facts: EnvironmentFacts
        self._tasks: dict[str, tuple[Task, ...]] = {}
        self._calls = 0
        self.running: dict[str, str] = {}

    @classmethod
    async def start(
        cls,
        launcher: ProcessLauncher,
        config: EnvironmentConfig,
        count: int,
        *,
        plugins: Plugins | None = None,
        threads: int | None = 1,
        timeout_s: float = 600.0,
        ping_s: float = 5.0,
        answer_bytes: int = 16 << 20,
        name: str = "environment",
        restarts: Restarts | None = None,
    ) -> WorkerPool:
        """Start `count` workers, each with the environment of `config`. What one says that cannot be built is raised as it is. `answer_bytes` is the largest observation."""
        plugins = plugins or current()
        pool = cls(timeout_s, ping_s, answer_bytes)
        arguments = {"config": plain_config(config, plugins), "answer_bytes": answer_bytes}
        pool._keeper = Keeper(
            launcher,
            name,
            count,
            "intarsia_rl.processes.environment_service:serve",
            lambda index: {**arguments, "followed": pool.kills > 0},
            pool._ready,
            threads=threads,
            restarts=restarts,
            explains=lambda member: bool(member.at),
        )
        await pool._keeper.start()
        return pool

    # ------------------------------------------------------------ what the environment is

    def environment_facts(self) -> EnvironmentFacts:
        """Its limits, and its rubrics' weights by name."""
        return self._facts

    @property
    def limits(self) -> Limits:
        """The environment's."""
        return self._facts.limits

    async def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of a split, asked for once. UsageError for an unknown one, with the splits that there are, and for two tasks of one id."""
        if split not in self._tasks:
            tasks = tuple([task async for task in self._read_tasks(split)])
            places: dict[str, int] = {}
            for place, task in enumerate(tasks):
                if not isinstance(task.id, str) or not task.id:
                    raise UsageError(
                        f"The environment's task number {place} of its split {split!r}, counted from 0, has the id {task.id!r:.200}, and no name: samples, seeds and statistics go by a task's id."
                    )
                if places.setdefault(task.id, place) != place:
                    raise UsageError(
                        f"The environment has two tasks of the id {task.id!r} in its split {split!r}: numbers {places[task.id]} and {place}, counted from 0. Samples, seeds "
                        "and statistics go by a task's id: give each its own."
                    )
            self._tasks[split] = tasks
        return self._tasks[split]

    async def _read_tasks(self, split: str) -> AsyncIterator[Task]:
        start, more = 0, True
        while more:
            call = functools.partial(RemoteWorker.tasks, split=split, start=start, count=PAGE, timeout_s=self.timeout_s)
            page, more = await self.use(call, "environment", f"tasks({split!r})")
            for task in page:
                yield task
            start += len(page)

    # ------------------------------------------------------------ episodes and scores

    def episode(self, task: Task, seed: int, timeout_s: float | None = None) -> RemoteEpisode:
        """A new try, as `Environment.episode`; `timeout_s` bounds each of its answers (None: the pool's). The worker is chosen at `reset`: the one with the fewest episodes."""
        self._calls += 1
        return RemoteEpisode(self, f"episode-{self._calls}", task, seed, self.timeout_s if timeout_s is None else timeout_s)

    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> Scores:
        """What every rubric gives for every episode of a group. EnvironmentFailure("scorer") where one fails; a score that is no finite number is what was given, in words; a worker that dies at it is replaced by another one."""
        plain, what = [list(episode) for episode in episodes], f"scoring task {task.id!r}"
        self._calls += 1
        name = f"score-{self._calls}"
        self.running[name] = what
        try:
            return await self.use(lambda worker: worker.score(name, task, plain, self.timeout_s), "scorer", what, name)
        finally:
            del self.running[name]

    async def use(self, call: Callable[[RemoteWorker], Any], boundary: Boundary, what: str, name: str = "", tries: int = 3) -> Any:
        """Call something of one worker that may be called again: where it dies, another one is asked."""
        while True:
            index, member = await self.choose()
            try:
                return await self.bounded(index, member, call(member.worker), boundary, what, name)
            except WorkerLost as error:
                tries -= error.own is not False
                failure = error.failure(boundary, what)
                if not tries or not failure.retry:
                    raise failure from error
            finally:
                member.load -= 1

    async def choose(self) -> tuple[int, WorkerMember]:
        """The worker with the fewest episodes, which then has one more."""
        members = await self._keeper.some()
        index = min(members, key=lambda index: (members[index].load, index))
        members[index].load += 1
        return index, members[index]

    async def bounded(self, index: int, member: WorkerMember, call: Any, boundary: Boundary, what: str, name: str = "") -> Any:
        """Await a call of a worker, `name` being what it is known by there. WorkerLost where the worker died, or did not react any more and was ended; EnvironmentFailure where only the call took too long."""
        try:
            return await call
        except ProcessDied as error:
            self._keeper.lose(index, member)
            raise self._lost(member, name, f"{error.name} is gone: {member.doom}" if member.doom else str(error)) from error
        except TimeoutError as error:
            try:
                await member.worker.ping(self.ping_s)
            except (TimeoutError, ProcessDied):
                who = what if not member.at else self.running.get(member.at, what)
                member.doom = member.doom or f"{who} blocked it"
                self._keeper.replace(index, member, member.doom)
                raise self._lost(member, name, f"{error}: {member.doom}") from error
            raise EnvironmentFailure(boundary, f"{what}: {error}", retry=True) from error
        except (EnvironmentFailure, UsageError, PluginError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise EnvironmentFailure(boundary, f"{what}: {error}") from error

    def _lost(self, member: WorkerMember, name: str, text: str) -> WorkerLost:
        """What the end of a worker is to the call `name`."""
        if member.alone is None:
            member.alone = member.load == 1
        if member.at is None:  # it did not tell; where nothing else was with it, there is no other
            return WorkerLost(text, member.alone, bool(member.doom))
        return WorkerLost(text, member.at == name if member.at else None, bool(member.doom))

    # ------------------------------------------------------------ seeing it

    def say(self, text: str) -> None:
        """Log what is nobody's failure."""
        log.warning("%s: %s", self._keeper.name, text)

    async def close(self) -> None:
        """Stop all."""
        await self._keeper.close()

    async def _ready(self, index: int, process: Process) -> WorkerMember:
        member = WorkerMember(RemoteWorker(process))

        def hear(kind: str, value: Any) -> None:
            member.at = value if kind == "at" else member.at

        process.on_message(hear)
        self._facts = await member.worker.facts(self.timeout_s)
        return member
