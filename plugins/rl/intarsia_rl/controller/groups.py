"""A group: tries at one task side by side, scored together. Also held-out tasks, and log-probabilities of tokens that are there already."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from intarsia.contracts import Task, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import IntarsiaError, PluginError

from intarsia_rl.algorithms.gradient import LARGEST
from intarsia_rl.contracts import Algorithm, Failure, Generated, ProcessDied, Renderer, Request, Routes, Sample, Sampling, Segment
from intarsia_rl.controller.buffer import Status
from intarsia_rl.controller.protocols import EnvironmentFacts, Generators, Workers
from intarsia_rl.controller.rollout import POLICY, Rollout, Rules, Try, all_of, check_generated, guard, texts_of, with_attempts
from intarsia_rl.given import finite, is_number, told
from intarsia_rl.processes.failures import cut

KEPT = 1 << 16
"""Characters of a turn's text that are kept with a sample."""


@dataclasses.dataclass
class Player:
    """Plays tries. `retries` counts those that were begun again."""

    rules: Rules
    facts: EnvironmentFacts
    generators: Generators
    workers: Workers
    renderer: Renderer
    retries: int = 0

    async def tries(self, task: Task, which: Sequence[Try]) -> list[Sample]:
        """All of them, scored; in order. Long texts of turns are cut then: rubrics have seen them, and what the policy saw is in the segments."""
        scored = await self._score(task, await all_of(self._one(task, each) for each in which))
        return [dataclasses.replace(sample, turns=tuple(map(shortened, sample.turns))) for sample in scored]

    async def _one(self, task: Task, which: Try) -> Sample:
        async def act(attempt: int) -> Sample:
            return await Rollout(self.rules, self.facts, self.generators, self.renderer, task, which, attempt).run(self.workers)

        sample, failure, attempts = await with_attempts(self.rules.attempts, act)
        self.retries += attempts - 1
        return sample or Sample(which.id, which.group, which.member, task.id, (), failure=failure)

    async def _score(self, task: Task, samples: list[Sample]) -> list[Sample]:
        """Samples with the rubrics' scores; a score that is no number fails its sample alone, a rubric that fails fails all that it should score."""
        live = [sample for sample in samples if sample.failure is None]
        if not live:
            return samples
        if not self.facts.rubrics:
            return [_rewarded(sample, {}, self.facts.rubrics, 0.0) for sample in samples]
        loop = asyncio.get_running_loop()
        begin = loop.time()

        async def act(attempt: int) -> Mapping[str, Sequence[float | str]]:
            return await self._ask_rubrics(task, live)

        scores, failure, attempts = await with_attempts(self.rules.attempts, act)
        self.retries += attempts - 1
        seconds = loop.time() - begin
        if scores is None:
            return [sample if sample.failure else dataclasses.replace(sample, reward=0.0, failure=failure) for sample in samples]
        places = {sample.id: place for place, sample in enumerate(live)}
        return [
            sample if sample.failure else _rewarded(sample, {name: each[places[sample.id]] for name, each in scores.items()}, self.facts.rubrics, seconds)
            for sample in samples
        ]  # fmt: skip

    async def _ask_rubrics(self, task: Task, live: Sequence[Sample]) -> Mapping[str, Sequence[float | str]]:
        try:
            async with asyncio.timeout(guard(self.rules.timeout_s)):
                scores = (await self.workers.score(task, [sample.turns for sample in live])).values
        except TimeoutError:
            raise EnvironmentFailure("scorer", f"no score within {self.rules.timeout_s:g} s (timeout_s)", retry=True) from None
        except (EnvironmentFailure, ProcessDied, IntarsiaError):
            raise
        except Exception as error:
            raise EnvironmentFailure("scorer", f"scoring raised {type(error).__name__}: {error}") from error
        for name in self.facts.rubrics:
            if len(scores.get(name, ())) != len(live):
                raise EnvironmentFailure("scorer", f"rubric {name!r} gave {len(scores.get(name, ()))} scores for {len(live)} episodes")
        return scores


def _rewarded(sample: Sample, scores: Mapping[str, float | str], weights: Mapping[str, float], seconds: float) -> Sample:
    """The sample with its reward: the weighted scores and what its steps earned."""
    if sample.failure is not None:
        return sample
    for name, score in scores.items():
        if not is_number(score):
            given = score if isinstance(score, str) else told(score)
            message = f"rubric {name!r} gave {given}: a score is a finite number"
            return dataclasses.replace(sample, reward=0.0, failure=Failure("scorer", message))
    rewards = {**{name: float(score) for name, score in scores.items()}, **sample.rewards}
    if not rewards and not sample.truncated:
        message = "nothing was scored: the environment has no rubric and no step of this episode carries a reward"
        return dataclasses.replace(sample, failure=Failure("scorer", message))
    reward = sum(weights.get(name, 1.0) * value for name, value in rewards.items())
    if not abs(reward) <= LARGEST:  # nor nan
        message = f"the weighted sum of {rewards} is {reward:g}; rewards are numbers of at most {LARGEST:g}"
        return dataclasses.replace(sample, reward=0.0, failure=Failure("scorer", message))
    return dataclasses.replace(sample, reward=reward, rewards=rewards, timings_s={**sample.timings_s, "score": seconds})


def shortened(turn: Turn) -> Turn:
    """The turn as it is kept: of each text the first `KEPT` characters."""
    if all(len(text) <= KEPT for text in texts_of(turn)):
        return turn
    if isinstance(turn.content, str):
        return dataclasses.replace(turn, content=cut(turn.content, KEPT))
    return dataclasses.replace(turn, content=tuple(cut(part, KEPT) if isinstance(part, str) else part for part in turn.content))


def judge(algorithm: Algorithm, samples: Sequence[Sample]) -> tuple[Status, tuple[float, ...]]:
    """What the algorithm makes of a group: its status, and an advantage for each sample, 0 for failed ones. Errors: PluginError for advantages that are no numbers."""
    live = [sample for sample in samples if sample.failure is None and sample.trained_tokens]
    if not live:
        return "failed", (0.0,) * len(samples)
    answer = algorithm.advantages(live)
    given = list(answer) if isinstance(answer, Iterable) else []
    if len(given) != len(live):
        raise PluginError(
            f"The algorithm {type(algorithm).__name__} gave the advantages {told(answer)} for {len(live)} samples: it gives one for each."
        )
    found = [_number(algorithm, "the advantage", value, sample) for value, sample in zip(given, live, strict=True)]
    by_id = {sample.id: value for sample, value in zip(live, found, strict=True)}
    status: Status = "kept" if algorithm.keeps(live, found) else "filtered"
    return status, tuple(by_id.get(sample.id, 0.0) for sample in samples)


def weight_of(algorithm: Algorithm, sample: Sample) -> float:
    """The algorithm's weight of a sample's tokens. Errors: PluginError for what is no number."""
    return _number(algorithm, "the token weight", algorithm.token_weight(sample), sample)


def count_of(algorithm: Algorithm, sample: Sample) -> int:
    """What the algorithm lets a sample add to the divisor. Errors: PluginError for what is no number."""
    return int(_number(algorithm, "the count", algorithm.count(sample), sample))


def _number(algorithm: Algorithm, what: str, given: Any, sample: Sample) -> float:
    number = finite(given)
    if number is None:
        raise PluginError(
            f"The algorithm {type(algorithm).__name__} gave {what} {told(given)} for sample {sample.id}, whose reward is {sample.reward:g}: it must be a finite number."
        )
    return number


# ---------------------------------------------------------------- log-probabilities of tokens that are there


async def score_segments(
    generators: Generators, sample: Sample, name: str, replayed: bool = False
) -> tuple[tuple[tuple[float, ...], ...], set[int]]:
    """For each segment and token what a generator gives as its log-probability, 0.0 where it is not trained; and the versions that gave it. `replayed`: the trainer goes to the experts that
    the sample has routes to, so what it gives is comparable only as far as the generator's routers still choose these: nan for tokens behind the first other choice."""
    results = await all_of(_score(generators, segment, f"{name}/{place}", replayed) for place, segment in enumerate(sample.segments))
    return tuple(values for values, _ in results), set().union(*(versions for _, versions in results))


async def _score(generators: Generators, segment: Segment, name: str, replayed: bool) -> tuple[tuple[float, ...], set[int]]:
    values = [0.0] * len(segment.tokens)
    if segment.actor != POLICY or True not in segment.trained:
        return tuple(values), set()
    first = segment.trained.index(True)
    last = len(segment.trained) - segment.trained[::-1].index(True)
    forced, media = segment.tokens[first:last], tuple(each for each in segment.media if each.at < last)
    routes = segment.routes if replayed else None
    request = Request(name, segment.tokens[:first], Sampling(len(forced)), forced=forced, routes=routes is not None, media=media)
    made: Generated = await generators.generate(request)
    check_generated(made, request)
    if made.tokens != forced:
        raise PluginError(f"The generator {generators.facts.name!r} was given {len(forced)} forced tokens and took others.")
    # The choice at a token is in the log-probability of the next one.
    known = last if routes is None else 1 + (0 if made.routes is None else same_choices(made.routes, routes))
    for place, value in enumerate(made.log_probs, first):
        values[place] = (value if place < known else math.nan) if segment.trained[place] else 0.0
    return tuple(values), set(made.versions)


def same_choices(one: Routes, other: Routes) -> int:
    """For how many tokens, from the first on, both go to the same experts."""
    if one.shape[1:] != other.shape[1:]:
        return 0
    size = 2 * one.shape[1] * one.shape[2]
    tokens = min(one.shape[0], other.shape[0])
    pairs = ((one.data[at * size : (at + 1) * size], other.data[at * size : (at + 1) * size]) for at in range(tokens))
    return next((at for at, (left, right) in enumerate(pairs) if left != right), tokens)
