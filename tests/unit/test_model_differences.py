"""What a model computes, and what of its settings is no matter to weights that come from elsewhere."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import chz
import pytest
from intarsia import PLUGIN_API, plugins
from intarsia.checkpoint.weights import model_differences
from intarsia.config import Config, ModelConfig, resolve
from intarsia.contracts import ModelEntry
from intarsia.discovery import scan
from intarsia.hookspecs import hookimpl
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


@chz.chz(typecheck=True)
class Part(Config):
    """Its kind is no matter."""

    width: int = 1
    kind: str = chz.field(default="a", metadata={"computes": False})


@chz.chz(typecheck=True)
class Family(ModelConfig):
    """Its kind is what it computes."""

    kind: str = "b"
    part: Part = chz.field(default_factory=Part)


def test_a_field_that_only_has_such_a_name_is_told(recipe, monkeypatch):
    module = types.ModuleType("model_differences_fakes")
    vars(module).update(Part=Part, Family=Family, build=lambda config: None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    family = ModelEntry(name="fake", config=f"{module.__name__}:Family", target=f"{module.__name__}:build", doc="A fake.")
    plugin = SimpleNamespace(INTARSIA_API=PLUGIN_API, offer_models=hookimpl(lambda: [family], specname="offer_models"))
    loaded = plugins.load(entry_points=[*scan(), plugins.Candidate("acme", "1.0", "main", plugin=plugin)])
    ours = chz.replace(recipe, model=Family(vocab_size=8, dim=4, max_positions=2))
    theirs = chz.replace(ours.model, kind="c", part=Part(kind="d", width=2), max_positions=3)
    assert model_differences(ours, theirs, loaded) == ["model.kind is 'b', there 'c'", "model.part.width is 1, there 2"]
