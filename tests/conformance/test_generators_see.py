"""The generator `local` keeps every promise with a model that sees, in prompts with images too."""

from __future__ import annotations

from typing import Any

import chz
import pytest
from intarsia.config import Recipe
from intarsia.plugins import current
from intarsia_eager.config import WholeConfig
from intarsia_environments.seeing import drawn_debug
from intarsia_generation.engine.config import LocalConfig
from intarsia_rl import media
from intarsia_rl.contracts import PlacedMedia
from intarsia_testing import GeneratorConformance

from tests.support.media import image


@pytest.mark.slow
class TestSees(GeneratorConformance):
    entry = "intarsia-generation:local"
    config = LocalConfig(block=4, max_sequences=6, max_batch_tokens=24, max_tokens=96, device="cpu")
    new_tokens = 8

    def recipe(self) -> Recipe:
        recipe = drawn_debug()
        model: Any = chz.replace(recipe.model, initial_std=0.2)
        return chz.replace(recipe, model=model, sharder=WholeConfig(), kernels={"*": "reference"})

    def shown(self) -> tuple[tuple[int, ...], tuple[PlacedMedia, ...]]:
        stage = self.stage()
        processor = media.processor_of(stage.recipe.data, stage.recipe.model, current())
        assert processor is not None
        both = [image(32, 32, 1), image(32, 32, 2)]
        ids = [1, 2, 3, *processor.as_ids((both[0],)), 4, *processor.as_ids((both[1],)), 5]
        tokens = tuple(token for token in ids if isinstance(token, int))
        return tokens, media.placed(tokens, both, processor)
