"""The generator `local` cut over two processes keeps its promises, ends as a whole, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import chz
import pytest
from intarsia.config import Recipe
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_eager.config import WholeConfig
from intarsia_generation.engine.config import LocalConfig
from intarsia_rl import media
from intarsia_rl.contracts import Generator, GeneratorContext, ProcessDied, Request, Sampling
from intarsia_rl.processes.config import LocalProcessesConfig
from intarsia_rl.processes.plain import plain_config, plain_recipe
from intarsia_rl.processes.remote import RemoteGenerator
from intarsia_testing import GeneratorConformance

from tests.support.media import image
from tests.support.small_models import dense, recipe_of, seeing

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

CONFIG = LocalConfig(tensor=2, block=4, max_sequences=4, max_batch_tokens=24, max_tokens=80, device="cpu")


def recipe() -> Recipe:
    return recipe_of(dense(kv_heads=1, max_positions=128), sharder=WholeConfig(), kernels={"*": "reference"})


async def start(config: LocalConfig, context: GeneratorContext) -> Any:
    """The process of a generator."""
    arguments = {
        "config": plain_config(config, current()),
        "recipe": plain_recipe(context.recipe, current()),
        "invariant": context.invariant,
        "initial": context.initial,
        "index": context.index,
    }
    launcher = current().build(LocalProcessesConfig())
    return await launcher.start("generator", "intarsia_rl.processes.generator_service:serve", arguments, threads=1)


class Cut(GeneratorConformance):
    entry = "intarsia-generation:local"
    config = CONFIG
    new_tokens = 8
    process: Any = None

    def recipe(self) -> Recipe:
        return recipe()

    async def build(self, config: Any, context: GeneratorContext) -> Generator:
        type(self).process = await start(config, context)
        return await RemoteGenerator.connect(self.process)


def followers(parent: int) -> list[int]:
    """The ranks that a generator's process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            started_by = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if started_by == parent and "intarsia_generation.engine.follower" in words:
            found.append(int(folder.name))
    return found


def gone(process: int, within_s: float = 600.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_promises_are_kept_by_two_processes() -> None:
    """And the end of the second one, while tokens are computed, is the end of the generator, with the reason."""
    case = Cut()
    try:
        for promise in (
            case.test_completions_are_the_models,
            case.test_forced_tokens_are_scored,
            case.test_tokens_are_told_as_they_come,
            case.test_requests_continue_with_new_weights,
            case.test_requests_are_drained,
            case.test_torn_weights_are_never_served,
            case.test_pause_that_finishes,
            case.test_abort,
        ):
            promise()
        process = case.process
        (other,) = followers(process.pid)
        with pytest.raises(ProcessDied, match=r"Rank 1 of the 2 of this generator has ended \(SIGKILL, out of memory"):
            case.stage().run(killed_while_it_runs(case.stage().main(), other))
        assert gone(process.pid) and gone(other)
    finally:
        Cut.teardown_class()


def test_two_processes_see_what_one_sees() -> None:
    """An image that the border of a step cuts: the very tokens, and log-probabilities up to the rounding of sums over ranks."""
    run = seeing("qwen3_vl/debug")
    context = GeneratorContext(run, current(), initial=True)
    processor = media.processor_of(run.data, run.model, current())
    assert processor is not None
    shown = image(64, 96)
    ids = [*processor.tokenizer.encode("What is "), *processor.as_ids((shown,)), *processor.tokenizer.encode("?")]
    request = Request("one", tuple(ids), Sampling(8), media=media.placed(ids, [shown], processor))
    assert CONFIG.max_batch_tokens < len(ids) + 8 <= CONFIG.max_tokens

    async def ask(config: LocalConfig) -> Any:
        generator = await RemoteGenerator.connect(await start(config, context))
        try:
            assert "media" in generator.facts.capabilities
            return await generator.generate(request)
        finally:
            await generator.close()

    found, expected = asyncio.run(ask(CONFIG)), asyncio.run(ask(chz.replace(CONFIG, tensor=1)))
    assert found.tokens == expected.tokens and found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


async def killed_while_it_runs(generator: Any, victim: int) -> None:
    """Kill a process while a request runs; what the request comes to, or where it was over before the kill, the next one."""
    some = asyncio.Event()
    task = asyncio.ensure_future(generator.generate(Request("long", (5, 6, 7), Sampling(70, temperature=1.0)), lambda tokens: some.set()))
    await some.wait()
    os.kill(victim, signal.SIGKILL)
    await task
    await generator.generate(Request("later", (5, 6, 7), Sampling(70, temperature=1.0)))


def test_what_cannot_be_cut_is_said_where_the_generator_is_asked_for() -> None:
    """Both ranks find it; one error comes, with the role's own words."""
    few = recipe_of(dense(heads=1, kv_heads=1), sharder=WholeConfig())
    with pytest.raises(UsageError, match=r"(?s)generator\.tensor \(tp\) = 2: .*1 query heads, which tp=2 does not divide"):
        asyncio.run(start(CONFIG, GeneratorContext(few, current(), initial=True)))
