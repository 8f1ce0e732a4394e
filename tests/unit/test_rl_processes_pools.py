"""Pools of generators and of workers, on a virtual clock and without processes: nothing is lost when some of them die."""

from __future__ import annotations

import asyncio
import math

import numpy
import pytest
from intarsia import plugins
from intarsia.contracts import Limits, Media, Observation, StepResult, Task, ToolCall, ToolSpec, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import DistributedError, NumericsError, PluginError, UsageError
from intarsia_rl.contracts import Request, Sampling, WeightVersion
from intarsia_rl.given import finite, is_number, told
from intarsia_rl.processes.config import LeastLoadedConfig
from intarsia_rl.processes.environment_service import wrong_limits, wrong_observation
from intarsia_rl.processes.pools import GeneratorPool, Restarts, WorkerPool
from intarsia_rl.processes.routing import LeastLoaded
from intarsia_testing import rl_doubles
from intarsia_testing.rl_doubles import InProcessLauncher, Misbehaves, MisbehavesConfig, MisbehavingEpisode, ScriptedConfig
from intarsia_testing.rollout_doubles import published, run_virtually

DEADLY, STUCK = 62, 63


@pytest.fixture(autouse=True)
def entries(tmp_path, monkeypatch):
    plugins.use(rl_doubles.offered(tmp_path, monkeypatch))
    yield
    plugins.use(None)


@pytest.fixture
def recipe(monkeypatch):
    """The double reads no recipe."""
    monkeypatch.setattr("intarsia_rl.processes.generator_service.recipe_of", lambda plain, loaded: plain)
    return {}


def ask(number: int, first: int = 1, tokens: int = 20, **more) -> Request:
    return Request(f"r{number}", (first, 2, 3), Sampling(tokens, seed=number), **more)


async def pool_of(recipe, count=2, launcher=None, timeout_s=60.0, version=3, restarts=None, initial=False, **config):
    launcher = launcher or InProcessLauncher()
    settings = ScriptedConfig(token_s=0.1, deadly_id=DEADLY, stuck_id=STUCK, **config)
    pool = await GeneratorPool.start(
        launcher, settings, count, recipe, LeastLoaded(), timeout_s=timeout_s, restarts=restarts, initial=initial
    )
    if version is not None:
        await pool.update(published(version))
    return pool, launcher


def test_requests_go_where_there_is_room(recipe):
    async def main():
        pool, launcher = await pool_of(recipe)
        assert [process.name for process in launcher.started] == ["generator-0", "generator-1"]
        assert (pool.facts.name, pool.facts.capabilities, pool.version, pool.kills) == ("scripted", ("forced",), 3, 0)
        answers = await asyncio.gather(*(pool.generate(ask(number)) for number in range(10)))
        assert [answer.request for answer in answers] == [f"r{number}" for number in range(10)]
        assert {version for answer in answers for version in answer.versions} == {3}
        stats = await pool.stats()
        assert sorted(stats) == [0, 1]
        assert all(each.prompt_tokens == 15 and each.version == 3 for each in stats.values())
        totals = await pool.totals()
        assert totals.prompt_tokens == 30 and totals.generated_tokens == sum(len(answer.tokens) for answer in answers)
        await pool.close()
        assert all(process.stopped for process in launcher.started)
        with pytest.raises(DistributedError, match="stopped"):
            await pool.generate(ask(1))

    run_virtually(main())


def test_a_generator_that_dies_costs_time_only(recipe):
    async def main():
        pool, launcher = await pool_of(recipe)
        alone = [await pool.generate(ask(number)) for number in range(6)]
        told: dict[int, list[int]] = {number: [] for number in range(6)}
        requests = [asyncio.ensure_future(pool.generate(ask(number), told[number].extend)) for number in range(6)]
        await asyncio.sleep(0.55)
        assert any(told.values())
        launcher.started[1].die("it was ended by SIGKILL")
        answers = await asyncio.gather(*requests)
        assert [(answer.tokens, answer.log_probs) for answer in answers] == [(answer.tokens, answer.log_probs) for answer in alone]
        assert [tuple(tokens) for tokens in told.values()] == [answer.tokens for answer in answers]
        assert pool.kills == 1 and pool.deaths[0].name == "generator-1" and "SIGKILL" in pool.deaths[0].reason
        await asyncio.sleep(1.0)
        assert len(launcher.started) == 3
        assert sorted(await pool.stats()) == [0, 1]
        await pool.close()

    run_virtually(main())


def test_totals_never_fall(recipe):
    async def main():
        pool, launcher = await pool_of(recipe, count=1)
        for number in range(4):
            await pool.generate(ask(number))
            before = await pool.totals()
            launcher.started[-1].die("killed")
            await asyncio.sleep(10.0)
            after = await pool.totals()
            assert (after.generated_tokens, after.prompt_tokens) == (before.generated_tokens, before.prompt_tokens)
        assert after.prompt_tokens == 12 and pool.kills == 4
        await pool.close()

    run_virtually(main())


def test_all_dead_requests_wait_for_the_new_one_which_has_the_newest_weights_and_is_paused(recipe):
    async def main():
        pool, launcher = await pool_of(recipe, count=1)
        await pool.pause()
        request = asyncio.ensure_future(pool.generate(ask(1)))
        await asyncio.sleep(1.0)
        launcher.started[0].die("killed")
        await asyncio.sleep(0.01)
        update = asyncio.ensure_future(pool.update(published(4)))  # while there is none
        await asyncio.sleep(0.1)
        assert not update.done() and pool.version == 4
        await update
        assert launcher.started[1].service._generator.version == 4
        await asyncio.sleep(20.0)
        assert not request.done()
        assert (await pool.stats())[0].paused
        await pool.resume()
        assert set((await request).versions) == {4}
        await pool.close()

    run_virtually(main())


def test_requests_continue_across_an_update_or_are_finished_first(recipe):
    async def main():
        pool, _ = await pool_of(recipe)
        for version, in_flight in ((4, "continue"), (5, "drain")):
            request = asyncio.ensure_future(pool.generate(ask(version)))
            await asyncio.sleep(0.25)
            await pool.update(published(version), in_flight)
            versions = (await request).versions
            assert versions == ((3, 3) + (4,) * (len(versions) - 2) if in_flight == "continue" else (4,) * len(versions))
        with pytest.raises(UsageError, match="version 2 is older than 5, which the generators have"):
            await pool.update(published(2))
        await pool.close()

    run_virtually(main())


def test_weights_that_differ_from_what_was_published_are_told(recipe):
    async def main():
        pool, _ = await pool_of(recipe, bad_version=4)
        with pytest.raises(NumericsError, match="digests of `head` differ"):
            await pool.update(published(4))
        await pool.close()

    run_virtually(main())


def test_a_restart_takes_the_weights_that_came_while_it_took_others(recipe):
    """The version that it began to take is gone when it asks for it: only the newest counts."""

    async def main():
        pool, launcher = await pool_of(recipe, count=2)
        asked: list[int] = []

        async def update(self, weights: WeightVersion, in_flight):
            asked.append(weights.version)
            await asyncio.sleep(5.0)
            if weights.version == 3 and len(asked) == 1:
                raise UsageError("version 3 is gone")
            self._generator.version = weights.version

        service = type(launcher.started[0].service)
        old, service.update = service.update, update
        try:
            launcher.started[0].die("killed")
            await asyncio.sleep(1.0)
            assert asked == [3]
            await pool.update(published(4))
            assert sorted(asked) == [3, 4, 4]
            assert [process.service._generator.version for process in launcher.started[1:]] == [4, 4]
        finally:
            service.update = old
        await pool.close()

    run_virtually(main())


def test_a_restart_during_a_long_drain_takes_the_newest_version_where_the_drained_one_is_gone(recipe):
    """Transports keep few versions: what one generator still drains for, another cannot read any more, however often it is restarted."""

    async def main():
        pool, launcher = await pool_of(recipe, count=2, restarts=Restarts(limit=2))
        kept, asked = [3, 4], []

        async def update(self, weights: WeightVersion, in_flight):
            asked.append(weights.version)
            await asyncio.sleep(50.0 if in_flight == "drain" else 1.0)
            if weights.version not in kept:
                raise DistributedError(f"version {weights.version} is not kept any more")
            self._generator.version = weights.version

        service = type(launcher.started[0].service)
        old, service.update = service.update, update
        try:
            drain = asyncio.ensure_future(pool.update(published(4), "drain"))
            await asyncio.sleep(1.0)
            kept[:] = [8, 9]
            pool.announce(published(8))
            pool.announce(published(9))
            launcher.started[1].die("killed")
            await asyncio.sleep(30.0)
            assert asked == [4, 4, 9] and pool.kills == 1 and not drain.done()
            assert launcher.started[2].service._generator.version == 9 and pool.version == 4
            with pytest.raises(DistributedError, match="version 4 is not kept"):
                await drain
            await pool.update(published(9))
            assert asked == [4, 4, 9, 9] and pool.version == 9
        finally:
            service.update = old
        await pool.close()

    run_virtually(main())


def test_initial_generators_begin_with_version_0_also_when_restarted(recipe):
    async def main():
        pool, launcher = await pool_of(recipe, count=1, initial=True, version=None)
        assert set((await pool.generate(ask(1))).versions) == {0}
        launcher.started[0].die("killed")
        forced = await pool.generate(ask(2, tokens=3, forced=(5, 6, 7)))
        assert (forced.tokens, forced.versions) == ((5, 6, 7), (0, 0, 0))
        await pool.close()

    run_virtually(main())


def test_what_can_never_be_served_is_told(recipe):
    async def main():
        pool, _ = await pool_of(recipe, version=None)
        with pytest.raises(UsageError, match="no weights yet"):
            await pool.generate(ask(1))
        await pool.update(published(0))
        with pytest.raises(UsageError, match=r"holds \[99\], and ids go from 0 to 63"):
            await pool.generate(ask(1, first=99))
        await pool.close()

    run_virtually(main())


def test_a_generator_that_cannot_be_built_says_why_at_once(recipe):
    async def main():
        launcher = InProcessLauncher()
        with pytest.raises(UsageError, match="no GPU of that kind"):
            await pool_of(recipe, count=3, launcher=launcher, fails="no GPU of that kind")
        launcher.refuse.append(PluginError("generator-1 cannot start: plugin acme is missing"))
        with pytest.raises(PluginError, match="acme is missing"):
            await pool_of(recipe, count=3, launcher=launcher)
        assert all(process.stopped for process in launcher.started)

    run_virtually(main())


def test_a_request_that_kills_generators_is_given_up(recipe, monkeypatch):
    async def main():
        pool, launcher = await pool_of(recipe, restarts=Restarts(limit=20))

        service = type(launcher.started[0].service)
        old = service.generate

        async def generate(self, request, tell):
            if request.tokens[0] == DEADLY:
                await asyncio.sleep(0.1)
                next(process for process in launcher.started if process.service is self).die("it ended with exit code 7")
                await asyncio.sleep(1.0)
            return await old(self, request, tell)

        monkeypatch.setattr(service, "generate", generate)
        innocent = [asyncio.ensure_future(pool.generate(ask(number))) for number in range(10, 20)]
        with pytest.raises(
            EnvironmentFailure, match=r"^model: request 'r1' was with 4 generators .*exit code 7.*not tried again"
        ) as caught:
            await pool.generate(ask(1, first=DEADLY))
        assert [answer.request for answer in await asyncio.gather(*innocent)] == [f"r{number}" for number in range(10, 20)]
        await asyncio.sleep(0.1)
        assert not caught.value.retry and pool.kills == 4
        assert (await pool.generate(ask(2))).tokens
        await pool.close()

    run_virtually(main())


def test_too_many_deaths_end_it_with_the_reasons(recipe):
    async def main():
        pool, launcher = await pool_of(recipe, count=1, restarts=Restarts(limit=3, first_s=1.0, most_s=3.0))
        request = asyncio.ensure_future(pool.generate(ask(1, tokens=4000, first=STUCK)))
        begin = asyncio.get_running_loop().time()
        for number in range(4):
            await asyncio.sleep(0.01)
            while len(launcher.started) == number:
                await asyncio.sleep(0.01)
            launcher.started[number].die(f"death {number}")
            if number == 3:
                break
        with pytest.raises((DistributedError, EnvironmentFailure)):
            await request
        with pytest.raises(DistributedError, match=r"(?s)generator died 4 times in .*death 3"):
            await pool.generate(ask(2))
        with pytest.raises(DistributedError, match="death 0"):
            await pool.update(published(9))
        assert 6.0 <= asyncio.get_running_loop().time() - begin < 7.0  # waited 1, 2 and 3 seconds
        await pool.close()

    run_virtually(main())


def test_a_restart_that_fails_is_tried_again(recipe):
    async def main():
        pool, launcher = await pool_of(recipe, count=1)
        launcher.refuse += [DistributedError("no port"), DistributedError("no memory")]
        launcher.started[0].die("killed")
        assert (await pool.generate(ask(1))).tokens
        assert [death.reason for death in pool.deaths] == [
            "killed",
            "could not be started again: no port",
            "could not be started again: no memory",
        ]
        await pool.close()

    run_virtually(main())


def test_a_generator_that_moves_nothing_is_replaced(recipe):
    async def main():
        pool, launcher = await pool_of(recipe, count=2, timeout_s=30.0)
        with pytest.raises(EnvironmentFailure, match=r"model: .* moved"):
            await asyncio.wait_for(pool.generate(ask(1, first=STUCK)), 1000)
        assert pool.kills == 4 and "nothing moved in 30 s, with 1 request" in pool.deaths[0].reason
        assert sum(process.stopped for process in launcher.started) == 4
        await pool.close()

    run_virtually(main())


def test_a_paused_or_idle_or_slow_generator_is_left_alone(recipe):
    async def main():
        pool, _ = await pool_of(recipe, count=1, timeout_s=30.0)
        await asyncio.sleep(500.0)
        slow = asyncio.ensure_future(pool.generate(ask(1, tokens=1000, forced=(5,) * 1000)))  # 100 s
        await slow
        await pool.pause()
        waiting = asyncio.ensure_future(pool.generate(ask(2)))
        await asyncio.sleep(500.0)
        assert pool.kills == 0 and not waiting.done()
        await pool.resume()
        await waiting
        await pool.close()

    run_virtually(main())


def test_a_generator_that_does_not_say_how_it_is_is_replaced(recipe, monkeypatch):
    async def main():
        pool, launcher = await pool_of(recipe, count=1, timeout_s=30.0)

        async def stats():
            await asyncio.sleep(1e6)

        monkeypatch.setattr(launcher.started[0].service, "stats", stats)
        await asyncio.sleep(100.0)
        assert pool.kills == 1 and "did not say how it is for 30 s" in pool.deaths[0].reason
        assert (await pool.generate(ask(1))).tokens
        await pool.close()

    run_virtually(main())


def test_a_cancelled_request_is_aborted_there(recipe):
    async def main():
        pool, _ = await pool_of(recipe, count=1)
        request = asyncio.ensure_future(pool.generate(ask(1, tokens=1000, forced=(5,) * 1000)))
        await asyncio.sleep(1.0)
        assert (await pool.stats())[0].running == 1
        request.cancel()
        await asyncio.sleep(0.1)
        assert (await pool.stats())[0].running == 0
        aborted = asyncio.ensure_future(pool.generate(ask(2, tokens=1000, forced=(5,) * 1000)))
        await asyncio.sleep(1.0)
        await pool.abort(["r2", "r77"])
        assert (await aborted).finish == "abort"
        await pool.close()

    run_virtually(main())


def test_a_generators_own_bug_is_a_failure_of_the_model(recipe, monkeypatch):
    async def main():
        pool, launcher = await pool_of(recipe, count=1)

        async def generate(request, on_tokens=None):
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(launcher.started[0].service._generator, "generate", generate)
        with pytest.raises(EnvironmentFailure, match="model: RuntimeError: CUDA out of memory"):
            await pool.generate(ask(1))
        await pool.close()

    run_virtually(main())


def test_least_loaded():
    routing = LeastLoaded(LeastLoadedConfig())
    assert routing.choose(ask(1), {3: 2, 1: 1, 2: 1}) == 1
    assert routing.choose(ask(1), {7: 9}) == 7


# ---------------------------------------------------------------- workers


async def workers_of(count=2, launcher=None, timeout_s=30.0, restarts=None, **config):
    launcher = launcher or InProcessLauncher()
    return await WorkerPool.start(launcher, MisbehavesConfig(**config), count, timeout_s=timeout_s, restarts=restarts), launcher


def task_that(**deeds: str) -> Task:
    return Task("train/x", deeds)


ACTION = Turn("assistant", "a", (1, 2))


def test_an_episode_and_its_scores():
    async def main():
        pool, launcher = await workers_of(tasks=5000)
        facts = pool.environment_facts()
        assert (facts.limits.turns, facts.rubrics) == (3, {"length": 0.5}) and pool.limits == facts.limits
        tasks = await pool.tasks("train")
        assert [task.id for task in tasks] == [f"train/{number}" for number in range(5000)]
        assert await pool.tasks("train") is tasks
        with pytest.raises(UsageError, match=r"no split 'trian'.*Did you mean 'train'"):
            await pool.tasks("trian")
        episode = pool.episode(tasks[0], 7)
        assert (await episode.reset()).turns[0].content.startswith("question 7 ")
        result = await episode.step(ACTION)
        assert (result.reward, result.ended, result.observation.turns[0].content) == (1.0, True, "yes")
        await episode.close()
        await episode.close()
        scores = await pool.score(tasks[0], [(ACTION,), (ACTION, ACTION)])
        assert (scores.values, scores.weights) == ({"length": (1.0, 2.0)}, {"length": 0.5})
        assert [process.service._episodes for process in launcher.started] == [{}, {}]
        with pytest.raises(UsageError, match="before `close`"):
            await episode.step(ACTION)
        with pytest.raises(UsageError, match="once"):
            await episode.reset()
        await pool.close()

    run_virtually(main())


def test_two_tasks_of_one_id_are_refused_with_both_places(monkeypatch):
    twice = [Task("a", {}), Task("b", {}), Task("c", {}), Task("b", {"other": 1})]
    monkeypatch.setattr("intarsia_testing.rl_doubles.Misbehaves.tasks", lambda self, split: twice)

    async def main():
        pool, _ = await workers_of()
        with pytest.raises(UsageError, match=r"two tasks of the id 'b' in its split 'train': numbers 1 and 3"):
            await pool.tasks("train")
        await pool.close()

    run_virtually(main())


FAILURES = {
    "raise": (r"environment: step: KeyError: 'the key' \(.*rl_doubles.py:\d+\)", False),
    "system": ("environment: step: ConnectionRefusedError: nobody listens", True),
    "fail": ("tool: the tool is broken$", True),
    "leave": ("environment: step: SystemExit: enough", False),
    "hang": ("environment: step: no answer of environment-0 in 30", True),
    "nan": ("environment: step gave the reward nan, which is no finite number", False),
    "object": (r"value.metrics\['what'\] is a builtins.object, which cannot be sent to another process.$", False),
    "text": ("environment: step gave the reward 'high' of type str, which is no finite number", False),
    "class": ("environment: step gave a dict, which is no StepResult", False),
    "nothing": ("environment: step neither ended the episode nor observed anything", False),
}


@pytest.mark.parametrize("deed", FAILURES)
def test_whatever_goes_wrong_is_a_failure_with_its_words(deed):
    async def main():
        pool, _ = await workers_of()
        words, retry = FAILURES[deed]
        episode = pool.episode(task_that(do=deed), 0)
        await episode.reset()
        with pytest.raises(EnvironmentFailure, match=words) as caught:
            await episode.step(ACTION)
        assert caught.value.retry is retry
        await episode.close()
        other = pool.episode(task_that(), 0)
        await other.reset()
        assert (await other.step(ACTION)).reward == 1.0
        await other.close()
        assert pool.kills == 0
        await pool.close()

    run_virtually(main())


@pytest.mark.parametrize("deed", ["raise", "hang", "class"])
def test_reset_fails_as_step_does(deed):
    async def main():
        pool, launcher = await workers_of(count=1)
        episode = pool.episode(task_that(do_reset=deed), 0)
        with pytest.raises(EnvironmentFailure, match="reset"):
            await episode.reset()
        await episode.close()
        assert launcher.started[0].service._episodes == {}
        await pool.close()

    run_virtually(main())


def test_closing_never_fails(caplog):
    async def main():
        pool, launcher = await workers_of(count=1)
        for deed in ("raise", "hang"):
            episode = pool.episode(task_that(do_close=deed), 0)
            await episode.reset()
            await episode.close()
        assert "KeyError: 'the key'" in caplog.text and "no answer" in caplog.text
        episode = pool.episode(task_that(), 0)
        await episode.reset()
        launcher.started[0].die("killed")
        await episode.close()
        await pool.episode(task_that(), 0).close()
        await asyncio.sleep(2.0)
        assert pool._keeper.members[0].load == 0
        await pool.close()

    run_virtually(main())


def test_a_worker_that_dies_fails_its_episodes_which_may_be_tried_again():
    async def main():
        pool, launcher = await workers_of(count=2)
        episodes = [pool.episode(task_that(), seed) for seed in range(4)]
        for episode in episodes:
            await episode.reset()
        assert [len(process.service._episodes) for process in launcher.started] == [2, 2]
        launcher.started[0].die("it was ended by SIGKILL")
        lost = 0
        for episode in episodes:
            try:
                await episode.step(ACTION)
            except EnvironmentFailure as error:
                assert error.retry and error.boundary == "environment" and "SIGKILL" in str(error)
                lost += 1
            await episode.close()
        assert lost == 2 and pool.kills == 1
        await asyncio.sleep(1.0)
        assert len(launcher.started) == 3 and sorted(pool.processes) == [0, 1]
        await pool.close()

    run_virtually(main())


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("raise", "KeyError: 'the key'"),
        ("nan", "gave StepResult"),
        ("few", "gave .* for 2 episodes"),
        ("hang", "no answer"),
        ("fail", "tool"),
    ],
)
def test_what_a_rubric_does_wrong_is_a_failure_of_the_scorer(deed, words):
    async def main():
        pool, _ = await workers_of()
        with pytest.raises(EnvironmentFailure, match=words) as caught:
            await pool.score(task_that(do_score=deed), [(ACTION,), ()])
        assert caught.value.boundary == ("tool" if deed == "fail" else "scorer")
        await pool.close()

    run_virtually(main())


def test_scoring_is_repeated_where_the_worker_dies():
    async def main():
        pool, launcher = await workers_of()
        scoring = asyncio.ensure_future(pool.score(task_that(do_score="hang"), [()]))
        for death in range(3):
            await asyncio.sleep(1.0)
            busy = next(process for process in launcher.started if process._calls and not process._reason.done())
            busy.die(f"death {death}")
        with pytest.raises(EnvironmentFailure, match=r"scorer: scoring task 'train/x': .*death 2") as caught:
            await scoring
        assert caught.value.retry
        await pool.close()

    run_virtually(main())


def test_an_environment_that_cannot_be_built_says_why():
    async def main():
        with pytest.raises(PluginError, match=r"environment 'acme-rl-doubles:misbehaves'.* can't be built: ImportError: no such library"):
            await workers_of(fails="no such library")

    run_virtually(main())


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (Observation((Turn("user", None),)), "turn 0 of its observation with the content None"),  # type: ignore[arg-type]
        (Observation((Turn("user", ("text", 5)),)), "the content"),  # type: ignore[arg-type]
        (Observation((Turn("user", "a"), Turn("usr", "b"))), "turn 1 of its observation with the role 'usr'. Did you mean 'user'?"),  # type: ignore[arg-type]
        (Observation(("text",)), "a str as turn 0 of its observation"),  # type: ignore[arg-type]
        (Observation(None), "whose turns are a NoneType"),  # type: ignore[arg-type]
        (Observation((), tools=("add",)), "a str as a tool of its observation, and no ToolSpec"),  # type: ignore[arg-type]
        (Observation((), tools=None), "whose tools are a NoneType, and no tuple of ToolSpec"),  # type: ignore[arg-type]
        (Observation((), rewrites="no"), "whose rewrites is 'no'"),  # type: ignore[arg-type]
        (Observation((), next_actor=None), "whose next_actor is None, and no name"),  # type: ignore[arg-type]
        (Observation((), next_actor=""), "whose next_actor is ''"),
        (Observation((Turn("user", "a", tokens=(1, "b")),)), "turn 0 of its observation with tokens=(1, 'b'), and no tuple of int"),  # type: ignore[arg-type]
        (Observation((Turn("user", "a", tokens=5),)), "with tokens=5"),  # type: ignore[arg-type]
        (Observation((Turn("user", "a", tokens=""),)), "with tokens=''"),  # type: ignore[arg-type]
        (Observation((Turn("user", "a", tokens=numpy.array((1, 2))),)), "with tokens=array([1, 2]), and no tuple of int"),  # type: ignore[arg-type]
        (Observation((Turn("user", "a", tool_calls=("add",)),)), "with tool_calls=('add',), and no tuple of ToolCall"),  # type: ignore[arg-type]
        (Observation((Turn("user", (Media("image", 5),)),)), "a medium of the kind 'image' whose data are a int"),  # type: ignore[arg-type]
        (Observation((Turn("user", (Media("image", (b"",)),)),)), "a medium of the kind 'image' whose data are a tuple"),
        (Observation((Turn("user", (Media("sound", b""),)),)), "a medium of the kind 'sound'"),  # type: ignore[arg-type]
        (Observation((Turn("user", "a", tool_calls=(ToolCall("1", b"add", "{}"),)),)), "with tool_calls.0.name=b'add', which is no text"),  # type: ignore[arg-type]
        (Observation((Turn("user", "a", tool_calls=(ToolCall("1", "add", {"a": 1}),)),)), "tool_calls.0.arguments={'a': 1}"),  # type: ignore[arg-type]
        (Observation((Turn("tool", "a", tool_call_id=b"1"),)), "with tool_call_id=b'1', which is no text"),  # type: ignore[arg-type]
        (Observation((Turn("user", "a", actor=None),)), "with actor=None, which is no text"),  # type: ignore[arg-type]
        (Observation((Turn("user", (Media("image", b"", b"png"),)),)), "a medium of the kind 'image'"),  # type: ignore[arg-type]
        (Observation((), tools=(ToolSpec("add", None, {}),)), "name and description are texts"),  # type: ignore[arg-type]
        ("text", "which is no Observation"),
        (Observation((Turn("user", ("text", Media("image", b"", "image/png"))),)), None),
        (Observation((Turn("user", (Media("video", (b"", b"")), Media("video", "a.mp4"))),)), None),
        (Observation((Turn("assistant", "a", (1, 2), (ToolCall("1", "add", "{}"),)),)), None),
        (None, None),
    ],
)
def test_an_observation_that_breaks_its_contract_is_named(observation, words):
    found = wrong_observation(observation)
    assert found is None if words is None else words in (found or "")


def test_deaths_whose_cause_is_known_do_not_end_the_run_so_soon():
    async def main():
        pool, launcher = await workers_of(count=1, restarts=Restarts(limit=2, explained=5))

        async def die(at):
            member = (await pool._keeper.some())[0]
            member.at = at
            launcher.started[-1].die("killed")
            while pool._keeper.members.get(0) is member:
                await asyncio.sleep(0.1)

        for _ in range(5):
            await die("episode-1")
        for at in ("", None):
            await die(at)
        await pool._keeper.some()
        await die("")
        with pytest.raises(DistributedError, match=r"environment died 3 times"):
            await pool._keeper.some()
        await pool.close()

    run_virtually(main())


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(turns="3"), "turns='3' must be a whole number of at least 1, or None"),  # type: ignore[arg-type]
        (
            Limits(tokens=0, seconds=math.nan),
            "tokens=0 must be a whole number of at least 1, or None, seconds=nan must be a number above 0, or None",
        ),
        (Limits(tokens_per_turn=1.5, seconds_per_turn=0), "tokens_per_turn=1.5"),  # type: ignore[arg-type]
        ({"turns": 3}, "they are a dict, and no Limits"),
    ],
)
def test_limits_that_cannot_be_are_refused_at_the_start(limits, words, monkeypatch):
    real = Misbehaves.__init__

    def make(self, config):
        real(self, config)
        self.limits = limits

    monkeypatch.setattr(Misbehaves, "__init__", make)

    async def main():
        with pytest.raises(UsageError) as caught:
            await workers_of()
        assert f"The environment's limits cannot be: {words}" in str(caught.value)

    run_virtually(main())
    assert not wrong_limits(Limits()) and not wrong_limits(Limits(1, 1, 1, 0.5, 2))


def test_rubrics_that_are_none_are_told_with_the_environments_name(monkeypatch):
    monkeypatch.setattr(Misbehaves, "rubrics", lambda self: None)

    async def main():
        with pytest.raises(PluginError, match=r"environment '.*misbehaves': TypeError"):
            await workers_of()

    run_virtually(main())


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({1: 2.0}, "a metric with the name 1 of type int"),
        (None, "the metrics None"),
        ({"n": 1, "a": "b"}, "the metric 'a' as 'b' of type str"),
        ({"a": math.inf}, "the metric 'a' as inf"),
    ],
)
def test_metrics_are_finite_numbers_by_name(metrics, words, monkeypatch):
    async def step(self, action):
        return StepResult(None, reward=1.0, ended=True, metrics=metrics)

    monkeypatch.setattr(MisbehavingEpisode, "step", step)

    async def main():
        pool, _ = await workers_of()
        episode = pool.episode(task_that(), 0)
        await episode.reset()
        with pytest.raises(EnvironmentFailure, match=f"step gave {words}, and metrics are finite numbers by name"):
            await episode.step(ACTION)
        await episode.close()
        await pool.close()

    run_virtually(main())


@pytest.mark.parametrize("name", [7, None, ""])
def test_a_task_without_a_name_is_refused_with_its_place(name, monkeypatch):
    monkeypatch.setattr(Misbehaves, "tasks", lambda self, split: [Task("a", {}), Task(name, {})])

    async def main():
        pool, _ = await workers_of()
        with pytest.raises(UsageError, match=f"task number 1 of its split 'train', counted from 0, has the id {name!r}, and no name"):
            await pool.tasks("train")
        await pool.close()

    run_virtually(main())


@pytest.mark.parametrize("word", ["ended", "truncated"])
def test_whether_an_episode_has_ended_is_true_or_false(word, monkeypatch):
    async def step(self, action):
        return StepResult(None, **{"reward": 1.0, "ended": True, word: "no"})

    monkeypatch.setattr(MisbehavingEpisode, "step", step)

    async def main():
        pool, _ = await workers_of()
        episode = pool.episode(task_that(), 0)
        await episode.reset()
        with pytest.raises(EnvironmentFailure, match=f"step gave {word}='no', which is neither true nor false"):
            await episode.step(ACTION)
        await episode.close()
        await pool.close()

    run_virtually(main())


def test_numbers_of_environments():
    assert is_number(1) and is_number(-0.5)
    assert not any(map(is_number, (True, math.nan, math.inf, "1", None, 10**400)))
    assert finite(numpy.float32(0.5)) == 0.5 and finite(3) == 3.0
    assert [finite(each) for each in (math.nan, math.inf, "1", b"1", None, 10**400, [1.0])] == [None] * 7


def test_a_value_that_is_no_number_is_told_in_one_short_line():
    class Silent:
        def __repr__(self):
            raise KeyError("no words")

    assert [told(each) for each in (math.nan, None, "nan", True)] == ["nan", "None", "'nan' of type str", "True of type bool"]
    assert told(numpy.float32(0.5)) == "np.float32(0.5) of type float32"
    assert told(Silent()) == "what cannot be shown (KeyError) of type Silent"
    assert told(10**5000) == "what cannot be shown (ValueError) of type int"
    assert told("a" * 300) == f"'{'a' * 199} ... of type str"
    assert told(numpy.zeros((2, 2))) == "array([[0., 0.], [0., 0.]]) of type ndarray"


@pytest.mark.parametrize("score", ["high", None, math.nan])
def test_a_score_that_is_no_number_is_sent_as_what_it_is(score, monkeypatch):
    """It is one episode's failure; the others keep their scores."""
    monkeypatch.setattr(rl_doubles.MisbehavingRubric, "score", lambda self, task, episodes: answer([1, score]))

    async def answer(value):
        return value

    async def main():
        pool, _ = await workers_of()
        found = await pool.score(task_that(), [(ACTION,), ()])
        assert list(found.values.values()) == [(1.0, told(score))]
        await pool.close()

    run_virtually(main())
