"""Runs for `intarsia train tests/vllm/_recipes.py:NAME`: a small policy that learns sums, of one dense model and of one with latent attention and experts."""

from __future__ import annotations

import chz
from intarsia.config import Recipe
from intarsia_deepseek_v3.config import deepseek_v3, v3_router
from intarsia_environments.recipes import arithmetic_debug
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_vllm.config import VllmConfig


def dense() -> Recipe:
    """`arithmetic/debug` with vLLM as its generator."""
    recipe = arithmetic_debug()
    generator = VllmConfig(max_tokens=64, max_sequences=64, cache_mib=64)
    return chz.replace(recipe, data=chz.replace(recipe.data, loader=chz.replace(recipe.data.loader, generator=generator)))


def experts() -> Recipe:
    """The same for a small DeepSeek-V3."""
    recipe = dense()
    model = deepseek_v3(
        dim=64,
        layers=2,
        dense_layers=1,
        attention=MLAConfig(heads=4, kv_rank=16, q_rank=32, nope_dim=16, rope_dim=8, value_dim=16),
        dense_hidden=128,
        router=v3_router(experts=8, top_k=2, groups=4, top_groups=2, scale=2.5),
        expert_hidden=48,
        shared_experts=1,
        vocab_size=recipe.model.vocab_size,
        rope=RopeConfig(interleaved=True),
        max_positions=512,
        ahead=0,
        initial_std=0.06,
        embedding_std=0.5,
    )
    return chz.replace(recipe, model=model)
