"""Long answers in pages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from intarsia.contracts import Task, Turn
from intarsia_rl.contracts import Routes, Sample, Segment
from intarsia_rl.processes.environment_service import EnvironmentService
from intarsia_rl.processes.pages import NUMBER_BYTES, pages, size_of
from intarsia_testing.rl_doubles import Misbehaves, MisbehavesConfig
from intarsia_testing.rollout_doubles import run_virtually


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_every_item_once_in_order_and_no_page_above_its_bound_but_for_a_single_item(sizes: list[int], most: int) -> None:
    items = ["x" * size for size in sizes]
    found = list(pages(items, most))
    assert [item for page in found for item in page] == items and found
    assert all(len(page) == 1 or sum(map(len, page)) <= most for page in found)
    assert all(sum(map(len, one)) + len(other[0]) > most for one, other in itertools.pairwise(found))


def test_what_weighs_in_a_sample_is_counted() -> None:
    routes = Routes(b"x" * 600, (3, 50, 2))
    segment = Segment((1, 2, 3), (False, True, True), (0.0, -1.0, -2.0), (-1, 0, 0), routes)
    sample = Sample("0/0", 0, 0, "train/0", (segment,), (Turn("tool", "y" * 1000),))
    assert 1600 + 12 * NUMBER_BYTES <= size_of(sample) < 1600 + 60 * NUMBER_BYTES
    assert size_of({"a": ["b" * 100, {"c": b"d" * 100}]}) == 202
    assert size_of([1, "b" * 100, (2.0, bytearray(100))]) == 200 + 2 * NUMBER_BYTES, "what stands behind a number"
    assert size_of([1, 2.0, True]) == 3 * NUMBER_BYTES


def test_tasks_that_carry_much_come_in_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand tasks of a megabyte each, with their tests say, are no single message."""
    tasks = [Task(f"train/{number}", {"tests": "x" * 3_000_000}) for number in range(7)]
    monkeypatch.setattr(Misbehaves, "tasks", lambda self, split: tasks)
    service = EnvironmentService(Misbehaves(MisbehavesConfig()), 1 << 20)

    async def read() -> list[int]:
        counts, more = [], True
        while more:
            page, more = await service.tasks("train", sum(counts), 2048)
            assert page == tasks[sum(counts) : sum(counts) + len(page)]
            counts.append(len(page))
        return counts

    assert run_virtually(read()) == [2, 2, 2, 1]
