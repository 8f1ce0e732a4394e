"""Several generators as one: requests go where there is room, and a process that dies costs time and nothing else. `workers` has the same for environments.

Both are built from a launcher and from contracts alone, and import no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from intarsia.config.recipe import Recipe
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import IntarsiaError, PluginError, UsageError
from intarsia.plugins import Plugins, current

from intarsia_rl.bases import GeneratorConfig
from intarsia_rl.contracts import (
    Generated,
    GeneratorFacts,
    GeneratorStats,
    Process,
    ProcessDied,
    ProcessLauncher,
    Request,
    Routing,
    WeightVersion,
)
from intarsia_rl.processes.keeper import Death, Keeper, Kept, Restarts
from intarsia_rl.processes.plain import plain_config, plain_recipe
from intarsia_rl.processes.remote import EnvironmentFacts, RemoteGenerator, Scores
from intarsia_rl.processes.workers import WorkerPool

__all__ = ["Death", "EnvironmentFacts", "GeneratorPool", "Restarts", "Scores", "WorkerPool"]

InFlight = Literal["continue", "drain"]

REPEATS = 3
"""How many generators a request may outlive before it is taken to be what kills them."""

SUSPECT = 2
"""From so many on it is one of the suspects, of which only one at a time is with a generator: the others would be found guilty with it."""


@dataclasses.dataclass(eq=False)
class GeneratorMember:
    """A generator that serves: `doom` is why it is ended where it is, how many requests it has, the version it took last, and when it was last seen to move (the loop's time)."""

    generator: RemoteGenerator
    doom: str = ""
    requests: int = 0
    updating: int = 0
    version: int | None = None
    stats: GeneratorStats = dataclasses.field(default_factory=GeneratorStats)
    moved: float = dataclasses.field(default_factory=lambda: asyncio.get_running_loop().time())

    def has(self, weights: WeightVersion) -> bool:
        """Whether it serves these, or newer ones."""
        return self.version is not None and self.version >= weights.version

    def move(self) -> None:
        """It was seen to do something."""
        self.moved = asyncio.get_running_loop().time()


class GeneratorPool(Kept):
    """Generators in processes of their own, as one. Made by `start`. Stability: provisional.

    A generator that dies, or moves nothing for `timeout_s` while it has work, is replaced; before the new one serves it takes the newest weights, and is paused where the pool is. Requests
    that the dead one had are repeated on another one, with their seed: nobody who waits for them notices. Too many deaths (`Restarts`) make every call raise DistributedError.
    """

    facts: GeneratorFacts

    def __init__(self, routing: Routing, timeout_s: float) -> None:
        self.routing, self.timeout_s = routing, timeout_s
        self._keeper: Keeper[GeneratorMember]
        self._weights: WeightVersion | None = None
        self._newest: WeightVersion | None = None
        self._in_flight: InFlight = "continue"
        self._paused: bool | None = None
        self._keep_when_paused = True
        self._order = asyncio.Lock()
        self._suspects = asyncio.Lock()
        self._watchers: set[asyncio.Task[None]] = set()
        self._past = GeneratorStats()

    @classmethod
    async def start(
        cls,
        launcher: ProcessLauncher,
        config: GeneratorConfig,
        count: int,
        recipe: Recipe | Mapping[str, Any],
        routing: Routing,
        *,
        plugins: Plugins | None = None,
        threads: int | None = 1,
        invariant: bool = False,
        initial: bool = False,
        timeout_s: float = 600.0,
        name: str = "generator",
        restarts: Restarts | None = None,
    ) -> GeneratorPool:
        """Start `count` generators of `config`. `recipe` is the run's, or its `intarsia.config.flatten`. What a generator says that cannot be built is raised as it is (UsageError, PluginError ...).

        `initial`: they begin with the run's initial weights as version 0 (see GeneratorContext), so a restarted one has them as well.
        """
        plugins = plugins or current()
        pool = cls(routing, timeout_s)
        shared = {
            "config": plain_config(config, plugins),
            "recipe": plain_recipe(recipe, plugins),
            "invariant": invariant,
            "initial": initial,
        }
        pool._keeper = Keeper(
            launcher,
            name,
            count,
            "intarsia_rl.processes.generator_service:serve",
            lambda index: {**shared, "index": index},
            pool._ready,
            threads=threads,
            restarts=restarts,
        )
        await pool._keeper.start()
        return pool

    # ------------------------------------------------------------ requests

    async def generate(self, request: Request, on_tokens: Callable[[Sequence[int]], None] | None = None) -> Generated:
        """The completion; see `Generator.generate`. Cancelling aborts it. UsageError for a request that can never be served; EnvironmentFailure("model") where a generator failed at it, or
        where it outlived too many generators."""
        deaths: list[str] = []
        told = 0

        def tell(tokens: Sequence[int], before: list[int]) -> None:
            """Pass on what was not told before an earlier generator died."""
            nonlocal told
            before[0] += len(tokens)
            fresh = tokens[-(before[0] - told) :] if before[0] > told else ()
            told = max(told, before[0])
            if fresh and on_tokens is not None:
                on_tokens(fresh)

        while True:
            async with self._suspects if len(deaths) >= SUSPECT else contextlib.nullcontext():
                index, member = await self._choose(request)
                seen = [0]
                listener = None if on_tokens is None else functools.partial(tell, before=seen)
                try:
                    return await self._ask(index, member, request, listener)
                except ProcessDied as error:
                    deaths.append(member.doom or error.reason)
                    if len(deaths) > REPEATS:
                        reasons = "; ".join(dict.fromkeys(deaths))
                        text = f"request {request.id!r} was with {len(deaths)} generators when they died ({reasons}): it is not tried again"
                        raise EnvironmentFailure("model", text) from error

    async def _ask(
        self, index: int, member: GeneratorMember, request: Request, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> Generated:
        """The completion of one generator. ProcessDied where it dies."""
        member.requests += 1
        if member.requests == 1:
            member.move()
        try:
            return await member.generator.generate(request, on_tokens)
        except ProcessDied:
            self._keeper.lose(index, member)
            raise
        except (IntarsiaError, EnvironmentFailure, asyncio.CancelledError):
            raise
        except Exception as error:  # the generator's own bug, or its memory
            raise EnvironmentFailure("model", str(error), retry=True) from error
        finally:
            member.requests -= 1
            member.move()

    async def abort(self, requests: Sequence[str] | None = None) -> None:
        """End these requests, on whichever generator, with what they have."""
        await self._each(lambda member: member.generator.abort(requests))

    async def _choose(self, request: Request) -> tuple[int, GeneratorMember]:
        members = await self._keeper.some()
        index = self.routing.choose(request, {index: member.requests for index, member in members.items()})
        if index not in members:
            raise PluginError(f"routing {type(self.routing).__name__} chose generator {index!r}; there are {sorted(members)}.")
        return index, members[index]

    # ------------------------------------------------------------ weights

    def announce(self, weights: WeightVersion) -> None:
        """These are published, and will be in `update`: a generator that starts meanwhile takes them at once. Those that others still drain for may be gone."""
        if self._newest is None or weights.version > self._newest.version:
            self._newest = weights

    async def update(self, weights: WeightVersion, in_flight: InFlight = "continue") -> None:
        """Have these weights, or newer ones that were announced, in force on every generator when this returns, those that are being restarted included. NumericsError where one read other
        bytes than were published; UsageError for weights that are older than those it has."""
        self.announce(weights)
        async with self._order:
            if self._weights is not None and weights.version < self._weights.version:
                raise UsageError(f"version {weights.version} is older than {self._weights.version}, which the generators have.")
            self._weights, self._in_flight = weights, in_flight
            while True:
                changed = asyncio.ensure_future(self._keeper.change())
                try:
                    members = list(self._keeper.members.items())
                    await self._all(self._update(index, member, weights) for index, member in members)
                    serving = self._keeper.members.values()
                    if len(serving) == self._keeper.count and all(member.has(weights) for member in serving):
                        return
                    await changed
                finally:
                    changed.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await changed

    async def _update(self, index: int, member: GeneratorMember, weights: WeightVersion) -> None:
        if member.has(weights):
            return
        member.updating += 1
        member.move()
        try:
            await member.generator.update(weights, self._in_flight)
            member.version = weights.version
        except ProcessDied:
            self._keeper.lose(index, member)
        finally:
            member.updating -= 1
            member.move()

    async def pause(self, keep: bool = True) -> None:
        """Compute no further token on any until `resume`; restarted ones are paused, too."""
        self._paused, self._keep_when_paused = True, keep
        await self._each(lambda member: member.generator.pause(keep))

    async def resume(self) -> None:
        """Go on."""
        self._paused = False
        await self._each(lambda member: member.generator.resume())

    # ------------------------------------------------------------ seeing it

    @property
    def version(self) -> int | None:
        """The version of the newest weights that were asked for."""
        return None if self._weights is None else self._weights.version

    async def stats(self) -> dict[int, GeneratorStats]:
        """How each is that serves now, by index."""
        found: dict[int, GeneratorStats] = {}

        async def ask(index: int, member: GeneratorMember) -> None:
            with contextlib.suppress(ProcessDied, TimeoutError):
                found[index] = member.stats = await member.generator.stats(self.timeout_s)

        await self._all(ask(index, member) for index, member in list(self._keeper.members.items()))
        return dict(sorted(found.items()))

    async def totals(self) -> GeneratorStats:
        """All together: tokens and busy seconds since the start, those of dead generators (as they were last seen) included; `version` the oldest in force; `cache_used` the mean;
        `graphs` what differs."""
        await self.stats()
        members = [member.stats for member in self._keeper.members.values()]
        everyone = [self._past, *members]
        return GeneratorStats(
            version=min((stats.version for stats in members), default=-1),
            running=sum(stats.running for stats in members),
            waiting=sum(stats.waiting for stats in members),
            cache_used=sum(stats.cache_used for stats in members) / max(1, len(members)),
            paused=any(stats.paused for stats in members),
            graphs="; ".join(dict.fromkeys(stats.graphs for stats in members if stats.graphs)),
            prompt_tokens=sum(stats.prompt_tokens for stats in everyone),
            cached_tokens=sum(stats.cached_tokens for stats in everyone),
            generated_tokens=sum(stats.generated_tokens for stats in everyone),
            busy_s=sum(stats.busy_s for stats in everyone),
        )

    async def close(self) -> None:
        """Stop all."""
        for watcher in self._watchers:
            watcher.cancel()
        await self._keeper.close()

    # ------------------------------------------------------------ each of them

    async def _ready(self, index: int, process: Process) -> GeneratorMember:
        """Bring a new generator to where the pool is: the newest weights, paused or not."""
        generator = await RemoteGenerator.connect(process)
        if not hasattr(self, "facts"):
            self.facts = generator.facts
        member, paused = GeneratorMember(generator), None
        while True:
            weights = self._newest
            if weights is not None and not member.has(weights):
                try:
                    await asyncio.wait_for(generator.update(weights), self.timeout_s)
                    member.version = weights.version
                except (IntarsiaError, EnvironmentFailure):
                    if self._newest is weights:
                        raise
                continue  # newer ones may have come, and these may be gone
            if self._paused is not None and paused != self._paused:
                paused = self._paused
                await (generator.pause(self._keep_when_paused) if paused else generator.resume())
                continue
            break
        member.move()
        watcher = asyncio.ensure_future(self._watch(index, member))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return member

    async def _watch(self, index: int, member: GeneratorMember) -> None:
        """Replace a generator that has work and moves nothing for `timeout_s`."""
        period = min(5.0, self.timeout_s / 4)
        while True:
            try:
                stats = await member.generator.stats(self.timeout_s)
            except ProcessDied:
                break
            except TimeoutError:
                self._replace(index, member, f"it did not say how it is for {self.timeout_s:g} s")
                break
            except Exception as error:
                self._replace(index, member, f"it could not say how it is: {type(error).__name__}: {error}")
                break
            if moving(stats) != moving(member.stats):
                member.move()
            member.stats = stats
            works = member.updating or (member.requests and not stats.paused)
            if not works:
                member.move()
            elif asyncio.get_running_loop().time() - member.moved > self.timeout_s:
                what = f"{member.requests} requests" + (" and an update of its weights" if member.updating else "")
                self._replace(index, member, f"nothing moved in {self.timeout_s:g} s, with {what}")
                break
            await asyncio.sleep(period)
        self._remember(member.stats)

    def _replace(self, index: int, member: GeneratorMember, doom: str) -> None:
        member.doom = doom
        self._keeper.replace(index, member, doom)

    def _remember(self, stats: GeneratorStats) -> None:
        """Keep the counts of a generator that is gone."""
        past = self._past
        self._past = GeneratorStats(
            prompt_tokens=past.prompt_tokens + stats.prompt_tokens,
            cached_tokens=past.cached_tokens + stats.cached_tokens,
            generated_tokens=past.generated_tokens + stats.generated_tokens,
            busy_s=past.busy_s + stats.busy_s,
        )

    async def _each(self, call: Callable[[GeneratorMember], Any]) -> None:
        """Call something of every generator that serves; one that is gone is replaced and brought to the pool's state anyway."""

        async def one(index: int, member: GeneratorMember) -> None:
            try:
                await call(member)
            except ProcessDied:
                self._keeper.lose(index, member)

        await self._all(one(index, member) for index, member in list(self._keeper.members.items()))

    async def _all(self, calls: Any) -> None:
        """Await all, and raise the first error only when all are through."""
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


def moving(stats: GeneratorStats) -> tuple[Any, ...]:
    """What changes when a generator gets somewhere."""
    return stats.version, stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens, stats.paused
