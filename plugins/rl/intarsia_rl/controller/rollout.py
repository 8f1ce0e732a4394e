"""One try at one task, token-in token-out: what is trained on are the very ids that the generator gave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from intarsia.contracts import Media, Observation, StepResult, Task, ToolSpec, Turn
from intarsia.contracts.environment import EnvironmentFailure, Episode
from intarsia.errors import IntarsiaError, NumericsError, PluginError

from intarsia_rl import media
from intarsia_rl.contracts import (
    Bystander,
    Failure,
    Finish,
    Generated,
    PlacedMedia,
    ProcessDied,
    Renderer,
    Request,
    Routes,
    Sample,
    Sampling,
    Segment,
)
from intarsia_rl.controller.protocols import EnvironmentFacts, Generators, Workers
from intarsia_rl.controller.seeds import seed_of
from intarsia_rl.given import is_number, told

logger = logging.getLogger("intarsia.rl")

POLICY = "policy"
LETTERS = 128
"""Of a token at most, over whole texts: what has more of them for each token that there is room for is not even tokenised."""

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is the same for all tries. `sampling`'s seed and number of tokens are set for each request. `row` is the most tokens of a segment. `processor` makes tokens of images and
    video (None: there are none)."""

    seed: int
    sampling: Sampling
    row: int
    attempts: int = 3
    timeout_s: float = 600.0
    routes: bool = False
    processor: Any = None


@dataclasses.dataclass(frozen=True)
class Try:
    """Which try: of the group and member, or of the held-out task `member` at some step. Its seeds follow from `seeds` alone."""

    id: str
    group: int
    member: int
    seeds: tuple[int | str, ...]


class SegmentBuilder:
    """A segment that grows. `covered` tokens have their routes in `routes`."""

    def __init__(self, actor: str, prompt: Sequence[int], shown: Sequence[PlacedMedia] = ()):
        self.actor, self.tokens, self.media = actor, list(prompt), list(shown)
        self.trained = [False] * len(self.tokens)
        self.log_probs = [0.0] * len(self.tokens)
        self.versions = [-1] * len(self.tokens)
        self._routes: list[bytes] = []
        self._routes_shape = (0, 0)
        self._covered = 0

    def extend(self, tokens: Sequence[int], shown: Sequence[PlacedMedia] = ()) -> None:
        """Add tokens that the policy did not generate, and the media in them."""
        self.tokens += tokens
        self.media += shown
        self.trained += [False] * len(tokens)
        self.log_probs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def generated(self, made: Generated) -> None:
        """Add what the policy generated. A token's routes are those of the first time that it went through the model."""
        self.tokens += made.tokens
        self.trained += [self.actor == POLICY] * len(made.tokens)
        self.log_probs += made.log_probs
        self.versions += made.versions
        if made.routes is not None:
            rows, layers, choices = made.routes.shape
            width = 2 * layers * choices
            self._routes.append(made.routes.data[self._covered * width : rows * width])
            self._routes_shape, self._covered = (layers, choices), rows

    def build(self) -> Segment:
        """The segment as it is now."""
        routes = Routes(b"".join(self._routes), (self._covered, *self._routes_shape)) if self._covered else None
        tokens, trained, log_probs, versions = tuple(self.tokens), tuple(self.trained), tuple(self.log_probs), tuple(self.versions)
        return Segment(tokens, trained, log_probs, versions, routes, self.actor, tuple(self.media))


@dataclasses.dataclass
class Context:
    """What one actor has seen: its history, with media as ids, and the segment that it speaks in, which has these media. `finish` is how its last turn ended."""

    history: list[Turn]
    tools: tuple[ToolSpec, ...]
    segment: SegmentBuilder
    finish: Finish = "eos"


class Rollout:
    """A try under way. `run` gives the sample, without the rubrics' scores; it is used once."""

    def __init__(
        self, rules: Rules, facts: EnvironmentFacts, generators: Generators, renderer: Renderer, task: Task, which: Try, attempt: int
    ):
        self._rules, self._limits, self._generators, self._renderer = rules, facts.limits, generators, renderer
        self._task, self._which, self._attempt = task, which, attempt
        own = self._limits.seconds_per_turn
        self._answer_s = rules.timeout_s if own is None else min(own, rules.timeout_s)
        self._contexts: dict[str, Context] = {}
        self._segments: list[SegmentBuilder] = []
        self._transcript: list[Turn] = []
        self._files = media.Files()
        self._spent = {"generate": 0.0, "environment": 0.0}
        self._metrics: dict[str, float] = {}
        self._turns = self._generated = 0
        self._steps_reward: float | None = None
        self._cut = False

    async def run(self, workers: Workers) -> Sample:
        """The sample. Raises EnvironmentFailure and ProcessDied for a try that counts for nothing, and IntarsiaError for what ends the run."""
        episode = workers.episode(self._task, seed_of(*self._which.seeds, "episode"), self._answer_s)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            truncated = await self._play(episode)
        finally:
            await self._close(episode)
        self._files.check()
        timings = {**self._spent, "total": loop.time() - begin}
        segments = tuple(builder.build() for builder in self._segments)
        rewards = {} if self._steps_reward is None else {"steps": self._steps_reward}
        metrics = {**self._metrics, "turns": float(self._turns)}
        which = self._which
        return Sample(
            which.id, which.group, which.member, self._task.id, segments, tuple(self._transcript), self._steps_reward or 0.0, rewards, metrics, timings, truncated
        )  # fmt: skip

    async def _play(self, episode: Episode) -> bool:
        """Turns until the task or a limit ends the try; whether it was a limit."""
        observation: Observation | None = await self._ask("reset", episode.reset)
        assert observation is not None
        if (context := self._see(observation)) is None:
            raise EnvironmentFailure(
                "environment",
                f"the first observation of task {self._task.id!r} leaves no room for a token: train.sequence_length is {self._rules.row}, a generator takes "
                f"{self._generators.facts.max_tokens} tokens, and the environment's limits are {self._limits}",
            )
        while True:
            turn = await self._speak(context)
            result: StepResult = await self._ask("step", functools.partial(episode.step, turn))
            self._take(result)
            over = result.ended or result.truncated or result.observation is None
            if over:
                return result.truncated or self._cut
            assert result.observation is not None
            limits, spent = self._limits, self._spent["environment"]
            if (limits.turns is not None and self._turns >= limits.turns) or (limits.seconds is not None and spent >= limits.seconds):
                return True
            if (following := self._see(result.observation)) is None:
                return True
            context = following

    # ------------------------------------------------------------ the environment's side

    async def _ask(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """An answer of the environment, in time. What an environment raises that is no failure of the contract is one of the environment."""
        begin = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(guard(self._answer_s)):
                return await call()
        except TimeoutError:
            raise EnvironmentFailure("environment", f"{what} gave no answer within {self._answer_s:g} s", retry=True) from None
        except (EnvironmentFailure, ProcessDied, IntarsiaError):
            raise
        except Exception as error:
            raise EnvironmentFailure("environment", f"{what} raised {type(error).__name__}: {error}") from error
        finally:
            self._spent["environment"] += asyncio.get_running_loop().time() - begin

    async def _close(self, episode: Episode) -> None:
        with contextlib.suppress(EnvironmentFailure, ProcessDied, TimeoutError):
            try:
                async with asyncio.timeout(guard(self._rules.timeout_s)):
                    await episode.close()
            except Exception as error:
                logger.warning("Task %r: close raised %s: %s", self._task.id, type(error).__name__, error)

    def _take(self, result: StepResult) -> None:
        self._metrics |= {name: float(value) for name, value in result.metrics.items()}
        if result.reward is not None:
            if not is_number(result.reward):
                raise EnvironmentFailure(
                    "environment", f"the reward of turn {self._turns} is {told(result.reward)}, which is no finite number"
                )
            self._steps_reward = (self._steps_reward or 0.0) + result.reward

    def _see(self, observation: Observation) -> Context | None:
        """Put what the next actor sees behind what it saw; None where no token is left for it. An observation without tools leaves those that there are."""
        actor, new = observation.next_actor, list(observation.turns)
        self._transcript += new
        if sum(len(part) for turn in new for part in texts_of(turn)) > LETTERS * self._rules.row:
            return None
        ids = self._generators.facts.vocab_size
        for turn in new:
            if any(not 0 <= token < ids for token in turn.tokens or ()):
                raise EnvironmentFailure(
                    "environment",
                    f"a turn of its observation has the tokens {turn.tokens!r:.200}, and ids go from 0 to {ids - 1}: only turns that the policy generated have tokens",
                )
        old = self._contexts.get(actor)
        shown = media.media_of(new)
        new = media.with_ids(new, self._rules.processor)
        self._files.take(shown)
        if old is None or observation.rewrites:
            return self._begin(actor, new, shown, observation.tools or (old.tools if old else ()))
        tools = observation.tools or old.tools
        extension = None if tools != old.tools else rendered(lambda: self._renderer.extend(old.history, new, tools, old.finish))
        if extension is None:  # Its template has rewritten what it rendered before.
            return self._begin(actor, [*old.history, *new], [*(each.media for each in old.segment.media), *shown], tools)
        if self._room(len(old.segment.tokens) + len(extension)) <= 0:
            return None
        places = media.placed(extension, shown, self._rules.processor, len(old.segment.tokens))
        old.history += new
        old.segment.extend(extension, places)
        return old

    def _begin(self, actor: str, history: list[Turn], shown: list[Media], tools: tuple[ToolSpec, ...]) -> Context | None:
        prompt = rendered(lambda: self._renderer.begin(history, tools))
        if not prompt:
            raise EnvironmentFailure("environment", f"the history of {actor!r} renders to no token: an observation needs a turn")
        if self._room(len(prompt)) <= 0:
            return None
        builder = SegmentBuilder(actor, prompt, media.placed(prompt, shown, self._rules.processor))
        context = self._contexts[actor] = Context(history, tools, builder)
        self._segments.append(context.segment)
        return context

    # ------------------------------------------------------------ the policy's side

    def _room(self, used: int) -> int:
        """How many tokens may be generated behind a context of `used`."""
        limits = self._limits
        bounds = [self._rules.row - used, self._generators.facts.max_tokens - used]
        bounds += [] if limits.tokens_per_turn is None else [limits.tokens_per_turn]
        bounds += [] if limits.tokens is None else [limits.tokens - self._generated]
        return min(bounds)

    async def _speak(self, context: Context) -> Turn:
        which, rules = self._which, self._rules
        sampling = dataclasses.replace(
            rules.sampling, max_tokens=self._room(len(context.segment.tokens)), seed=seed_of(*which.seeds, self._turns)
        )
        name = f"{which.id}/{self._attempt}/{self._turns}"
        builder, priority = context.segment, max(0, which.group)
        request = Request(name, tuple(builder.tokens), sampling, routes=rules.routes, priority=priority, media=tuple(builder.media))
        begin = asyncio.get_running_loop().time()
        # No time limit here: one would leave out tries for being long or for waiting. Generators that stand still are the pool's to replace.
        made = await self._generators.generate(request)
        self._spent["generate"] += asyncio.get_running_loop().time() - begin
        check_generated(made, request)
        context.segment.generated(made)
        turn = dataclasses.replace(self._renderer.parse(made.tokens, made.finish), tokens=made.tokens, actor=context.segment.actor)
        context.history.append(turn)
        context.finish, self._cut = made.finish, made.finish == "length"
        self._transcript.append(turn)
        self._turns += 1
        self._generated += len(made.tokens)
        return turn


def texts_of(turn: Turn) -> tuple[str, ...]:
    """The texts of a turn."""
    return (turn.content,) if isinstance(turn.content, str) else tuple(part for part in turn.content if isinstance(part, str))


def rendered(call: Callable[[], Result]) -> Result:
    """What a renderer makes of an environment's turns. Text that it cannot take is a failure of the environment, not the end of the run; errors of ours stay."""
    try:
        return call()
    except IntarsiaError:
        raise
    except Exception as error:
        raise EnvironmentFailure("environment", f"its turns cannot be rendered: {type(error).__name__}: {error}") from error


def check_generated(made: Generated, request: Request) -> None:
    """Refuse a completion without tokens or with numbers that are none. Raises EnvironmentFailure("model") for the first, NumericsError for the second."""
    if not made.tokens or made.finish == "abort":
        raise EnvironmentFailure("model", f"the generator gave {len(made.tokens)} tokens and ended by {made.finish!r}", retry=True)
    if not len(made.tokens) == len(made.log_probs) == len(made.versions) <= request.sampling.max_tokens:
        raise EnvironmentFailure(
            "model",
            f"the generator gave {len(made.tokens)} tokens, {len(made.log_probs)} log-probabilities and {len(made.versions)} versions; at most {request.sampling.max_tokens} were asked for",
        )
    for place, value in enumerate(made.log_probs):
        if not isinstance(value, (int, float)):
            raise PluginError(
                f"The generator's log-probability of token {place} of request {request.id} is {told(value)}: it must be a number."
            )
        if not is_number(value):
            raise NumericsError(
                f"The generator's log-probability of token {place} (id {made.tokens[place]}, version {made.versions[place]}) of request {request.id} is {value}: its "
                "weights or its computation are not finite. Lower the learning rate, or look at the step that made this version."
            )


async def with_attempts(attempts: int, act: Callable[[int], Awaitable[Result]]) -> tuple[Result | None, Failure | None, int]:
    """What `act(number)` gives, begun again after failures that may pass and after processes that died, `attempts` times at most; after those that something else ended (`Bystander`) as often as
    these come. (None, failure, how often it was begun) when that was in vain."""
    begun = own = 0
    while True:
        begun += 1
        try:
            return await act(begun), None, begun
        except Bystander:
            continue
        except EnvironmentFailure as error:
            message = str(error).removeprefix(f"{error.boundary}: ")
            failure, again = Failure(error.boundary, message, begun), error.retry
        except ProcessDied as error:
            failure, again = Failure("environment", str(error), begun), True
        own += 1
        if not again or own >= attempts:
            return None, failure, begun


def guard(seconds: float) -> float:
    """How long the loop itself waits for an answer that must come within `seconds`: the workers, who know more, are the first to give up."""
    return 1.25 * seconds + 5.0


async def all_of(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """What all of them give, run side by side. The first that raises ends the others, and its exception is raised as it is."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
