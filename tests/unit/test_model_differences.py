"""What a model computes, and what of its settings is no matter to weights that come from elsewhere."""

from __future__ import annotations

import chz
import pytest
from intarsia.checkpoint.weights import model_differences
from intarsia.config import resolve
from intarsia.plugins import current


@pytest.fixture(scope="module")
def recipe():
    return resolve("deepseek_v3/debug").recipe


def with_router(recipe, **changes):
    """The recipe's model with other settings of every router."""
    layers = []
    for block in recipe.model.layers:
        if hasattr(block.feed_forward, "router"):
            router = chz.replace(block.feed_forward.router, **changes)
            block = chz.replace(block, feed_forward=chz.replace(block.feed_forward, router=router))
        layers.append(block)
    return chz.replace(recipe.model, layers=tuple(layers))


@pytest.mark.parametrize("changes", [{"z_loss": 0.5}, {"jitter": 0.1}, {"sequence": "document"}, {"bias_rate": 0.0}])
def test_what_only_trains_is_no_matter(recipe, changes):
    assert model_differences(recipe, with_router(recipe, **changes), current()) == []


def test_how_parameters_start_is_no_matter(recipe):
    assert model_differences(recipe, chz.replace(recipe.model, initial_std=0.5, max_positions=77), current()) == []


def test_what_is_computed_is_told(recipe):
    told = model_differences(recipe, with_router(recipe, top_k=1, jitter=0.2), current())
    assert len(told) == sum(hasattr(block.feed_forward, "router") for block in recipe.model.layers)
    assert all("router.top_k is 2, there 1" in line for line in told)
