"""The clock and the scripted generator do what a test may rely on."""

from __future__ import annotations

import asyncio

import pytest
from intarsia.contracts import Turn
from intarsia_testing.clock import ManualClock
from intarsia_testing.environment_double import GuessEnvironment, ScriptedGenerator


def test_sleeping_moves_the_clock() -> None:
    clock = ManualClock(100.0)
    clock.sleep(2.5)
    clock.advance(1.0)
    assert (clock.time(), clock.monotonic(), clock.perf_counter(), clock.sleeps_s) == (103.5, 103.5, 103.5, [2.5])
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)


def test_who_waits_is_woken_in_order_and_not_before() -> None:
    async def scenario() -> list[str]:
        clock, woken = ManualClock(), []

        async def wait(name: str, seconds_s: float) -> None:
            await clock.sleep_async(seconds_s)
            woken.append(name)

        waiting = [asyncio.ensure_future(wait(name, seconds)) for name, seconds in (("late", 5.0), ("soon", 1.0), ("never", 60.0))]
        await asyncio.sleep(0)
        clock.advance(0.9)
        await asyncio.sleep(0)
        assert woken == []
        clock.advance(5.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting[2].cancel()
        return woken

    assert asyncio.run(scenario()) == ["soon", "late"]


def test_a_script_is_said_in_order_with_tokens_and_ends() -> None:
    generator = ScriptedGenerator(["one", Turn("assistant", "two", tokens=(9,))])
    question = (Turn("user", "?"),)
    assert asyncio.run(generator.generate(question)).tokens == tuple(b"one")
    assert generator.next(question).tokens == (9,)
    assert generator.histories == [question, question]
    with pytest.raises(AssertionError, match="2 turns and turn 3 was asked for"):
        generator.next(question)
    assert ScriptedGenerator(lambda history: history[-1].content).next(question).content == "?"  # type: ignore[return-value,arg-type]


def test_the_environments_sandbox_fails_at_its_turn() -> None:
    from intarsia.contracts.environment import EnvironmentFailure

    environment = GuessEnvironment(fail_at=2)

    async def play() -> None:
        episode = environment.episode(environment.tasks("train")[0], 0)
        await episode.reset()
        await episode.step(Turn("assistant", "x"))
        with pytest.raises(EnvironmentFailure, match="sandbox: the sandbox is gone"):
            await episode.step(Turn("assistant", "x"))
        await episode.close()

    asyncio.run(play())
    assert environment.episodes[0].closed == 1
