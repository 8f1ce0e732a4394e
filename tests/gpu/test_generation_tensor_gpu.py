"""The generator `local` cut over two GPUs gives what one gives, of text and of images, whose features go from the first rank to the second over NCCL.

Run: pytest -m gpu tests/gpu/test_generation_tensor_gpu.py        (two GPUs)
"""

from __future__ import annotations

import asyncio
from typing import Any

import chz
import pytest
import torch
from intarsia.plugins import current
from intarsia_generation.engine.config import LocalConfig
from intarsia_rl import media
from intarsia_rl.contracts import GeneratorContext, Request, Sampling
from intarsia_rl.processes.config import LocalProcessesConfig
from intarsia_rl.processes.plain import plain_config, plain_recipe
from intarsia_rl.processes.remote import RemoteGenerator

from tests.support.media import image
from tests.support.small_models import seeing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

CONFIG = LocalConfig(tensor=2, block=16, max_sequences=4, max_batch_tokens=24, max_tokens=96, dtype="float32", device="cuda")


async def answers(config: LocalConfig, context: GeneratorContext, requests: list[Request]) -> list[Any]:
    arguments = {
        "config": plain_config(config, current()), "recipe": plain_recipe(context.recipe, current()), "invariant": False, "initial": True, "index": 0,
    }  # fmt: skip
    launcher = current().build(LocalProcessesConfig())
    generator = await RemoteGenerator.connect(
        await launcher.start("generator", "intarsia_rl.processes.generator_service:serve", arguments, threads=1)
    )
    try:
        return list(await asyncio.gather(*map(generator.generate, requests)))
    finally:
        await generator.close()


@pytest.mark.parametrize("name", ["qwen3_vl/debug", "qwen3_5/debug"])
def test_two_gpus_see_what_one_sees(name: str) -> None:
    recipe = seeing(name)
    context = GeneratorContext(recipe, current(), initial=True)
    processor: Any = media.processor_of(recipe.data, recipe.model, current())
    requests = [Request("text", tuple(range(40, 70)), Sampling(8, temperature=0.0))]
    for number in range(2):
        shown = image(64, 96, number)
        ids = [*processor.tokenizer.encode("What is "), *processor.as_ids((shown,)), *processor.tokenizer.encode("?")]
        requests.append(Request(str(number), tuple(ids), Sampling(8, temperature=0.0), media=media.placed(ids, [shown], processor)))
    found, expected = (asyncio.run(answers(config, context, requests)) for config in (CONFIG, chz.replace(CONFIG, tensor=1)))
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.log_probs == pytest.approx(other.log_probs, abs=1e-3)
