"""Whose turn it is in a process is told before it runs, also in what it starts, and never changes what it gives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from intarsia_rl.processes.following import WHO, follow


def run(main: Any) -> tuple[Any, list[str]]:
    """What a coroutine gives in a loop that is followed, and what was told."""
    told: list[str] = []

    async def followed() -> Any:
        follow(told.append)
        return await main()

    return asyncio.run(followed()), told


async def named(name: str, call: Any) -> Any:
    """Run something in a task of this name."""
    WHO.set(name)
    return await asyncio.ensure_future(call)


def test_each_stretch_is_told_with_its_end() -> None:
    async def two_stretches() -> int:
        await asyncio.sleep(0)
        return 7

    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.create_task(named(name, two_stretches())) for name in "ab"))

    found, told = run(main)
    assert found == [7, 7]
    assert told.count("a") == told.count("b") == 2 and told[1::2] == [""] * 4, "nothing runs within another's stretch"


def test_what_it_starts_runs_in_its_name() -> None:
    seen: list[str] = []

    async def inner(number: int) -> int:
        seen.append(told_last[0][-1])
        return number

    async def outer() -> list[int]:
        return await asyncio.gather(*map(inner, range(3)))

    told: list[str] = []
    told_last = [told]

    async def main() -> list[int]:
        follow(told.append)
        return await asyncio.create_task(named("a", outer()))

    assert asyncio.run(main()) == [0, 1, 2]
    assert seen == ["a"] * 3


def test_tasks_without_a_name_are_left_alone() -> None:
    async def main() -> int:
        return await asyncio.create_task(asyncio.sleep(0, 3))

    assert run(main) == (3, [])


def test_exceptions_and_cancellation_go_through() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def waits(cleaned: list[str]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cleaned.append("cancelled")
            raise

    async def main() -> list[str]:
        cleaned: list[str] = []
        with pytest.raises(KeyError):
            await asyncio.create_task(named("a", fails()))
        task = asyncio.create_task(named("b", waits(cleaned)))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(3):
            await asyncio.sleep(0)
        return cleaned

    found, told = run(main)
    assert found == ["cancelled"] and told[-1] == "" and told.count("b") == 2
