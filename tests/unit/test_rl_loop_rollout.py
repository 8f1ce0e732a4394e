"""A try, token-in token-out: ids that are trained are ids that were generated, limits, self-play, rewriting, failures by boundary, scores and groups. Without processes."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
from intarsia.contracts import Limits, Media, Observation, StepResult, Task, ToolSpec, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import NumericsError, PluginError, UsageError
from intarsia_rl.contracts import Generated, Request, Routes, Sample, Sampling
from intarsia_rl.controller.groups import Player, count_of, judge, score_segments, shortened, weight_of
from intarsia_rl.controller.rollout import Rules, Try
from intarsia_rl.controller.seeds import seed_of
from intarsia_rl.controller.state import sample_from_json, sample_to_json
from intarsia_rl.given import told
from intarsia_rl.packing import Packing, Weighed, micro_batches, pieces_of, rows_of
from intarsia_testing.rollout_doubles import (
    InProcessWorkers,
    MeanBaseline,
    MergingRenderer,
    MergingTokenizer,
    Said,
    ScriptedGenerators,
    published,
    run_virtually,
)

TASK = Task("t", {})
TOKENS = MergingTokenizer()


class Scripted:
    """An environment whose episodes answer with given observations and results, one for each step."""

    def __init__(self, first: Observation, answers: Sequence[Any], limits: Limits | None = None, rubrics: Sequence[Any] = ()) -> None:
        self.first, self.answers, self.limits, self._rubrics = first, list(answers), limits or Limits(), rubrics
        self.begun: list[int] = []
        self.actions: list[Turn] = []
        self.closed = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]

    def episode(self, task: Task, seed: int) -> Any:
        self.begun.append(seed)
        return _Episode(self)

    def rubrics(self) -> Sequence[Any]:
        return self._rubrics


class _Episode:
    def __init__(self, home: Scripted) -> None:
        self.home, self.number = home, 0

    async def reset(self) -> Observation:
        return self.home.first

    async def step(self, action: Turn) -> StepResult:
        self.home.actions.append(action)
        answer = self.home.answers[self.number]
        self.number += 1
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return StepResult(None, 1.0, ended=True)
        return answer if isinstance(answer, StepResult) else StepResult(answer)

    async def close(self) -> None:
        self.home.closed += 1


def asks(text: str, **values: Any) -> Observation:
    return Observation((Turn("user", text),), **values)


END = StepResult(None, reward=1.0, ended=True)


def player(environment: Any, script: Callable[[Request], Said], forgets: bool = False, row: int = 200, attempts: int = 3) -> Player:
    generators, workers = ScriptedGenerators(script), InProcessWorkers(environment)
    generators.version = 4
    rules = Rules(11, Sampling(1, stop_ids=(514,)), row, attempts, timeout_s=60.0)
    return Player(rules, workers.environment_facts(), generators, workers, MergingRenderer(forgets=forgets))


def tries(count: int = 1) -> list[Try]:
    return [Try(f"0/{member}", 0, member, (11, 0, member)) for member in range(count)]


def play(environment: Any, script: Callable[[Request], Said], count: int = 1, **values: Any) -> tuple[list[Sample], Player]:
    made = player(environment, script, **values)
    return run_virtually(made.tries(TASK, tries(count))), made


def says(*texts: str) -> Callable[[Request], Said]:
    """Each text in turn, single letters as single tokens: never what the tokenizer would make of `aa`."""
    queue = list(texts)
    return lambda request: Said([*queue.pop(0).encode(), 514])


# ---------------------------------------------------------------- tokens


def test_ids_trained_are_ids_generated_across_borders_that_merge() -> None:
    environment = Scripted(asks("oo"), [asks("aab"), asks("bb"), END])
    [sample], made = play(environment, says("xaa", "aa", "b"))
    [segment] = sample.segments
    generated = [made_.tokens for made_ in made.generators.log]  # type: ignore[attr-defined]
    assert TOKENS.encode("xaa") != list(b"xaa"), "the tokenizer would have made other ids of it"
    assert [token for token, trained in zip(segment.tokens, segment.trained, strict=True) if trained] == [token for each in generated for token in each]  # fmt: skip
    prompts = [request.tokens for request in made.generators.requests]  # type: ignore[attr-defined]
    for prompt, made_, following in zip(prompts, generated, prompts[1:], strict=False):
        assert following[: len(prompt) + len(made_)] == prompt + made_, (
            "the next prompt begins with the very ids of the last one and its completion"
        )
    values = {token: (log_prob, version) for token, log_prob, version in zip(range(len(segment.tokens)), segment.log_probs, segment.versions, strict=True)}  # fmt: skip
    assert all((version == 4 and log_prob < 0) == trained for (log_prob, version), trained in zip(values.values(), segment.trained, strict=True))  # fmt: skip
    assert [turn.content for turn in sample.turns] == ["oo", "xaa", "aab", "aa", "bb", "b"]
    assert [action.tokens for action in environment.actions] == generated
    assert sample.reward == 1.0 and sample.rewards == {"steps": 1.0} and not sample.truncated and environment.closed == 1


def test_a_template_that_rewrites_history_begins_new_segments() -> None:
    environment = Scripted(asks("q"), [asks("r"), END])
    [sample], made = play(environment, says("long thought.xx", "yy"), forgets=True)
    first, second = sample.segments
    assert TOKENS.decode(first.tokens) == "qlong thought.xx"
    assert TOKENS.decode(second.tokens) == "qxxryy", "the thought is gone from what the policy saw"
    generated = [list(each.tokens) for each in made.generators.log]  # type: ignore[attr-defined]
    for segment, tokens in zip(sample.segments, generated, strict=True):
        assert [token for token, trained in zip(segment.tokens, segment.trained, strict=True) if trained] == tokens
    assert sample.trained_tokens == sum(map(len, generated)), "nothing is trained on twice"


def test_an_environment_that_rewrites_begins_a_new_segment() -> None:
    environment = Scripted(asks("abc"), [asks("short", rewrites=True), asks("more"), END])
    [sample], _ = play(environment, says("1", "2", "3"))
    assert [TOKENS.decode(segment.tokens) for segment in sample.segments] == ["abc1", "short2more3"]


def test_tools_that_change_begin_a_new_segment_and_none_leaves_them() -> None:
    one, two = (ToolSpec(name, "", {}) for name in ("one", "two"))
    environment = Scripted(asks("a", tools=(one,)), [asks("b"), asks("c", tools=(two,)), END])
    [sample], _ = play(environment, says("1", "2", "3"))
    assert [TOKENS.decode(segment.tokens) for segment in sample.segments] == ["a1b2", "a1b2c3"]
    assert [sum(segment.trained) for segment in sample.segments] == [4, 2], "the second segment trains on its own turn only"


def test_self_play_keeps_a_history_for_each_actor_and_trains_one() -> None:
    environment = Scripted(
        asks("you are white"), [asks("you are black; e4", next_actor="opponent"), asks("e5"), asks("Nf3", next_actor="opponent"), END]
    )
    [sample], _ = play(environment, says("e4", "e5", "Nf3", "Nc6"))
    assert [(segment.actor, TOKENS.decode(segment.tokens)) for segment in sample.segments] == [
        ("policy", "you are whitee4e5Nf3"),
        ("opponent", "you are black; e4e5Nf3Nc6"),
    ]
    assert [any(segment.trained) for segment in sample.segments] == [True, False]
    assert [turn.actor for turn in sample.turns if turn.role == "assistant"] == ["policy", "opponent", "policy", "opponent"]
    assert [piece.segment.actor for piece in pieces_of([Weighed(sample, 1.0, 1.0, 1)])] == ["policy"]


def test_routes_are_those_of_the_first_time_a_token_went_through() -> None:
    from intarsia_rl.contracts import Routes
    from intarsia_rl.controller.rollout import SegmentBuilder

    def routes(rows: int, mark: int) -> Routes:
        return Routes(b"".join(bytes([row, mark, 0, 0]) for row in range(rows)), (rows, 1, 2))

    builder = SegmentBuilder("policy", [1, 2, 3])
    builder.generated(Generated("r", (4, 5), (-1.0, -1.0), (0, 0), "eos", routes(4, 1)))
    builder.extend([6])
    builder.generated(Generated("r", (7,), (-1.0,), (1,), "eos", routes(6, 2)))
    segment = builder.build()
    assert segment.routes is not None and segment.routes.shape == (6, 1, 2) and len(segment.tokens) == 7
    assert [segment.routes.data[4 * row + 1] for row in range(6)] == [1, 1, 1, 1, 2, 2]


# ---------------------------------------------------------------- limits


def test_limits_of_turns_and_tokens_truncate() -> None:
    def long(request: Request) -> Said:
        return Said([97] * 50)

    endless = [asks("again")] * 50
    [sample], _ = play(Scripted(asks("q"), endless, Limits(turns=2, tokens_per_turn=3)), long)
    assert sample.truncated and sample.trained_tokens == 6 and sample.failure is None and sample.reward == 0.0
    [sample], _ = play(Scripted(asks("q"), endless, Limits(tokens=10, tokens_per_turn=4)), long)
    assert sample.truncated and sample.trained_tokens == 10
    [sample], made = play(Scripted(asks("q"), endless), long, row=20)
    assert sample.truncated and len(sample.segments[0].tokens) <= 20
    assert all(len(request.tokens) + request.sampling.max_tokens <= 20 for request in made.generators.requests)  # type: ignore[attr-defined]
    [sample], _ = play(Scripted(asks("q"), [END], Limits(tokens_per_turn=4)), long)
    assert sample.truncated and sample.reward == 1.0, "cut, and scored by its environment"
    [sample], _ = play(Scripted(asks("q"), [END], Limits(tokens_per_turn=60)), lambda request: Said([97, 514]))
    assert not sample.truncated


def test_a_prompt_that_fills_the_row_is_a_failure_that_says_so() -> None:
    [sample], _ = play(Scripted(asks("abcdefghij" * 3), [END]), says("x"), row=20)
    assert sample.failure is not None and sample.failure.boundary == "environment" and sample.failure.attempts == 1
    assert "leaves no room for a token: train.sequence_length is 20" in sample.failure.message


def test_what_cannot_fit_is_not_tokenised_and_long_texts_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that prints a hundred megabytes costs its try the next turn, and nobody else their time or memory."""
    real, seen = MergingTokenizer.encode, []
    monkeypatch.setattr(MergingTokenizer, "encode", lambda self, text: seen.append(len(text)) or real(self, text))
    flood = Scripted(asks("q"), [asks("x" * 200_000)])
    [sample], _ = play(flood, lambda request: Said([97, 514]))
    assert sample.truncated and sample.failure is None and sample.trained_tokens == 2
    assert max(seen) < 200_000, "it is longer than the row of 200 tokens can be"
    kept = sample.turns[-1].content
    assert isinstance(kept, str) and len(kept) < 70_000 and kept.endswith("... (134,464 characters more)")
    parts = Turn("tool", ("a" * 70_000, Media("image", b"", "image/png"), "b"))
    short = shortened(parts)
    assert len(short.content[0]) < 66_000 and short.content[1:] == parts.content[1:]  # type: ignore[arg-type]
    [sample], _ = play(Scripted(asks("x" * 200_000), [END]), lambda request: Said([97, 514]))
    assert sample.failure is not None and "leaves no room for a token" in sample.failure.message


# ---------------------------------------------------------------- failures


def test_tokens_of_an_observation_that_are_no_ids_fail_their_try_alone() -> None:
    odd = Observation((Turn("assistant", "a", tokens=(97, 99_999)), Turn("user", "q")))
    [sample], _ = play(Scripted(odd, [END]), lambda request: Said([97, 514]))
    assert sample.failure is not None and sample.failure.boundary == "environment"
    assert "has the tokens (97, 99999), and ids go from 0 to 519" in sample.failure.message


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize(
    ("answer", "boundary", "text", "attempts"),
    [
        (ValueError("broken"), "environment", "step raised ValueError: broken", 1),
        (EnvironmentFailure("sandbox", "gone", retry=True), "sandbox", "gone", 3),
        (EnvironmentFailure("tool", "refused"), "tool", "refused", 1),
        (1e6, "environment", "step gave no answer within 60 s", 3),
        (StepResult(None, reward=math.nan, ended=True), "environment", "the reward of turn 1 is nan", 1),
    ],
)
def test_failures_of_one_and_of_all(everyone: bool, answer: Any, boundary: str, text: str, attempts: int) -> None:
    bad = Scripted(asks("q"), [answer])
    good = Scripted(asks("q"), [END])
    which = iter([False, True, False, False] + [True] * 8)

    class Mixed(Scripted):
        def episode(self, task: Task, seed: int) -> Any:
            if seed not in self.seen:
                self.seen[seed] = everyone or next(which)
            return (bad if self.seen[seed] else good).episode(task, seed)

    mixed = Mixed(asks("q"), [])
    mixed.seen = {}  # type: ignore[attr-defined]
    samples, made = play(mixed, lambda request: Said([97, 514]), count=4)
    failed = [sample for sample in samples if sample.failure is not None]
    assert len(failed) == (4 if everyone else 1)
    for sample in failed:
        assert sample.failure is not None
        assert (sample.failure.boundary, sample.failure.attempts) == (boundary, attempts) and text in sample.failure.message
        assert sample.reward == 0.0 and sample.segments == ()
    assert bad.closed + good.closed == len(bad.begun) + len(good.begun), "every episode is closed"
    assert len(set(bad.begun)) == len(failed), "an attempt has the seed of the try"
    assert made.retries == len(failed) * (attempts - 1)
    status, advantages = judge(MeanBaseline(), samples)
    assert status == ("failed" if everyone else "kept") and len(advantages) == 4
    assert all(value == 0.0 for value in advantages), "equal rewards, and failures, give 0"


def test_no_tokens_and_aborts_are_failures_of_the_model() -> None:
    [sample], _ = play(Scripted(asks("q"), [END]), lambda request: Said([]))
    assert sample.failure is not None and sample.failure.boundary == "model" and "0 tokens" in sample.failure.message


def test_an_attempt_that_goes_well_is_no_failure() -> None:
    environment = Scripted(asks("q"), [END])
    calls: list[int] = []

    def episode(task: Task, seed: int) -> Any:
        calls.append(seed)
        if len(calls) < 3:
            raise EnvironmentFailure("environment", "not yet", retry=True)
        return _Episode(environment)

    environment.episode = episode  # type: ignore[method-assign]
    [sample], made = play(environment, says("a"))
    assert sample.failure is None and len(calls) == 3 and len(set(calls)) == 1 and made.retries == 2


def test_a_log_probability_that_is_not_finite_ends_the_run() -> None:
    made = player(Scripted(asks("q"), [END]), says("a"))
    given: list[Any] = [math.nan, "-1.5"]

    async def generate(request: Request) -> Generated:
        return Generated(request.id, (97,), (given[0],), (4,), "length")

    made.generators.generate = generate  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match="log-probability of token 0"):
        run_virtually(made.tries(TASK, tries(3)))
    given.pop(0)
    with pytest.raises(PluginError, match=r"log-probability of token 0 of request .* is '-1.5' of type str: it must be a number"):
        run_virtually(made.tries(TASK, tries(3)))
    assert NumericsError.exit_code == 4


def test_a_usage_error_of_an_environment_ends_the_run() -> None:
    with pytest.raises(UsageError, match="cannot confine"):
        play(Scripted(asks("q"), [UsageError("cannot confine")]), says("a", "b"))


# ---------------------------------------------------------------- scores


class Rated:
    """A rubric by a function of the group."""

    def __init__(self, name: str, weight: float, score: Callable[[Sequence[Sequence[Turn]]], Any]) -> None:
        self.name, self.weight, self._score = name, weight, score

    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> Any:
        return self._score(episodes)


def test_rubrics_are_weighted_and_see_the_group() -> None:
    longest = Rated(
        "longest", 0.5, lambda group: [float(len(each[-1].content) == max(len(e[-1].content) for e in group)) for each in group]
    )
    one = Rated("one", 2.0, lambda group: [1.0] * len(group))
    texts = iter(["a", "abcd", "ab"])
    samples, _ = play(Scripted(asks("q"), [END], rubrics=(longest, one)), lambda request: Said([*next(texts).encode(), 514]), count=3)
    assert sorted(sample.reward for sample in samples) == [3.0, 3.0, 3.5]
    assert all(set(sample.rewards) == {"longest", "one", "steps"} for sample in samples)


def test_scores_that_fail() -> None:
    def play_with(rubric: Rated, count: int = 3) -> list[Sample]:
        end = StepResult(None, ended=True)
        return play(Scripted(asks("q"), [end], rubrics=(rubric,)), lambda request: Said([97, 514]), count=count)[0]

    samples = play_with(Rated("r", 1.0, lambda group: [0.5, math.nan, 1.0]))
    assert [sample.failure and sample.failure.message for sample in samples] == [
        None,
        "rubric 'r' gave nan: a score is a finite number",
        None,
    ]
    assert [sample.reward for sample in samples] == [0.5, 0.0, 1.0]
    samples = play_with(Rated("r", 1.0, lambda group: [0.5, "high", None]))
    assert [sample.failure and sample.failure.message.partition(":")[0] for sample in samples] == [
        None,
        "rubric 'r' gave 'high' of type str",
        "rubric 'r' gave None",
    ]

    def down(group: Any) -> Any:
        raise EnvironmentFailure("scorer", "the judge is down", retry=True)

    samples = play_with(Rated("r", 1.0, down))
    assert all(sample.failure and sample.failure.boundary == "scorer" and sample.failure.attempts == 3 for sample in samples)
    samples = play_with(Rated("r", 1.0, lambda group: [1.0]))
    assert all(sample.failure and "1 scores for 3 episodes" in sample.failure.message for sample in samples)
    [sample], _ = play(Scripted(asks("q"), [StepResult(None, ended=True)]), says("a"))
    assert sample.failure is not None and "nothing was scored" in sample.failure.message
    samples = play_with(Rated("r", 1.0, lambda group: [0.5, 1e200, 1.0]))
    assert [sample.failure and sample.failure.boundary for sample in samples] == [None, "scorer", None]
    assert samples[1].failure is not None and "at most 1e+100" in samples[1].failure.message


def test_turns_that_cannot_be_rendered_fail_their_try_alone() -> None:
    [sample], _ = play(Scripted(asks("\ud800"), [END]), says("a"))
    assert sample.failure is not None and sample.failure.boundary == "environment" and "cannot be rendered" in sample.failure.message
    [sample], _ = play(Scripted(asks("q"), [asks("\ud800"), END]), says("a"))
    assert sample.failure is not None and "UnicodeEncodeError" in sample.failure.message


def test_advantages_that_are_no_numbers_end_the_run() -> None:
    samples, _ = play(Scripted(asks("q"), [END]), lambda request: Said([97, 514]), count=2)
    for answer, words in (
        ([math.inf, 0.0], "MeanBaseline gave the advantage inf for sample"),
        ([0.0, "1.5"], "gave the advantage '1.5' of type str for sample .*, whose reward is 1: it must be a finite number"),
        ([0.0, None], "gave the advantage None for sample"),
        ([0.0], r"gave the advantages \[0.0\] of type list for 2 samples"),
        (None, "gave the advantages None for 2 samples"),
    ):
        broken = MeanBaseline()
        broken.advantages = lambda samples, answer=answer: answer  # type: ignore[method-assign, misc]
        with pytest.raises(PluginError, match=words):
            judge(broken, samples)
    broken.advantages = lambda samples: numpy.zeros(2, numpy.float32)  # type: ignore[method-assign, return-value, assignment]
    assert judge(broken, samples)[1] == (0.0, 0.0)
    assert judge(MeanBaseline(filters=True), samples)[0] == "filtered"


def test_weights_and_counts_that_are_no_numbers_end_the_run_with_the_sample() -> None:
    [sample, _], _ = play(Scripted(asks("q"), [END]), lambda request: Said([97, 514]), count=2)
    broken = MeanBaseline()
    assert (weight_of(broken, sample), count_of(broken, sample)) == (broken.token_weight(sample), broken.count(sample))
    for method, ask, what in (("token_weight", weight_of, "the token weight"), ("count", count_of, "the count")):
        for answer in (math.nan, None, "1"):
            setattr(broken, method, lambda sample, answer=answer: answer)
            with pytest.raises(PluginError, match=f"MeanBaseline gave {what} {told(answer)} for sample {sample.id}"):
                ask(broken, sample)


# ---------------------------------------------------------------- what comes after


def multi() -> Sample:
    environment = Scripted(asks("q"), [asks("rr"), asks("s", rewrites=True), END])
    return play(environment, says("xaa", "b", "cc"))[0][0]


def test_scoring_gives_log_probabilities_where_tokens_are_trained() -> None:
    sample, generators = multi(), ScriptedGenerators(lambda request: Said([]))
    generators.version = 9
    scores, versions = run_virtually(score_segments(generators, sample, "audit"))
    assert versions == {9}
    for segment, values in zip(sample.segments, scores, strict=True):
        assert [value != 0.0 for value in values] == list(segment.trained)
        assert values != segment.log_probs
    generators.version = 4
    scores, _ = run_virtually(score_segments(generators, sample, "audit"))
    assert scores == tuple(segment.log_probs for segment in sample.segments), "the same weights give the same numbers"


def test_tokens_behind_another_choice_of_experts_are_not_compared_with_a_trainer_that_replays() -> None:
    sample = multi()
    segment = sample.segments[0]
    rows, first = len(segment.tokens) - 1, segment.trained.index(True)
    assert sum(segment.trained) >= 2 and segment.trained[first + 1]
    kept = Routes(bytes(2 * rows * 2 * 2), (rows, 2, 2))
    sample = dataclasses.replace(sample, segments=(dataclasses.replace(segment, routes=kept),))

    def scored(changed: int | None, replayed: bool = True) -> tuple[float, ...]:
        """With generators whose routers choose otherwise at token `changed`."""
        data = bytearray(kept.data)
        if changed is not None:
            data[8 * changed + 6] = 1

        class Choosing(ScriptedGenerators):
            async def generate(self, request: Request) -> Generated:
                made = await super().generate(request)
                assert request.routes == replayed
                shape = (len(request.tokens) + len(request.forced) - 1, 2, 2)
                return dataclasses.replace(made, routes=Routes(bytes(data[: 8 * shape[0]]), shape) if request.routes else None)

        generators = Choosing(lambda request: Said([]))
        generators.version = 4
        [values] = run_virtually(score_segments(generators, sample, "audit", replayed=replayed))[0]
        return values

    whole = scored(None)
    assert all(map(math.isfinite, whole)) and whole == scored(None, replayed=False) == scored(0, replayed=False)
    # What stands at token `first` comes of the choices up to the token before it.
    assert scored(first)[: first + 1] == whole[: first + 1] and math.isnan(scored(first)[first + 1])
    for early in (0, first - 1):
        assert [math.isnan(value) for value in scored(early)] == list(segment.trained)


def test_samples_are_json_and_come_back_whole() -> None:
    import json

    from intarsia.contracts import Media, ToolCall
    from intarsia_rl.contracts import Failure

    sample = multi()
    segment = dataclasses.replace(sample.segments[0], routes=Routes(b"\x01\x00\xff\xff", (1, 1, 2)))
    media = (
        Media("image", b"png", "image/png"),
        Media("image", "/data/one.png"),
        Media("video", (b"frame", b"other")),
        Media("video", b"mp4"),
    )
    turn = Turn("assistant", ("a", *media), (1, 2), (ToolCall("1", "f", "{}"),), None, "other")
    sample = dataclasses.replace(
        sample, segments=(segment, *sample.segments[1:]), turns=(*sample.turns, turn), audit_log_probs=((0.1,), (0.2, math.nan))
    )
    assert sample_from_json(json.loads(json.dumps(sample_to_json(sample), allow_nan=False))) == sample
    failed = Sample("0/1", 0, 1, "t", (), failure=Failure("tool", "gone", 3))
    assert sample_from_json(json.loads(json.dumps(sample_to_json(failed)))) == failed


def test_seeds_are_functions_of_what_they_are_for() -> None:
    assert seed_of(1, 2, 3) == seed_of(1, 2, 3) != seed_of(1, 23) and 0 <= seed_of("x") < 2**62
    texts: list[tuple[int, ...]] = []
    for _ in range(2):
        _, made = play(Scripted(asks("q"), [asks("r"), END]), says("a", "b"))
        texts.append(tuple(request.sampling.seed for request in made.generators.requests))  # type: ignore[attr-defined]
    assert texts[0] == texts[1] and len(set(texts[0])) == 2


# ---------------------------------------------------------------- packing


def test_packing_puts_what_belongs_to_a_token_beside_its_label() -> None:
    import dataclasses

    import torch
    from intarsia.contracts import IGNORE

    first, second = multi(), multi()
    scores = tuple(tuple(-0.25 for _ in segment.tokens) for segment in second.segments)
    second = dataclasses.replace(second, id="0/1", audit_log_probs=scores, reference_log_probs=scores)
    samples = [Weighed(first, 1.5, 0.5, 7), Weighed(second, -1.5, 0.25, 9)]
    [batch] = micro_batches(samples, Packing(32, 4, 518, reference=True), 0, 1, version=6)
    extra = batch.extra
    assert extra["count"] == 16 and extra["version"] == 6
    trained = sum(sample.trained_tokens for sample in (first, second))
    assert int((batch.labels_BS != IGNORE).sum()) == trained and extra["per_token"] == 16 / trained
    pairs = [(segment, weighed) for weighed in samples for segment in weighed.sample.segments]
    seen = 0
    for row, lengths in enumerate(batch.lengths):
        assert sum(lengths) == 32
        at = 0
        for document, length in enumerate(lengths):
            tokens = tuple(batch.tokens_BS[row, at : at + length].tolist())
            assert batch.positions_BS[row, at : at + length].tolist() == list(range(length))
            assert set(batch.documents_BS[row, at : at + length].tolist()) == {document}
            if set(tokens) != {518}:
                places = [number for number, (segment, _) in enumerate(pairs) if segment.tokens == tokens]
                for place in range(length):
                    label = int(batch.labels_BS[row, at + place])
                    segment = pairs[places[0]][0]
                    if place + 1 < length and segment.trained[place + 1]:
                        seen += 1
                        assert label == segment.tokens[place + 1]
                        assert float(extra["old_log_probs_BS"][row, at + place]) == torch.tensor(segment.log_probs[place + 1]).item()
                        assert int(extra["versions_BS"][row, at + place]) == 4
                        assert abs(float(extra["advantages_BS"][row, at + place])) == 1.5
                    else:
                        assert label == IGNORE and float(extra["weights_BS"][row, at + place]) == 0.0
                        assert int(extra["versions_BS"][row, at + place]) == -1
            at += length
    assert seen == trained
    audited = ~extra["audit_log_probs_BS"].isnan()
    assert int(audited.sum()) == second.trained_tokens and bool((extra["advantages_BS"][audited] == -1.5).all())
    assert bool((extra["reference_log_probs_BS"][audited] == -0.25).all())


def test_ranks_get_equal_numbers_of_micro_batches_that_hold_every_segment_once() -> None:
    samples = [Weighed(multi(), 1.0, 1.0, 1) for _ in range(7)]
    for ranks in (1, 2, 3, 5, 16):
        packed = [micro_batches(samples, Packing(24, 2, 518), rank, ranks, 0) for rank in range(ranks)]
        assert len({len(each) for each in packed}) == 1
        assert sum(batch.extra["count"] for each in packed for batch in each) == 7
        assert all(batch.tokens_BS.shape[0] <= 2 for each in packed for batch in each)
        tokens = sum(int((batch.labels_BS != -100).sum()) for each in packed for batch in each)
        assert tokens == sum(weighed.sample.trained_tokens for weighed in samples)
    rows = rows_of(pieces_of(samples), 24)
    assert all(sum(map(len, row)) <= 24 for row in rows)
    [empty] = micro_batches([], Packing(24, 2, 518), 0, 1, 0)
    assert empty.extra["count"] == 0 and empty.lengths == ((24,),)


def test_routes_stand_at_their_input_tokens() -> None:
    import dataclasses

    from intarsia_rl.contracts import Routes

    sample = multi()
    segments = [dataclasses.replace(s, routes=Routes(b"".join(bytes([place, 0, 1, 0]) for place in range(len(s.tokens) - 1)), (len(s.tokens) - 1, 1, 2))) for s in sample.segments]  # fmt: skip
    [batch] = micro_batches([Weighed(dataclasses.replace(sample, segments=tuple(segments)), 1.0, 1.0, 1)], Packing(32, 4, 518, routes=True), 0, 1, 0)  # fmt: skip
    routes = batch.extra["routes_BSLK"]
    assert routes.shape == (*batch.tokens_BS.shape, 1, 2)
    for row, lengths in enumerate(batch.lengths):
        at = 0
        for length in lengths:
            if int(batch.tokens_BS[row, at]) != 518:
                assert routes[row, at : at + length - 1, 0, 0].tolist() == list(range(length - 1))
                assert routes[row, at + length - 1].flatten().tolist() == [-1, -1]
            at += length


def test_the_double_refuses_without_weights() -> None:
    with pytest.raises(UsageError, match="no weights"):
        run_virtually(ScriptedGenerators(lambda request: Said([1])).generate(Request("r", (1,), Sampling(1))))
    assert published(3).version == 3
