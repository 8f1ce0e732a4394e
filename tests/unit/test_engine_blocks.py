"""Blocks and the plan of a step, without a model: who gets what, what is shared, who gives up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from intarsia.errors import UsageError
from intarsia_generation.engine.blocks import BlockPool, name_of, root
from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.request import Job
from intarsia_generation.engine.scheduler import Scheduler
from intarsia_rl.contracts import Request, Sampling


def job(name: str, tokens: Any, arrival: int = 0, max_tokens: int = 8, priority: int = 0, forced: tuple[int, ...] = ()) -> Job:
    request = Request(name, tuple(tokens), Sampling(max_tokens), forced, priority=priority)
    return Job(request, arrival, None, lambda result: None)


def advance(scheduler: Scheduler, **settings: Any) -> dict[str, tuple[int, int, bool]]:
    """Plan a step and pretend to compute it: every request that is at its end decides token 7."""
    chunks = scheduler.plan(**settings)
    for chunk in chunks:
        each = chunk.job
        while each.finish is None and each.decided - 1 < each.computed:
            each.take(7, -1.0, 0)
        if each.finish is not None:
            scheduler.remove(each)
    return {chunk.job.request.id: (chunk.start, chunk.end, chunk.decode) for chunk in chunks}


def scheduler(count: int = 32, size: int = 4, sequences: int = 4, budget: int = 16, prefix_cache: bool = True) -> Scheduler:
    made = Scheduler(BlockPool(count, size), sequences, budget, prefix_cache)
    made.set_version(0)
    return made


def test_blocks_are_shared_released_and_found_again():
    pool = BlockPool(3, 2)
    first, second = pool.take(), pool.take()
    assert first and second and first != second and (pool.used, pool.available) == (2, 1)
    name = name_of(root(0), (1, 2))
    pool.name(first, name)
    assert pool.find(name) == first and pool.find(name_of(root(1), (1, 2))) is None
    pool.share(first)
    pool.release([first, second])
    assert pool.used == 1 and not pool.is_free(first)
    pool.release([first])
    assert pool.used == 0 and pool.find(name) == first  # free, and what it holds is still there
    pool.share(first)
    assert pool.used == 1
    assert {pool.take(), pool.take()} == {1, 2, 3} - {first} and pool.take() is None


def test_what_was_released_longest_ago_is_forgotten_first_and_ends_before_beginnings():
    pool = BlockPool(4, 1)
    names = []
    for token in range(4):
        block = pool.take()
        names.append(name_of(names[-1] if names else root(0), (token,)))
        pool.name(block, names[-1])
    pool.release([1, 2])
    pool.release([3, 4])
    assert [pool.take() for _ in range(4)] == [2, 1, 4, 3]
    assert not any(pool.find(name) for name in names)


def test_equal_names_are_one_block_and_forgetting_keeps_what_is_in_use():
    pool = BlockPool(4, 1)
    one, other = pool.take(), pool.take()
    name = name_of(root(0), (5,))
    pool.name(one, name)
    pool.name(other, name)
    assert pool.named == 1 and pool.find(name) == one
    pool.release([other])
    pool.forget()
    assert pool.find(name) is None and pool.used == 1 and pool.available == 3
    pool.release([one])
    assert pool.available == 4 and len({pool.take() for _ in range(4)}) == 4


def test_a_prompt_is_read_in_pieces_beside_those_that_go_on():
    made = scheduler(budget=10)
    made.add(job("short", range(3)))
    made.add(job("long", range(100, 120), 1))
    assert advance(made) == {"short": (0, 3, False), "long": (0, 7, False)}
    assert advance(made) == {"short": (3, 4, True), "long": (7, 16, False)}
    assert advance(made) == {"short": (4, 5, True), "long": (16, 20, False)}
    assert advance(made) == {"short": (5, 6, True), "long": (20, 21, True)}


def test_requests_of_one_prompt_share_its_full_blocks_in_the_very_same_step():
    made = scheduler(budget=64)
    for number in range(3):
        made.add(job(str(number), range(10), number))
    assert advance(made) == {"0": (0, 10, False), "1": (8, 10, False), "2": (8, 10, False)}
    first, second, _ = made.running
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert [each.cached_tokens for each in made.running] == [0, 8, 8]
    made.set_version(1)
    assert not made.running and [each.request.id for each in made.waiting] == ["0", "1", "2"] and made.pool.used == 0
    assert advance(made)["0"][0] == 0


def test_what_was_generated_is_found_by_the_next_turn():
    made = scheduler(budget=64)
    first = job("turn 1", range(5), max_tokens=6)
    made.add(first)
    while first.finish is None:
        advance(made)
    assert first.tokens == [0, 1, 2, 3, 4, *[7] * 6]
    made.add(job("turn 2", [*first.tokens, 50, 51], 1))
    assert advance(made) == {"turn 2": (8, 13, False)}  # the 11th token was never computed, so that the third block was never full


def test_the_token_before_the_first_undecided_one_is_always_computed():
    made = scheduler(budget=64)
    made.add(job("one", range(8), max_tokens=1))
    assert advance(made) == {"one": (0, 8, False)}
    made.add(job("same", range(8), 1))
    assert advance(made)["same"] == (4, 8, False)
    scored = job("scored", range(4), 2, forced=(4, 5, 6, 7), max_tokens=4)
    made.add(scored)
    # Of its 8 tokens the last is never computed, and log-probabilities are wanted from the fourth on.
    assert advance(made)["scored"] == (0, 7, False) and scored.finish == "length"


def test_the_last_gives_up_its_blocks_and_comes_again():
    made = scheduler(count=5, size=2, budget=32)
    jobs = [job(name, (ord(name), 1, 2), number, max_tokens=6) for number, name in enumerate("abc")]
    for each in jobs:
        made.add(each)
    assert set(advance(made)) == {"a", "b"}  # the third finds too few blocks
    seen = [advance(made) for _ in range(20)]
    assert made.preemptions > 0 and all(each.finish == "length" and len(each.log_probs) == 6 for each in jobs)
    assert made.pool.used == 0 and not made.running and not made.waiting
    last_of = {name: max(number for number, step in enumerate(seen) if name in step) for name in "abc"}
    assert last_of["a"] < last_of["b"] < last_of["c"]


def test_draining_lets_those_go_on_that_had_begun():
    made = scheduler(count=5, size=2, budget=32)
    jobs = [job(name, (ord(name), 1, 2), number, max_tokens=6) for number, name in enumerate("ab")]
    for each in jobs:
        made.add(each)
    while not made.preemptions:
        advance(made)
    made.add(job("late", (9,), 5))
    while made.begun:
        assert "late" not in advance(made, admit=False)
    assert all(each.finish for each in jobs) and [each.request.id for each in made.waiting] == ["late"]


def test_priorities_then_arrival_and_nobody_overtakes_who_needs_more():
    made = scheduler(sequences=2, budget=64)
    for number, (name, priority) in enumerate([("p1", 1), ("p0", 0), ("p1 later", 1), ("p0 later", 0)]):
        made.add(job(name, (number,), number, priority=priority))
    assert list(advance(made)) == ["p0", "p0 later"]
    narrow = scheduler(count=8, size=2, sequences=8, budget=64)
    narrow.add(job("first", range(8), 0, max_tokens=2))
    narrow.add(job("large", range(50, 60), 1))
    narrow.add(job("small", (1,), 2))
    assert list(advance(narrow)) == ["first"]  # the small one would fit, and would keep the large one waiting for ever


@pytest.mark.parametrize("seed", range(8))
def test_any_load_ends_and_leaves_nothing(seed):
    drawn = random.Random(seed)
    made = scheduler(count=drawn.randint(10, 24), size=drawn.choice([1, 2, 4]), sequences=drawn.randint(1, 6), budget=drawn.randint(7, 20))
    room = made.pool.count * made.pool.size
    jobs = []
    for number in range(30):
        length = drawn.randint(1, room - 2)
        tokens = [drawn.randint(0, 1) for _ in range(length)]
        jobs.append(job(str(number), tokens, number, max_tokens=drawn.randint(1, room - length), priority=drawn.randint(0, 2)))
    waiting = list(jobs)
    for step in range(20000):
        if waiting and drawn.random() < 0.5:
            made.add(waiting.pop())
        if drawn.random() < 0.02 and made.running:
            made.set_version(step)
        advance(made)
        held: dict[int, int] = {}
        for each in made.running:
            assert len(each.blocks) * made.pool.size >= each.computed and each.row >= 0
            for block in each.blocks:
                held[block] = held.get(block, 0) + 1
        assert made.pool.used == len(held) and len({each.row for each in made.running}) == len(made.running) <= made.sequences
        if not waiting and not made.running and not made.waiting:
            break
    assert all(each.finish == "length" for each in jobs) and made.pool.used == 0


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UsageError, match="max_batch_tokens = 8 must be above"):
        LocalConfig(max_batch_tokens=8, max_sequences=8)
    with pytest.raises(UsageError, match=r"generator\.block is 0"):
        LocalConfig(block=0)
