"""The generator `local` in a process of its own keeps its promises through calls, messages and shared memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from intarsia.config import Recipe
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_eager.config import WholeConfig
from intarsia_generation.engine.config import LocalConfig
from intarsia_rl.contracts import Generated, Generator, GeneratorContext
from intarsia_rl.processes.config import LocalProcessesConfig
from intarsia_rl.processes.plain import plain_config, plain_recipe
from intarsia_rl.processes.remote import RemoteGenerator
from intarsia_testing import GeneratorConformance

from tests.support.small_models import dense, recipe_of


class Remote(GeneratorConformance):
    entry = "intarsia-generation:local"
    config = LocalConfig(block=4, max_sequences=4, max_batch_tokens=24, max_tokens=80, device="cpu")
    new_tokens = 12
    draws = 100
    service = "intarsia_rl.processes.generator_service:serve"

    def recipe(self) -> Recipe:
        return recipe_of(dense(max_positions=128), sharder=WholeConfig(), kernels={"*": "reference"})

    async def build(self, config: Any, context: GeneratorContext) -> Generator:
        arguments = {
            "config": plain_config(config, current()),
            "recipe": plain_recipe(context.recipe, current()),
            "invariant": context.invariant,
            "initial": context.initial,
            "index": context.index,
        }
        launcher = current().build(LocalProcessesConfig())
        process = await launcher.start("generator", self.service, arguments, threads=1)
        return await RemoteGenerator.connect(process)


def test_promises_are_kept_in_another_process() -> None:
    case = Remote()
    try:
        for promise in (
            case.test_completions_are_the_models,
            case.test_forced_tokens_are_scored,
            case.test_tokens_are_told_as_they_come,
            case.test_requests_continue_with_new_weights,
            case.test_requests_are_drained,
            case.test_versions_do_not_go_back,
            case.test_torn_weights_are_never_served,
            case.test_pause_that_finishes,
            case.test_abort,
            case.test_impossible_requests_are_usage_errors,
            case.test_closing,
        ):
            promise()
    finally:
        Remote.teardown_class()


def test_what_runs_as_it_is_closed_ends_as_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tokens that it has, as the generator in its process ends it, and not with the end of that process."""
    monkeypatch.setattr(Remote, "service", "intarsia_testing.rl_doubles:serve_until_a_token")
    case = Remote()

    async def closed() -> Generated:
        some = asyncio.Event()
        request = case.request(case.prompts()[0], max_tokens=30)
        task = asyncio.ensure_future(generator.generate(request, lambda tokens: some.set()))
        await some.wait()
        await asyncio.gather(generator.close(), generator.close())
        return await task

    try:
        generator = case.stage().fresh(1)
        result = case.stage().run(closed())
        assert (result.finish, len(result.tokens)) == ("abort", 1)
        with pytest.raises(UsageError, match="was closed: it takes no `stats`"):
            case.stage().run(generator.stats())
    finally:
        Remote.teardown_class()
