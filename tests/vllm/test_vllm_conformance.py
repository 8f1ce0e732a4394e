"""The generator `vllm` keeps every promise of generators, bit for bit the trainer's: dense with windows and sinks, latent attention and experts. Prompts are cut, blocks run out."""

from __future__ import annotations

import pytest
from intarsia.config import Recipe
from intarsia_flexshard.config import FlexShardConfig
from intarsia_rl.invariant.transform import batch_invariant
from intarsia_testing import GeneratorConformance
from intarsia_vllm.config import VllmConfig

from tests.support.small_models import dense, experts, recipe_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


class TestVllm(GeneratorConformance):
    entry = "intarsia-vllm:vllm"
    config = VllmConfig(block=16, max_sequences=6, batched_tokens=24, cache_mib=1)
    tolerance = 0.0
    invariant = True
    timeout_s = 300.0

    def recipe(self) -> Recipe:
        return batch_invariant(recipe_of(dense(window=6), sharder=FlexShardConfig()))


class TestVllmExperts(TestVllm):
    def recipe(self) -> Recipe:
        return batch_invariant(recipe_of(experts(), sharder=FlexShardConfig()))
