"""Keeping a number of equal processes alive: one that dies is replaced, later and later, and too many deaths end the whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from intarsia.errors import DistributedError

from intarsia_rl.contracts import Process, ProcessLauncher

log = logging.getLogger("intarsia.rl.processes")

Member = TypeVar("Member")


@dataclasses.dataclass(frozen=True)
class Restarts:
    """How often dead processes are replaced. Stability: provisional.

    One that dies more than `limit` times within `window_s` is given up. It waits `first_s` before its first restart, twice as long before each further one in the window,
    at most `most_s`. Deaths of which it is known what ended it wait `first_s` alone, and of these `explained` are too many.
    """

    limit: int = 8
    explained: int = 256
    window_s: float = 3600.0
    first_s: float = 0.5
    most_s: float = 30.0


@dataclasses.dataclass(frozen=True)
class Death:
    """A process that was lost: its name, why, and when (`time.time()`)."""

    name: str
    reason: str
    at: float = dataclasses.field(default_factory=time.time)


class Keeper(Generic[Member]):
    """Keeps `count` processes alive that hold `service`.

    `arguments(index)` are the service's; `ready(index, process)` makes the member that is used from a new process, and is awaited before it is; `members` are those that
    can be used now. `deaths` are all that were lost. After `failure` is set every wait raises it. `explains(member)` says of a member that is lost whether it is known what ended it.
    """

    def __init__(
        self,
        launcher: ProcessLauncher,
        name: str,
        count: int,
        service: str,
        arguments: Callable[[int], Mapping[str, Any]],
        ready: Callable[[int, Process], Awaitable[Member]],
        *,
        threads: int | None = None,
        restarts: Restarts | None = None,
        explains: Callable[[Member], bool] = lambda member: False,
    ) -> None:
        self.launcher, self.name, self.count, self.service, self.threads = launcher, name, count, service, threads
        self.restarts = restarts or Restarts()
        self.members: dict[int, Member] = {}
        self.deaths: list[Death] = []
        self.failure: Exception | None = None
        self._arguments, self._ready, self._explains = arguments, ready, explains
        self._newest: dict[int, Member] = {}
        self._processes: dict[int, Process] = {}
        self._condemned: dict[int, asyncio.Future[str]] = {}
        self._times: dict[tuple[int, bool], list[float]] = {(index, known): [] for index in range(count) for known in (False, True)}
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start all of them. What one says that cannot start is raised, and the others are stopped."""
        tasks = [asyncio.ensure_future(self._begin(index)) for index in range(self.count)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
            raise
        self._tasks = [asyncio.ensure_future(self._keep(index)) for index in range(self.count)]

    async def some(self) -> dict[int, Member]:
        """Those that can be used, at least one: waits for it. Raises `failure`."""
        while True:
            if self.failure is not None:
                raise self.failure
            if self.members:
                return self.members
            await self.change()

    async def change(self) -> None:
        """Return when a member has come or gone, or all failed. Raises `failure`."""
        await self._changed.wait()
        if self.failure is not None:
            raise self.failure

    @property
    def processes(self) -> dict[int, Process]:
        """The processes of those that can be used now."""
        return {index: self._processes[index] for index in sorted(self.members)}

    def lose(self, index: int, member: Member) -> None:
        """Its process was found dead: nobody is given it any more. It is replaced once the process's end is known."""
        if self.members.get(index) is member:
            del self.members[index]
            self._tell()

    def replace(self, index: int, member: Member, reason: str) -> None:
        """End this member's process, which does not react, for `reason`, and start another one."""
        if self.members.get(index) is member:
            self.lose(index, member)
            condemned = self._condemned[index]
            if not condemned.done():
                condemned.set_result(reason)

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.members.clear()
        if self.failure is None:
            self.failure = DistributedError(f"{self.name}: the processes were stopped.")
        self._tell()
        await asyncio.gather(*(process.stop(grace_s) for process in self._processes.values()), return_exceptions=True)

    # ------------------------------------------------------------ one of them

    def _name(self, index: int) -> str:
        return f"{self.name}-{index}" if self.count > 1 else self.name

    def _tell(self) -> None:
        """Wake all that wait for a change; later waits are for a later one."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self.failure is not None:
            self._changed.set()

    async def _begin(self, index: int) -> None:
        """Start a process and make it a member."""
        process = await self.launcher.start(self._name(index), self.service, self._arguments(index), self.threads)
        self._processes[index] = process
        self._condemned[index] = asyncio.get_running_loop().create_future()
        try:
            member = await self._ready(index, process)
        except BaseException:
            await process.stop(0.0)
            raise
        # Nothing is awaited between the last look of `_ready` at the pool's state and this.
        self.members[index] = self._newest[index] = member
        self._tell()

    async def _keep(self, index: int) -> None:
        """Replace the process whenever it dies."""
        try:
            while True:
                reason = await self._end(index)
                explained = self._explains(self._newest[index])
                while True:
                    await self._bury(index, reason, explained)
                    try:
                        await self._begin(index)
                        break
                    except Exception as error:  # it could not start again: a death like any other
                        reason, explained = f"could not be started again: {str(error) or type(error).__name__}", False
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.failure = error
            self._tell()

    async def _end(self, index: int) -> str:
        """Wait for the end of a process, or for somebody's wish that it end."""
        process, condemned = self._processes[index], self._condemned[index]
        died = asyncio.ensure_future(process.died())
        try:
            await asyncio.wait({died, condemned}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                return died.result()
            return condemned.result()
        finally:
            died.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await died
            member = self.members.get(index)
            if member is not None:
                self.lose(index, member)
            await process.stop(0.0)

    async def _bury(self, index: int, reason: str, explained: bool) -> None:
        """Record a death, and wait before the next start. DistributedError when there were too many."""
        name, restarts, times = self._name(index), self.restarts, self._times[index, explained]
        now = asyncio.get_running_loop().time()
        times[:] = [*(then for then in times if now - then < restarts.window_s), now]
        self.deaths.append(Death(name, reason))
        self._tell()
        if len(times) > (restarts.explained if explained else restarts.limit):
            last = "\n".join(f"  {death.reason}" for death in self.deaths if death.name == name)
            raise DistributedError(
                f"{name} died {len(times)} times in {now - times[0]:.0f} s and is not started again. The reasons:\n{last[-4000:]}"
            )
        delay = restarts.first_s if explained else min(restarts.most_s, restarts.first_s * 2.0 ** (len(times) - 1))
        log.warning("%s is gone (%s); another one is started in %.1f s", name, reason, delay)
        await asyncio.sleep(delay)


class Kept:
    """What a pool says of the processes that its keeper keeps."""

    _keeper: Keeper[Any]

    @property
    def kills(self) -> int:
        """How many were lost."""
        return len(self._keeper.deaths)

    @property
    def processes(self) -> dict[int, Process]:
        """The processes of those that serve now, by index."""
        return self._keeper.processes

    @property
    def deaths(self) -> tuple[Death, ...]:
        """Those that were lost, with reasons."""
        return tuple(self._keeper.deaths)
