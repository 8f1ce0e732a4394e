"""Lag is bounded exactly, slow tails are waited for and not left out, and nothing is lost or counted twice: on a virtual clock, without processes."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from typing import Any

import pytest
from intarsia.contracts import Observation, StepResult, Task
from intarsia.errors import DistributedError, PluginError, UsageError
from intarsia_rl.algorithms.config import GRPOConfig
from intarsia_rl.algorithms.grpo import GRPO
from intarsia_rl.config import RolloutsConfig
from intarsia_rl.contracts import Algorithm, Sample, Sampling, Segment
from intarsia_rl.controller.buffer import Buffer
from intarsia_rl.controller.groups import Player
from intarsia_rl.controller.loop import Loop, Parts
from intarsia_rl.controller.rollout import Rules
from intarsia_rl.controller.seeds import task_index
from intarsia_testing.rollout_doubles import (
    InProcessWorkers,
    MeanBaseline,
    MergingRenderer,
    MergingTokenizer,
    OneTurn,
    Said,
    ScriptedGenerators,
    digest,
    published,
    run_virtually,
)

TASKS = [Task(f"task-{number}", {"slow": number % 10 < 3}) for number in range(20)]


def settings(**values: Any) -> RolloutsConfig:
    """The loader's settings; what starts processes is not looked at here."""
    from intarsia.config.bases import EnvironmentConfig
    from intarsia_rl import bases

    parts = {
        "environment": EnvironmentConfig(),
        "generator": bases.GeneratorConfig(),
        "launcher": bases.ProcessLauncherConfig(),
        "routing": bases.RoutingConfig(),
        "renderer": bases.RendererConfig(),
        "weights": bases.WeightTransportConfig(),
    }
    return RolloutsConfig(**{**parts, "group": 2, "groups": 4, "audit": 0, "max_lag": 0, **values})


def world(
    config: RolloutsConfig, script: Any, environment: OneTurn, algorithm: Algorithm | None = None, seed: int = 5
) -> tuple[Loop, ScriptedGenerators]:
    generators, workers = ScriptedGenerators(script), InProcessWorkers(environment)
    rules = Rules(seed, Sampling(0, stop_ids=(514,)), 512, config.attempts, config.timeout_s)
    player = Player(rules, workers.environment_facts(), generators, workers, MergingRenderer())
    return Loop(config, seed, Parts(player, player, algorithm or MeanBaseline(), TASKS)), generators


def slow_tail(request: Any) -> Said:
    """30 % of the tasks take five times as long."""
    number = int(MergingTokenizer().decode(request.tokens).partition("-")[2])
    return Said([65 + digest(f"{request.sampling.seed}") % 26, 514], seconds=5.0 if number % 10 < 3 else 1.0)


def reward(task: Task, seed: int, action: Any) -> float:
    return float(digest(f"{task.id} {action.content}") % 2)


async def train(loop: Loop, steps: int, train_s: float, start: int = 0, state: Any = None) -> list[dict[str, Any]]:
    """What the trainer does, with `train_s` for a step."""
    await loop.begin(start, state)
    deliveries = []
    for step in range(start, start + steps):
        await loop.new_weights(published(step))
        deliveries.append(await loop.batch(step))
        await asyncio.sleep(train_s)
    return deliveries


@pytest.mark.parametrize("max_lag", [0, 1, 4])
@pytest.mark.parametrize("train_s", [0.1, 8.0])
def test_lag_is_exact_and_the_slow_tail_is_not_left_out(max_lag: int, train_s: float) -> None:
    loop, _ = world(settings(max_lag=max_lag), slow_tail, OneTurn({"train": TASKS}, reward))
    deliveries = run_virtually(train(loop, 25, train_s))  # 100 groups: five epochs of the 20 tasks
    lags = [step - version for step, each in enumerate(deliveries) for s in each["samples"] for g in s.segments for version in g.versions if version >= 0]  # fmt: skip
    assert min(lags) >= 0 and max(lags) <= max_lag
    if max_lag:
        assert max(lags) == max_lag, "the bound is reached: generation goes ahead as far as it may"
    groups = [sample.group for each in deliveries for sample in each["samples"]]
    assert groups == sorted(groups) and collections.Counter(groups) == dict.fromkeys(range(100), 2)
    tasks = collections.Counter(sample.task for each in deliveries for sample in each["samples"])
    assert tasks == {task.id: 10 for task in TASKS}, "each task is trained on equally often, whatever it takes"
    slow = [sample for each in deliveries for sample in each["samples"] if int(sample.task.partition("-")[2]) % 10 < 3]
    assert len(slow) == 0.3 * 200
    stats = deliveries[-1]["stats"]
    assert stats["lag"]["max"] <= max_lag and 0 <= stats["idle"]["generators"] <= 1
    if max_lag == 4 and train_s == 8.0:
        assert deliveries[-1]["stats"]["idle"]["trainer"] < 0.05, "generation is ahead: the trainer does not wait"


def test_versions_change_within_a_try_that_spans_an_update() -> None:
    def slow(request: Any) -> Said:
        return Said([65 + number for number in range(6)] + [514], seconds=2.0 if request.id.startswith(("1/", "5/")) else 0.1)

    config = settings(max_lag=2, groups=1, group=1)
    loop, _ = world(config, slow, OneTurn({"train": TASKS}, reward))
    deliveries = run_virtually(train(loop, 8, 3.0))
    mixed = [sample for each in deliveries for sample in each["samples"] if len({v for v in sample.segments[0].versions if v >= 0}) > 1]
    assert mixed, "some try went on with newer weights"
    for step, each in enumerate(deliveries):
        assert each["samples"][0].oldest_version >= step - 2


@pytest.mark.parametrize("lost", [False, True])
def test_a_version_that_is_overwritten_while_it_is_read_gives_way_to_the_newest(lost: bool) -> None:
    """Transports keep some versions and overwrite the oldest: of these a reader that is late is told so."""
    config = settings(max_lag=8)
    loop, generators = world(config, slow_tail, OneTurn({"train": TASKS}, reward))
    update, overwritten = generators.update, []

    async def late(weights: Any, in_flight: Any = "continue") -> None:
        await asyncio.sleep(30.0 if weights.version else 0.0)
        assert loop._newest is not None and generators.newest == loop._newest.version
        if loop._newest.version > weights.version + 3 or (lost and weights.version):
            overwritten.append(weights.version)
            raise DistributedError(f"version {weights.version} is not kept (any more)")
        await update(weights, in_flight)

    generators.update = late  # type: ignore[method-assign]
    if lost:
        with pytest.raises(DistributedError, match="is not kept"):
            run_virtually(train(loop, 20, 0.5))
        return
    deliveries = run_virtually(train(loop, 20, 0.5))
    assert overwritten and all(each["stats"]["lag"]["max"] <= 8 for each in deliveries)


def test_groups_left_out_make_room_and_are_told_of() -> None:
    environment = OneTurn({"train": TASKS}, lambda task, seed, action: 1.0 if digest(task.id) % 3 == 0 else float(seed % 2))
    for max_lag in (0, 2):
        loop, _ = world(settings(max_lag=max_lag, groups=3), slow_tail, environment, MeanBaseline(filters=True))
        deliveries = run_virtually(train(loop, 10, 0.5))
        for step, each in enumerate(deliveries):
            assert len({sample.group for sample in each["samples"]}) == 3
            assert all(0 <= step - sample.oldest_version <= max_lag for sample in each["samples"])
        filtered = sum(each["stats"]["groups_filtered"] for each in deliveries)
        groups = [sample.group for each in deliveries for sample in each["samples"][::2]]
        assert filtered > 0 and groups == sorted(groups) and groups[-1] + 1 == len(groups) + filtered


def test_at_lag_0_what_is_trained_on_does_not_depend_on_time() -> None:
    def quick(request: Any) -> Said:
        return Said(slow_tail(request).tokens, seconds=(digest(request.id) % 7) / 7)

    found = []
    for script in (slow_tail, quick):
        loop, _ = world(settings(groups=3), script, OneTurn({"train": TASKS}, reward), MeanBaseline(filters=True))
        deliveries = run_virtually(train(loop, 12, 0.5))
        found.append([(s.id, s.segments, s.reward, a) for each in deliveries for s, a in zip(each["samples"], each["advantages"], strict=True)])  # fmt: skip
    assert found[0] == found[1]


def test_a_group_is_used_several_times_within_the_bound() -> None:
    loop, _ = world(settings(max_lag=2, uses=2, groups=2), slow_tail, OneTurn({"train": TASKS}, reward))
    deliveries = run_virtually(train(loop, 8, 0.1))
    groups = [[sample.group for sample in each["samples"][::2]] for each in deliveries]
    assert groups == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert all(step - s.oldest_version <= 2 for step, each in enumerate(deliveries) for s in each["samples"])
    assert [each["stats"]["first_use"] for each in deliveries] == [True, False] * 4
    with pytest.raises(UsageError, match=r"max_lag=0 allows less. Set max_lag to 1"):
        Buffer(2, 0, 2)


def test_a_generator_that_says_wrong_versions_is_found_out() -> None:
    loop, generators = world(settings(groups=1, group=1), slow_tail, OneTurn({"train": TASKS}, reward))

    async def run() -> None:
        await loop.begin(3, {"position": {**loop.state()["position"], "blocks": 3, "following": 3}})
        await loop.new_weights(published(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        generators.version = 1
        await loop.batch(3)

    with pytest.raises(PluginError, match="tokens of version 1, but max_lag is 0"):
        run_virtually(run())


# ---------------------------------------------------------------- stopping and going on


@pytest.mark.parametrize(("max_lag", "uses"), [(0, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_run_goes_on_from_its_state(max_lag: int, uses: int, stop: int) -> None:
    config = settings(max_lag=max_lag, uses=uses, groups=3)
    algorithm = MeanBaseline(filters=True)

    async def until(steps: int) -> tuple[list[dict[str, Any]], Any]:
        loop, _ = world(config, slow_tail, OneTurn({"train": TASKS}, reward), algorithm)
        deliveries = await train(loop, steps, 0.7)
        state = loop.state()
        await loop.close()
        return deliveries, state

    unbroken, _ = run_virtually(until(9))
    before, state = run_virtually(until(stop))

    async def again() -> list[dict[str, Any]]:
        loop, _ = world(config, slow_tail, OneTurn({"train": TASKS}, reward), algorithm)
        return await train(loop, 9 - stop, 0.7, stop, json_roundtrip(state))

    broken = before + run_virtually(again())
    key = [[(sample.id, sample.task) for sample in each["samples"]] for each in broken]
    assert key == [[(sample.id, sample.task) for sample in each["samples"]] for each in unbroken]
    assert all(step - s.oldest_version <= max_lag for step, each in enumerate(broken) for s in each["samples"])
    if max_lag == 0:
        assert [(e["samples"], e["advantages"]) for e in strip(broken)] == [(e["samples"], e["advantages"]) for e in strip(unbroken)]
        assert [e["stats"]["groups_filtered"] for e in broken] == [e["stats"]["groups_filtered"] for e in unbroken]


def strip(deliveries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what depends on time."""
    import dataclasses

    return [{**each, "samples": [dataclasses.replace(sample, timings_s={}) for sample in each["samples"]]} for each in deliveries]


def json_roundtrip(value: Any) -> Any:
    import json

    return json.loads(json.dumps(value, allow_nan=False))


def test_state_of_other_tasks_or_settings_is_refused() -> None:
    loop, _ = world(settings(max_lag=1), slow_tail, OneTurn({"train": TASKS}, reward))
    state = loop.state()
    other, _ = world(settings(max_lag=1, groups=5), slow_tail, OneTurn({"train": TASKS}, reward), seed=6)
    with pytest.raises(UsageError, match="seed: 5 when saved, 6 now") as found:
        asyncio.run(other.begin(0, state))
    assert "groups: 4 when saved, 5 now" in str(found.value)
    with pytest.raises(UsageError, match="says nothing of its rollouts"):
        asyncio.run(loop.begin(4, None))


@pytest.mark.parametrize(("before", "now", "train_s"), [(3, 0, 8.0), (3, 1, 8.0), (2, 0, 0.1), (0, 2, 0.1)])
def test_a_run_goes_on_with_another_max_lag(before: int, now: int, train_s: float) -> None:
    """Groups that were begun ahead and are too old for the new bound begin again, in their places: every group is trained on once."""
    loop, _ = world(settings(max_lag=before), slow_tail, OneTurn({"train": TASKS}, reward))

    async def first() -> tuple[list[dict[str, Any]], Any]:
        return await train(loop, 6, train_s), loop.state()

    deliveries, state = run_virtually(first())
    other, _ = world(settings(max_lag=now), slow_tail, OneTurn({"train": TASKS}, reward))
    further = run_virtually(train(other, 6, train_s, start=6, state=json_roundtrip(state)))
    assert all(0 <= step - sample.oldest_version <= now for step, each in enumerate(further, 6) for sample in each["samples"])
    groups = [sample.group for each in (*deliveries, *further) for sample in each["samples"]]
    assert groups == [group for group in range(48) for _ in range(2)]


def test_rollouts_in_use_that_are_too_old_for_a_new_max_lag_are_refused() -> None:
    loop, _ = world(settings(max_lag=4, uses=2), slow_tail, OneTurn({"train": TASKS}, reward))

    async def first() -> Any:
        await train(loop, 5, 8.0)
        return loop.state()

    state = json_roundtrip(run_virtually(first()))
    other, _ = world(settings(max_lag=1, uses=2), slow_tail, OneTurn({"train": TASKS}, reward))
    with pytest.raises(UsageError, match=r"too old for step 5 with max_lag=1. Resume with the max_lag that the run had"):
        asyncio.run(other.begin(5, state))


# ---------------------------------------------------------------- the arithmetic alone


def test_every_task_comes_once_in_an_epoch() -> None:
    for epoch in range(3):
        order = [task_index(7, epoch * 13 + number, 13) for number in range(13)]
        assert sorted(order) == list(range(13)) and order != list(range(13))
    assert [task_index(7, number, 13) for number in range(13)] != [task_index(7, 13 + number, 13) for number in range(13)]


def sample_of(number: int, version: int) -> Sample:
    segment = Segment((1, 2), (False, True), (0.0, -1.0), (-1, version))
    return Sample(f"{number}/0", number, 0, "t", (segment,))


def test_the_buffer_never_lets_lag_exceed_its_bound() -> None:
    """Random finishing orders and filters, 2000 steps of the arithmetic alone: the bound is met exactly, never passed."""
    import random

    for max_lag, uses, size in ((0, 1, 3), (1, 1, 1), (3, 2, 2), (5, 3, 4)):
        draw, buffer, begun = random.Random(max_lag), Buffer(size, max_lag, uses), {}
        version = step = worst = 0
        while step < 200:
            for _ in range(buffer.room(version)):
                begun[buffer.begin("t").number] = version
            unfinished = [number for number, group in buffer.groups.items() if group.status == "unfinished"]
            if unfinished and draw.random() < 0.7:
                number = draw.choice(unfinished)
                status = draw.choices(["kept", "filtered", "failed"], [8, 2, 1])[0]
                buffer.finish(number, status, [sample_of(number, begun[number])], [0.0])  # type: ignore[arg-type]
            if buffer.ready(step) and draw.random() < 0.3:
                block = buffer.take(step)
                worst = max(worst, *(step - begun[group.number] for group in block.kept))
                assert buffer.take(step).kept == block.kept, "asked again, the same"
                step += 1
                assert step - version >= 1
            if step > version and draw.random() < 0.5:
                version = min(step, version + 1)
        assert worst == max_lag, (max_lag, uses, size, worst)


def test_groups_that_teach_nothing_stop_being_begun_though_nobody_asks() -> None:
    environment = OneTurn({"train": TASKS}, lambda task, seed, action: 1.0)
    config = settings(max_lag=1, barren_rounds=2)
    loop, generators = world(config, slow_tail, environment, MeanBaseline(filters=True))

    async def run() -> None:
        await loop.begin(0)
        await loop.new_weights(published(0))
        await asyncio.sleep(10_000.0)
        asked = len(generators.requests)
        assert asked < 80
        with pytest.raises(
            UsageError, match=r"2 rounds of 4 groups in a row have nothing to train on .* left every group out. Rewards are 1 to 1"
        ):
            await loop.batch(0)
        assert len(generators.requests) == asked

    run_virtually(run())


def test_groups_that_are_left_out_since_limits_end_them_say_so() -> None:
    class Cut(OneTurn):
        def episode(self, task: Task, seed: int) -> Any:
            episode = super().episode(task, seed)
            real = episode.step

            async def step(action: Any) -> StepResult:
                return dataclasses.replace(await real(action), ended=False, truncated=True)

            episode.step = step  # type: ignore[method-assign]
            return episode

    algorithm = GRPO(GRPOConfig(skip_truncated=True))
    loop, _ = world(settings(max_lag=1, barren_rounds=2), slow_tail, Cut({"train": TASKS}, reward), algorithm)

    async def run() -> None:
        await loop.begin(0)
        await loop.new_weights(published(0))
        with pytest.raises(UsageError, match=r"of 16 tries 0 failed, and a limit ended 16\..*`skip_truncated` leaves out"):
            await loop.batch(0)
        await loop.close()

    run_virtually(run())


def test_a_policy_that_never_speaks_ends_the_run_with_who_does() -> None:
    class Others(OneTurn):
        def episode(self, task: Task, seed: int) -> Any:
            episode = super().episode(task, seed)
            real = episode.reset

            async def reset() -> Observation:
                return dataclasses.replace(await real(), next_actor="player 1")

            episode.reset = reset  # type: ignore[method-assign]
            return episode

    loop, _ = world(settings(max_lag=1, barren_rounds=2), slow_tail, Others({"train": TASKS}, lambda task, seed, action: 1.0))

    async def run() -> None:
        await loop.begin(0)
        await loop.new_weights(published(0))
        with pytest.raises(PluginError, match=r"the actor 'policy', whose tokens are trained on, never spoke.*next_actor: 'player 1'"):
            await loop.batch(0)
        await loop.close()

    run_virtually(run())


def test_an_audit_scores_anew_what_has_no_token_of_the_trainers_version() -> None:
    loop, _ = world(settings(max_lag=2, audit=1), slow_tail, OneTurn({"train": TASKS}, reward))
    deliveries = run_virtually(train(loop, 6, 30.0))
    assert all(sample.audit_log_probs is None for sample in deliveries[0]["samples"]), "what is of this version needs none"
    for step, each in enumerate(deliveries[1:], 1):
        audited = [sample for sample in each["samples"] if sample.audit_log_probs is not None]
        if all(step not in segment.versions for sample in each["samples"] for segment in sample.segments):
            assert [sample.id for sample in audited] == [each["samples"][0].id] and audited[0].audit_version == step
        else:
            assert not audited
    assert any(sample.audit_version > 0 for each in deliveries for sample in each["samples"])


def test_a_reference_scores_kept_samples() -> None:
    reference = ScriptedGenerators(slow_tail)
    reference.version = 0
    loop, _ = world(settings(groups=2), slow_tail, OneTurn({"train": TASKS}, reward), MeanBaseline(needs_reference=True))
    loop._parts.reference = reference
    for step, each in enumerate(run_virtually(train(loop, 3, 0.1))):
        for sample in each["samples"]:
            [scores], [segment] = sample.reference_log_probs, sample.segments
            assert [score != 0.0 for score in scores] == list(segment.trained)
            assert (scores == segment.log_probs) == (step == 0), "version 0 is the reference"


def test_held_out_tasks_are_tried_with_the_weights_of_the_step() -> None:
    loop, generators = world(settings(max_lag=1), slow_tail, OneTurn({"train": TASKS}, reward))
    loop._parts.held_out_tasks = TASKS[:6]

    async def run() -> list[Any]:
        await loop.begin(0)
        found = []
        for step in range(3):
            await loop.new_weights(published(step))
            found.append(await loop.evaluate(step))
            await loop.batch(step)
        return found

    found = run_virtually(run())
    for step, each in enumerate(found):
        assert [sample.task for sample in each["samples"]] == [task.id for task in TASKS[:6]] and each["stats"]["samples"] == 6
        assert {version for sample in each["samples"] for version in sample.segments[0].versions if version >= 0} == {step}
    seeds = [tuple(r.sampling.seed for r in generators.requests if r.id.startswith(f"held_out/{step}/")) for step in range(3)]
    assert len(set(seeds)) == 1 and len(set(seeds[0])) == 6
