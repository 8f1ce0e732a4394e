"""The kit says which promise is broken, for generators that break one each; first of all stale caches of every sort."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from intarsia.config import Recipe
from intarsia.contracts import Media
from intarsia_eager.config import WholeConfig
from intarsia_generation.engine import chosen, engine, request, scheduler
from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.generator import LocalGenerator
from intarsia_rl.contracts import Generated, Generator, PlacedMedia, Request, Sampling
from intarsia_testing import GeneratorConformance
from intarsia_testing.generator_double import CACHES, CachingGenerator, weights

from tests.support.small_models import dense, recipe_of


class Kit(GeneratorConformance):
    entry = "intarsia-generation:local"
    config = LocalConfig(block=4, max_sequences=6, max_batch_tokens=24, device="cpu")
    new_tokens = 8

    def recipe(self) -> Recipe:
        return recipe_of(dense(max_positions=128), sharder=WholeConfig(), kernels={"*": "reference"})


@pytest.fixture
def kit() -> Iterator[Kit]:
    yield Kit()
    Kit.teardown_class()


def says(kit: Any, test: str, promise: str) -> None:
    """The test fails, and says that `promise` is broken."""
    with pytest.raises(pytest.fail.Exception, match=f"promise `{promise}` is broken: "):
        getattr(kit, test)()


# ---------------------------------------------------------------- three caches


class Alone(Kit):
    """The kit's comparison without its stage."""

    def all_of(self, generator: Generator, requests: Sequence[Request]) -> list[Generated]:
        async def work() -> list[Generated]:
            return [await generator.generate(request) for request in requests]

        return asyncio.run(work())


SHOWN = (PlacedMedia(Media("image", b"a"), 0), PlacedMedia(Media("image", b"b"), 1))
SUBSETS = [stale for count in range(len(CACHES) + 1) for stale in itertools.combinations(CACHES, count)]


@pytest.mark.parametrize("stale", SUBSETS, ids=lambda stale: " ".join(stale) or "none")
def test_whichever_cache_outlives_its_weights_is_found(stale: tuple[str, ...]) -> None:
    """Prefix, encoder and media: the same prompts before and after an update equal a fresh generator's exactly when every cache is keyed by version."""
    generator, fresh, case = CachingGenerator(stale=stale), CachingGenerator(), Alone()
    asyncio.run(generator.update(weights(1, seed=5)))
    requests = [Request(str(n), tokens, Sampling(4, temperature=0.0), media=SHOWN) for n, tokens in enumerate([(1, 2, 3), (7,), (1, 2, 9)])]
    case.all_of(generator, requests)
    assert all(generator.hits.values())
    for one in (generator, fresh):
        asyncio.run(one.update(weights(2, seed=6)))
    if not stale:
        case.against_fresh(generator, fresh, requests)
        return
    with pytest.raises(pytest.fail.Exception, match="promise `caches belong to a version` is broken"):
        case.against_fresh(generator, fresh, requests)


# ---------------------------------------------------------------- the embedded generator, spoilt


def test_stale_prefixes(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(self: scheduler.Scheduler, version: int) -> None:
        for job in list(self.running):
            self.put_back(job)

    monkeypatch.setattr(scheduler.Scheduler, "set_version", stay)
    says(kit, "test_after_an_update_it_is_a_fresh_one", "caches belong to a version")


def test_mixed_caches_of_running_requests(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.Scheduler, "set_version", lambda self, version: self.pool.forget())
    says(kit, "test_requests_continue_with_new_weights", "log-probabilities are the model's")


def test_blocks_named_by_their_own_tokens_alone(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "name_of", lambda parent, tokens, shown: repr(tokens).encode())
    says(kit, "test_a_known_prefix_changes_nothing", "log-probabilities are the model's")


def test_a_stream_of_numbers_for_all(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = random.Random(0)
    monkeypatch.setattr(request, "stream_of", lambda sampling, prompt: shared)
    says(kit, "test_a_batch_is_each_alone", "results are of the request alone")


def test_log_probabilities_of_what_was_drawn_from(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(model: Any, hidden: Any, rows: Any) -> Any:
        tokens, log_probs = chosen.decide(model, hidden, rows)
        return tokens, [value * 0.999 for value in log_probs]

    monkeypatch.setattr(engine, "decide", halved)
    says(kit, "test_completions_are_the_models", "log-probabilities are the model's")
    says(kit, "test_forced_tokens_are_scored", "log-probabilities are the model's")


def test_weights_that_go_back(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Engine, "update", lambda self, weights: (self._fill(weights), self.begin(weights.version)))
    says(kit, "test_versions_do_not_go_back", "versions do not go back")


def test_torn_weights(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: engine.Engine, weights: Any) -> None:
        with contextlib.suppress(Exception):
            self._fill(weights)
        self.begin(weights.version)

    monkeypatch.setattr(engine.Engine, "update", careless)
    says(kit, "test_torn_weights_are_never_served", "torn weights")


def test_stop_rules_and_pauses(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: LocalGenerator, keep: bool = True) -> None:
        return None

    monkeypatch.setattr(request.Job, "_stops", lambda self, token: None)
    monkeypatch.setattr(LocalGenerator, "pause", nothing)
    monkeypatch.setattr(Kit, "new_tokens", 60)
    says(kit, "test_stop_ids_and_texts", "stop ids")
    says(kit, "test_pause_and_resume", "pause")
    says(kit, "test_pause_that_finishes", "pause")


def test_priorities_and_unfinished_business(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request.Job, "order", property(lambda self: (0, self.arrival)))
    monkeypatch.setattr(engine.Engine, "drop", lambda self, job: None)
    monkeypatch.setattr(Kit, "new_tokens", 40)
    monkeypatch.setattr(Kit, "patience_s", 1.0)
    says(kit, "test_lower_priority_numbers_are_served_earlier", "priority")
    says(kit, "test_cancelled_calls_leave_nothing", "cancelling")


@pytest.mark.parametrize("serves", [True, False], ids=["serves", "hangs"])
def test_requests_after_the_end(kit: Kit, monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    real = LocalGenerator.close

    async def close(self: LocalGenerator) -> None:
        if not serves:
            await real(self)
            self._closed = False
            kit.stage().timeout_s = 2.0  # of the next call, which nobody answers

    with monkeypatch.context() as patched:
        patched.setattr(LocalGenerator, "close", close)
        says(kit, "test_closing", "close")
