"""The generator `local` keeps every promise: dense, with windows, with latent attention and experts; with caches that run out and prompts that are cut."""

from __future__ import annotations

import functools
from typing import Any

import chz
from intarsia.config import Recipe
from intarsia.plugins import current
from intarsia_deepseek_v3.config import deepseek_v3, v3_router
from intarsia_eager.config import WholeConfig
from intarsia_flexshard.config import FlexShardConfig
from intarsia_generation.engine.config import LocalConfig
from intarsia_llama3.config import llama3
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_rl.invariant.transform import batch_invariant
from intarsia_testing import GeneratorConformance


@functools.cache
def debug(name: str) -> Recipe:
    found: Any = current().registry("recipe").find(name)
    recipe: Recipe = current().target(found)()
    return chz.replace(recipe, sharder=WholeConfig(), kernels={"*": "reference"})


def dense(window: int | None = None) -> Recipe:
    model = llama3(
        dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=48, vocab_size=264, max_positions=192, initial_std=0.2, embedding_std=0.5
    )
    first, second = model.layers
    if window is not None:
        second = chz.replace(second, attention=chz.replace(second.attention, window=window, sinks=True))
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


class TestDense(GeneratorConformance):
    entry = "intarsia-generation:local"
    config = LocalConfig(block=4, max_sequences=4, max_batch_tokens=24, max_tokens=96, device="cpu")

    def recipe(self) -> Recipe:
        return dense()


class TestNarrow(TestDense):
    """A layer with a window and sinks, and blocks for hardly more than one request: others are put back and computed anew all the time."""

    config = LocalConfig(block=4, blocks=30, max_sequences=5, max_batch_tokens=9, max_tokens=96, device="cpu")
    new_tokens = 12

    def recipe(self) -> Recipe:
        return dense(window=6)


class TestExperts(GeneratorConformance):
    entry = "intarsia-generation:local"
    config = LocalConfig(block=4, blocks=64, max_sequences=6, max_batch_tokens=24, max_tokens=80, device="cpu")
    tolerance = 2e-4
    new_tokens = 12

    def recipe(self) -> Recipe:
        return experts()


class TestInvariant(TestExperts):
    """Batch-invariant mode: bit for bit what the trainer's pass over whole sequences gives, experts included."""

    config = LocalConfig(block=4, blocks=40, max_sequences=6, max_batch_tokens=24, max_tokens=64, device="cpu")
    tolerance = 0.0
    invariant = True
    new_tokens = 8
    draws = 120

    def recipe(self) -> Recipe:
        return batch_invariant(experts())


class TestInvariantBfloat16(TestInvariant):
    """The same in bfloat16, with windows."""

    def recipe(self) -> Recipe:
        recipe = dense(window=6)
        return batch_invariant(chz.replace(recipe, precision=chz.replace(recipe.precision, compute="bfloat16"), sharder=FlexShardConfig()))
