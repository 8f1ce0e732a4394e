"""The controller's process: makes pools, environment facts, renderer and algorithm of a recipe, and serves the loop to rank 0 of the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.config.recipe import Recipe
from intarsia.contracts import Task
from intarsia.errors import UsageError
from intarsia.plugins import Plugins, current

from intarsia_rl.config import RolloutsConfig
from intarsia_rl.contracts import Algorithm, Renderer, Sampling, WeightVersion
from intarsia_rl.controller.groups import Player
from intarsia_rl.controller.loop import Loop, Parts, explained
from intarsia_rl.controller.probe import check_characters
from intarsia_rl.controller.protocols import Generators, Workers
from intarsia_rl.controller.rollout import Rules
from intarsia_rl.controller.writer import RolloutWriter
from intarsia_rl.media import processor_of
from intarsia_rl.processes.pages import pages
from intarsia_rl.processes.plain import recipe_of
from intarsia_rl.processes.pools import GeneratorPool, WorkerPool

SERVICE = "intarsia_rl.controller.service:serve"


async def serve(recipe: Mapping[str, Any], directory: str) -> Controller:
    """Begin to start everything. What fails then is told by `begin`."""
    plugins = current()
    return Controller(recipe_of(recipe, plugins), Path(directory), plugins)


class Controller:
    """The loop behind calls. Everything that it started ends with `close`.

    Answers that grow with the samples come in pages: the first with the answer, and `more`, until it says that there are no more.
    """

    def __init__(self, recipe: Recipe, directory: Path, plugins: Plugins):
        self._recipe, self._directory, self._plugins = recipe, directory, plugins
        self._config = config_of(recipe)
        self._pools: list[Any] = []
        self._loop: Loop | None = None
        self._state: dict[str, Any] = {}
        self._pages: Iterator[list[Any]] = iter(())
        self._starting = asyncio.ensure_future(self._start())

    async def _start(self) -> Loop:
        config, recipe, plugins = self._config, self._recipe, self._plugins
        launcher, routing = plugins.build(config.launcher), plugins.build(config.routing)
        algorithm: Algorithm = plugins.build(recipe.loss.algorithm)  # type: ignore[attr-defined]

        async def generators(name: str, count: int, initial: bool) -> GeneratorPool:
            pool = await GeneratorPool.start(
                launcher, config.generator, count, recipe, routing, plugins=plugins, threads=config.generator_threads, invariant=config.invariant,
                initial=initial, timeout_s=config.timeout_s, name=name,
            )  # fmt: skip
            self._pools.append(pool)
            return pool

        async def workers() -> WorkerPool:
            pool = await WorkerPool.start(launcher, config.environment, config.workers, plugins=plugins, timeout_s=config.timeout_s)
            self._pools.append(pool)
            return pool

        async def reference() -> GeneratorPool | None:
            return await generators("reference", 1, True) if algorithm.needs_reference else None

        async with asyncio.TaskGroup() as starting:
            made = starting.create_task(generators("generator", config.generators, False))
            served, scored = starting.create_task(workers()), starting.create_task(reference())
        parts = await parts_of(recipe, plugins, self._directory, made.result(), served.result(), algorithm, scored.result())
        return Loop(config, recipe.train.seed, parts)

    async def take_up(self, items: Sequence[tuple[str, Any]]) -> None:
        """Names and values of the state that `begin` goes on from, a page of them."""
        self._state |= dict(items)

    async def begin(self, step: int) -> dict[str, Any]:
        """See Loop.begin. Waits until all is started; raises what went wrong there. Returns facts of the generators."""
        try:
            self._loop = await self._starting
        except BaseExceptionGroup as errors:
            raise explained(first(errors)) from None
        except Exception as error:
            raise explained(error) from error
        state, self._state = self._state, {}
        await self._loop.begin(step, state or None)
        facts = self._loop.generators.facts
        return {
            "generator": facts.name,
            "max_tokens": facts.max_tokens,
            "max_sequences": facts.max_sequences,
            "capabilities": list(facts.capabilities),
        }

    async def new_weights(self, weights: WeightVersion) -> None:
        """See Loop."""
        await self.loop.new_weights(weights)

    async def batch(self, step: int) -> dict[str, Any]:
        """See Loop; `samples` without their turns, which nobody trains on, and as many of them as go into a page."""
        return self._bare(await told(self.loop.batch(step)))

    async def evaluate(self, step: int) -> dict[str, Any]:
        """See Loop; `samples` as of `batch`."""
        return self._bare(await told(self.loop.evaluate(step)))

    async def state(self) -> dict[str, Any]:
        """See Loop: the names and values `items`, as many of them as go into a page."""
        return self._first({"items": list(self.loop.state().items())}, "items")

    async def more(self) -> list[Any]:
        """The next page of the last answer; an empty one where there is none."""
        return next(self._pages, [])

    def _bare(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer with the first page of its samples, without turns."""
        return self._first({**answer, "samples": [dataclasses.replace(sample, turns=()) for sample in answer["samples"]]}, "samples")

    def _first(self, answer: dict[str, Any], name: str) -> dict[str, Any]:
        """The answer with its first page."""
        self._pages = pages(answer[name])
        return {**answer, name: next(self._pages)}

    @property
    def loop(self) -> Loop:
        """The loop, once it has begun."""
        if self._loop is None:
            raise AssertionError("begin comes first")
        return self._loop

    async def close(self) -> None:
        """End the loop and the processes."""
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        if self._loop is not None:
            await self._loop.close()
        await asyncio.gather(*(pool.close() for pool in self._pools), return_exceptions=True)


async def parts_of(
    recipe: Recipe,
    plugins: Plugins,
    directory: Path,
    generators: Generators,
    workers: Workers,
    algorithm: Algorithm,
    reference: Generators | None = None,
) -> Parts:
    """What the loop works with, of a recipe. Raises UsageError for what does not fit together."""
    config, train = config_of(recipe), recipe.train
    tokenizer = plugins.build(recipe.data.tokenizer)
    renderer: Renderer = plugins.build(config.renderer, tokenizer)
    processor = processor_of(recipe.data, recipe.model, plugins)
    if processor is not None and "media" not in generators.facts.capabilities:
        raise UsageError(
            f"The run has a processor of images and video (data.loader.processor), and the generator {generators.facts.name!r} serves text alone (capability `media`). Use the generator `local` with "
            "tensor=1, or set data.loader.processor=none."
        )
    if "forced" not in generators.facts.capabilities and config.invariant and config.max_lag:
        raise UsageError(
            f"The batch-invariant mode shows at every step that trainer and generator agree, and the generator {generators.facts.name!r} cannot score tokens of older weights anew (capability `forced`). Set "
            "data.loader.max_lag=0, or choose another generator."
        )
    if "forced" not in generators.facts.capabilities and algorithm.needs_reference:
        raise UsageError(
            f"The algorithm asks for a reference, and the generator {generators.facts.name!r} cannot score tokens that are there (capability `forced`). Set the algorithm's weight of "
            "the reference to 0, or choose another generator."
        )
    chosen = config.sampling
    sampling = Sampling(1, chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, stop_ids=tuple(renderer.stop_ids))
    greedy = Sampling(1, config.held_out.temperature, stop_ids=tuple(renderer.stop_ids))
    facts = workers.environment_facts()

    def player(how: Sampling, routes: bool) -> Player:
        rules = Rules(train.seed, how, train.sequence_length, config.attempts, config.timeout_s, routes, processor)
        return Player(rules, facts, generators, workers, renderer)

    held_out: Sequence[Task] = ()
    if config.held_out.every != 0 and config.held_out.tasks:
        held_out = (await workers.tasks(config.held_out.split))[: config.held_out.tasks]
        if not held_out:
            raise UsageError(
                f"The environment has no task in its split {config.held_out.split!r} to evaluate on. Name another one (data.loader.held_out.split), or set data.loader.held_out.every=0."
            )
    writer = RolloutWriter(directory, tokenizer.decode) if config.keep_rollouts else None
    tasks = await workers.tasks(config.split)
    await check_characters(tokenizer, workers, tasks, held_out)
    return Parts(player(sampling, config.replay_routes), player(greedy, False), algorithm, tasks, held_out, reference, writer)


def config_of(recipe: Recipe) -> RolloutsConfig:
    """The loader's settings. UsageError for a recipe of another loader."""
    loader = recipe.data.loader
    if not isinstance(loader, RolloutsConfig):
        raise UsageError(f"data.loader is `{current().entry_of(loader).name}`; a run that learns from rollouts has data.loader=rollouts.")
    return loader


async def told(call: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """What a call of the loop gives; what it raises as the trainer is told it."""
    try:
        return await call
    except Exception as error:
        raise explained(error) from error


def first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of tasks, which ended the others."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
