"""The generator `vllm` keeps every promise of generators, bit for bit the trainer's: dense with windows and sinks, latent attention and experts. Prompts are cut, blocks run out."""

from __future__ import annotations

import functools
from typing import Any

import chz
import pytest
from intarsia.config import Recipe
from intarsia.plugins import current
from intarsia_deepseek_v3.config import deepseek_v3, v3_router
from intarsia_flexshard.config import FlexShardConfig
from intarsia_llama3.config import llama3
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_rl.invariant.transform import batch_invariant
from intarsia_testing import GeneratorConformance
from intarsia_vllm.config import VllmConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@functools.cache
def debug(name: str) -> Recipe:
    recipe: Any = current().target(current().registry("recipe").find(name))()
    return chz.replace(recipe, sharder=FlexShardConfig())


def dense() -> Recipe:
    model = llama3(
        dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=48, vocab_size=264, max_positions=192, initial_std=0.2, embedding_std=0.5
    )
    first, second = model.layers
    second = chz.replace(second, attention=chz.replace(second.attention, window=6, sinks=True))
    return chz.replace(debug("llama3/debug"), model=chz.replace(model, layers=(first, second)))


def experts() -> Recipe:
    model = deepseek_v3(
        dim=32,
        layers=3,
        dense_layers=1,
        attention=MLAConfig(heads=2, kv_rank=12, q_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
        dense_hidden=48,
        router=v3_router(experts=8, top_k=2, groups=4, top_groups=2, scale=2.5),
        expert_hidden=24,
        shared_experts=1,
        vocab_size=264,
        rope=RopeConfig(interleaved=True),
        max_positions=192,
        ahead=1,
        initial_std=0.2,
        embedding_std=0.5,
    )
    return chz.replace(debug("deepseek_v3/debug"), model=model)


class TestVllm(GeneratorConformance):
    entry = "intarsia-vllm:vllm"
    config = VllmConfig(block=16, max_sequences=6, batched_tokens=24, cache_mib=1)
    tolerance = 0.0
    invariant = True
    timeout_s = 300.0

    def recipe(self) -> Recipe:
        return batch_invariant(dense())


class TestVllmExperts(TestVllm):
    def recipe(self) -> Recipe:
        return batch_invariant(experts())
