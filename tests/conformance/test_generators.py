"""The generator `local` keeps every promise: dense, with windows, with latent attention and experts; with caches that run out and prompts that are cut."""

from __future__ import annotations

from typing import Any

import chz
from intarsia.config import Recipe
from intarsia_eager.config import WholeConfig
from intarsia_flexshard.config import FlexShardConfig
from intarsia_generation.engine.config import LocalConfig
from intarsia_rl.invariant.transform import batch_invariant
from intarsia_testing import GeneratorConformance

from tests.support.small_models import dense, experts, recipe_of


def plain(model: Any) -> Recipe:
    return recipe_of(model, sharder=WholeConfig(), kernels={"*": "reference"})


class TestDense(GeneratorConformance):
    entry = "intarsia-generation:local"
    config = LocalConfig(block=4, max_sequences=4, max_batch_tokens=24, max_tokens=96, device="cpu")

    def recipe(self) -> Recipe:
        return plain(dense())


class TestNarrow(TestDense):
    """A layer with a window and sinks, and blocks for hardly more than one request: others are put back and computed anew all the time."""

    config = LocalConfig(block=4, blocks=30, max_sequences=5, max_batch_tokens=9, max_tokens=96, device="cpu")
    new_tokens = 12

    def recipe(self) -> Recipe:
        return plain(dense(window=6))


class TestExperts(GeneratorConformance):
    entry = "intarsia-generation:local"
    config = LocalConfig(block=4, blocks=64, max_sequences=6, max_batch_tokens=24, max_tokens=80, device="cpu")
    tolerance = 2e-4
    new_tokens = 12

    def recipe(self) -> Recipe:
        return plain(experts())


class TestInvariant(TestExperts):
    """Batch-invariant mode: bit for bit what the trainer's pass over whole sequences gives, experts included."""

    config = LocalConfig(block=4, blocks=40, max_sequences=6, max_batch_tokens=24, max_tokens=64, device="cpu")
    tolerance = 0.0
    invariant = True
    new_tokens = 8
    draws = 120

    def recipe(self) -> Recipe:
        return batch_invariant(plain(experts()))


class TestInvariantBfloat16(TestInvariant):
    """The same in bfloat16, with windows."""

    def recipe(self) -> Recipe:
        recipe = plain(dense(window=6))
        return batch_invariant(chz.replace(recipe, precision=chz.replace(recipe.precision, compute="bfloat16"), sharder=FlexShardConfig()))
