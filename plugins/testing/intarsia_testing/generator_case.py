"""What conformance tests of generators share: the generator under test, requests, and how a completion is held against the model."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from intarsia.config import Recipe
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_rl.contracts import Generated, Generator, GeneratorContext, GeneratorStats, PlacedMedia, Request, Sampling, WeightVersion

from intarsia_testing.base import Conformance
from intarsia_testing.generator_stage import Stage
from intarsia_testing.promise import broken, keep


class GeneratorCase(Conformance):
    """See `GeneratorConformance`."""

    kind: ClassVar[str] = "generator"
    tolerance: ClassVar[float] = 1e-4
    invariant: ClassVar[bool] = False
    timeout_s: ClassVar[float] = 600.0
    # Seconds within which what has been asked for must have come about, where a call need not wait for it.
    patience_s: ClassVar[float] = 300.0
    # How often what must happen before a request ends is tried: a process that the machine holds up comes too late for it.
    tries: ClassVar[int] = 5
    new_tokens: ClassVar[int] = 24
    draws: ClassVar[int] = 400

    _stage: ClassVar[Stage | None] = None
    _numbers = itertools.count()

    # ------------------------------------------------------------ what is tested

    async def build(self, config: Any, context: GeneratorContext) -> Generator:
        """A generator under test; override it where that is in another process."""
        entry = current().entry_of(config)
        built: Generator = current().target(entry)(config, context)
        return built

    def recipe(self) -> Recipe:
        """A recipe whose model is small and whose weights are large enough to tell a wrong cache: `initial_std` about 0.2. Its tokenizer decodes what the model says."""
        broken("recipe", f"{type(self).__name__} gives no recipe: override `recipe`.")

    def prompts(self) -> list[tuple[int, ...]]:
        """Prompts of different lengths, one of a single token, two that begin alike."""
        size = self.stage().recipe.model.vocab_size
        tokens = [(37 * number + 11) % size for number in range(64)]
        return [tuple(tokens[:40]), (tokens[5],), tuple(tokens[10:17]), tuple(tokens[:33]), tuple(reversed(tokens[3:22]))]

    # ------------------------------------------------------------ help

    @classmethod
    def teardown_class(cls) -> None:
        """End what the tests of the class shared."""
        if cls._stage is not None:
            cls._stage.close()
            cls._stage = None

    def stage(self) -> Stage:
        """What the tests of this class share."""
        if type(self)._stage is None:
            config = self.given_configs()[0]
            type(self)._stage = Stage(self.recipe(), config, self.build, invariant=self.invariant, timeout_s=self.timeout_s)
        found = type(self)._stage
        assert found is not None, "it was made"
        return found

    def request(
        self, tokens: Sequence[int], *, forced: Sequence[int] = (), routes: bool = False, priority: int = 0, **sampling: Any
    ) -> Request:
        """A request with an id of its own."""
        settings = Sampling(**{"max_tokens": len(forced) or self.new_tokens, "temperature": 0.0, **sampling})
        return Request(f"request-{next(self._numbers)}", tuple(tokens), settings, tuple(forced), routes, priority)

    async def settled(self, generator: Generator, holds: Callable[[GeneratorStats], bool]) -> GeneratorStats:
        """Its stats once `holds` is true of them, or as they are when `patience_s` is over."""
        end = time.monotonic() + self.patience_s
        while True:
            stats = await generator.stats()
            if holds(stats) or time.monotonic() > end:
                return stats
            await asyncio.sleep(0.05)

    def under_way(self, generator: Generator, requests: Sequence[Request]) -> tuple[list[asyncio.Task[Generated]], asyncio.Event]:
        """Requests that have been made, and what is set once one of them has a token."""
        some = asyncio.Event()
        return [asyncio.ensure_future(generator.generate(request, lambda tokens: some.set())) for request in requests], some

    async def paused(self, generator: Generator) -> None:
        """Pause it, and have the loop hand out what had come before."""
        await generator.pause()
        for _ in range(20):
            await asyncio.sleep(0)

    def all_of(self, generator: Generator, requests: Sequence[Request]) -> list[Generated]:
        """The completions of requests that are made together."""

        async def work() -> list[Generated]:
            return list(await asyncio.gather(*(generator.generate(request) for request in requests)))

        return self.stage().run(work())

    def one(self, generator: Generator, request: Request) -> Generated:
        """One completion, alone."""
        return self.all_of(generator, [request])[0]

    def check(self, request: Request, found: Generated, words: str) -> None:
        """A completion is well-formed, and each of its tokens has the log-probability that a whole pass with the weights of its version gives."""
        stage, count = self.stage(), len(found.tokens)
        keep("completions", isinstance(found, Generated) and found.request == request.id, f"{words} gives {found!r} for {request.id}.")
        keep(
            "one log-probability and version for each token",
            len(found.log_probs) == len(found.versions) == count,
            f"{words}: {count} tokens, {len(found.log_probs)} log-probabilities, {len(found.versions)} versions.",
        )
        keep(
            "max_tokens",
            count <= request.sampling.max_tokens,
            f"{words}: {count} tokens, and {request.sampling.max_tokens} were asked for.",
        )
        unknown = set(found.versions) - set(stage.seeds)
        keep("versions", not unknown, f"{words} has tokens of versions {sorted(unknown)}, which were never published.")
        keep("versions go up", list(found.versions) == sorted(found.versions), f"{words} has the versions {found.versions}.")
        for version in dict.fromkeys(found.versions):
            expected = stage.log_probs(stage.seeds[version], (*request.tokens, *found.tokens))[len(request.tokens) - 1 :]
            for number in range(count):
                difference = abs(found.log_probs[number] - expected[number])
                if found.versions[number] == version and not difference <= self.tolerance:
                    broken(
                        "log-probabilities are the model's",
                        f"{words}: token {number + 1} of {count} (version {version}) has {found.log_probs[number]!r}, and a pass over the whole sequence gives "
                        f"{expected[number]!r}: {difference:.3g} apart, of {self.tolerance:g} allowed.",
                    )

    def same(self, promise: str, one: Generated, other: Generated, words: str) -> None:
        """Two completions have the same tokens and, within twice the tolerance, log-probabilities."""
        keep(promise, one.tokens == other.tokens, f"{words}: tokens {one.tokens} became {other.tokens}.")
        apart = max((abs(a - b) for a, b in zip(one.log_probs, other.log_probs, strict=True)), default=0.0)
        keep(promise, apart <= 2 * self.tolerance, f"{words}: a log-probability moved by {apart:.3g}.")

    def part_at_equals(self, prompt: Sequence[int], one: Generated, other: Generated) -> bool:
        """Whether two completions part where two tokens are equally likely: coarse dtypes have many such places, and either may be taken."""
        place = next((place for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), None)
        if place is None:
            return False
        stage = self.stage()
        log_probs = stage.next_log_probs(stage.seeds[one.versions[place]], (*prompt, *one.tokens[:place]))
        return abs(float(log_probs[one.tokens[place]] - log_probs[other.tokens[place]])) <= 2 * self.tolerance

    def refused(self, promise: str, generator: Generator, request: Request, words: str) -> None:
        """The request is a UsageError."""
        try:
            self.one(generator, request)
        except UsageError:
            return
        except Exception as error:
            broken(promise, f"{words} raises {type(error).__name__} ({error}), not UsageError.")
        broken(promise, f"{words} is served.")

    def shown(self) -> tuple[tuple[int, ...], tuple[PlacedMedia, ...]]:
        """A prompt with images or video, for generators with the capability `media`: its tokens, and the media in it."""
        broken("media", f"{type(self).__name__} gives no media for a generator that serves them: override `shown`.")

    def again(self, request: Request) -> Request:
        """The same request, with another id."""
        return dataclasses.replace(request, id=self.request(()).id)

    def against_fresh(self, generator: Generator, fresh: Generator, requests: Sequence[Request]) -> list[Generated]:
        """What a generator gives that had other weights before must be what one gives that never had any: caches of every sort belong to a version. Returns it."""
        expected = self.all_of(fresh, [self.again(request) for request in requests])
        found = self.all_of(generator, [self.again(request) for request in requests])
        for request, one, other in zip(requests, expected, found, strict=True):
            words = (
                f"a prompt of {len(request.tokens)} tokens{' and media' if request.media else ''}, in a fresh generator and after an update"
            )
            self.same("caches belong to a version", one, other, words)
        return found

    def around(self, push: Sequence[WeightVersion], in_flight: Any) -> list[tuple[Request, Generated]]:
        """Requests that are under way while weights change: some tokens are there before the first push."""
        stage, generator = self.stage(), self.stage().main()
        length = min(generator.facts.max_tokens - 41, 2 * self.new_tokens + 12)

        async def begun() -> tuple[list[Request], list[asyncio.Task[Generated]]]:
            """Requests that have some tokens, on a paused generator. Where all have ended before the pause, others."""
            for _ in range(self.tries):
                requests = [
                    self.request(prompt, temperature=1.0, seed=number, max_tokens=length) for number, prompt in enumerate(self.prompts())
                ]
                told, some = list[int](), asyncio.Event()

                def tell(tokens: Sequence[int], told: list[int] = told, some: asyncio.Event = some, least: int = 2 * len(requests)) -> None:
                    told.extend(tokens)
                    if len(told) >= least:
                        some.set()

                tasks = [asyncio.ensure_future(generator.generate(request, tell)) for request in requests]
                await some.wait()
                await self.paused(generator)
                if not all(task.done() for task in tasks):
                    break
                await generator.resume()
            return requests, tasks

        async def work() -> list[tuple[Request, Generated]]:
            requests, tasks = await begun()
            for weights in push:
                if in_flight == "continue":
                    await generator.update(weights, in_flight)
                    await generator.resume()
                    await asyncio.sleep(0.02)
                    await generator.pause()
                else:
                    waiting = asyncio.ensure_future(generator.update(weights, in_flight))
                    await asyncio.sleep(0)
                    await generator.resume()
                    await waiting
            await generator.resume()
            return list(zip(requests, await asyncio.gather(*tasks), strict=True))

        return stage.run(work())
