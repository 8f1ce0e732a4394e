"""ComponentOverrides: claims gathered first, all conflicts together, then applied."""

from __future__ import annotations

import sys
from pathlib import Path

import chz
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import config_fakes as fakes
from intarsia.config import ComponentOverride, resolve
from intarsia.config.components import apply
from intarsia.config.tree import ROOT, Schema, finish
from intarsia.errors import UsageError

PLUGINS = fakes.loaded()


def recipe(*claims):
    return chz.replace(fakes.small(), overrides=tuple(ComponentOverride(**claim) for claim in claims))


def apply_overrides(recipe, plugins):
    schema = Schema(plugins)
    root = schema.grow(recipe, ROOT, "", "recipe")
    apply(root, recipe, schema)
    return finish(root, schema, "The component overrides")


def message(*claims):
    with pytest.raises(UsageError) as caught:
        apply_overrides(recipe(*claims), PLUGINS)
    return str(caught.value)


def attentions(found):
    return [layer.attention for layer in found.model.layers]


def test_fields_of_the_same_name_keep_their_values():
    found = apply_overrides(recipe({"match": "layers.*.attention", "replace": "latent", "values": {"rank": 7}}), PLUGINS)
    assert attentions(found) == [fakes.LatentConfig(rank=7, heads=4, window=16)] * 3


def test_type_and_glob_choose():
    first = {"match": "layers.{0,2}.attention", "type": "full", "replace": "fake-family:latent", "values": {"rank": 7, "window": None}}
    found = apply_overrides(recipe(first), PLUGINS)
    assert attentions(found) == [
        fakes.LatentConfig(rank=7, heads=4),
        fakes.AttentionConfig(window=16),
        fakes.LatentConfig(rank=7, heads=4),
    ]
    assert attentions(apply_overrides(recipe({"match": "...attention", "replace": "none"}), PLUGINS)) == [fakes.NothingConfig()] * 3


def test_the_same_component_with_other_values():
    found = apply_overrides(recipe({"match": "layers.1.attention", "replace": "full", "values": {"heads": 9}}), PLUGINS)
    assert attentions(found)[1] == fakes.AttentionConfig(window=16, heads=9)
    assert attentions(found)[0] == fakes.AttentionConfig(window=16)


def test_all_conflicts_are_reported_together_with_both_owners_and_the_node():
    found = message(
        {"match": "layers.{0,1}.attention", "replace": "none", "owner": "alpha"},
        {"match": "layers.*.attention", "replace": "latent", "values": {"rank": 1}, "owner": "beta"},
        {"match": "layers.2.attention", "replace": "full", "owner": "gamma"},
    )
    assert "alpha" in found
    assert "beta" in found
    assert "both replace `model.layers.0.attention` (and 1 more)" in found
    assert "gamma (overrides.2: layers.2.attention -> full) both replace `model.layers.2.attention`" in found
    assert "remove one of them or narrow its `match` or `type`" in found


def test_no_match_names_the_nearest_components():
    found = message(
        {"match": "layrs.1.attention", "replace": "none", "owner": "alpha"},
        {"match": "layers.*.attention", "type": "latent", "replace": "none"},
    )
    assert "overrides.0 of alpha" in found
    assert "layers.1.attention" in found
    assert "none of the type 'latent': fake-family:full stands there" in found


def test_unknown_entries_fields_and_values():
    assert "Did you mean 'latent'" in message({"match": "layers.*.attention", "replace": "latnt"})
    assert "Did you mean 'rank'" in message({"match": "layers.1.attention", "replace": "latent", "values": {"rnk": 1}})
    assert "expected int, got 'many'" in message({"match": "layers.1.attention", "replace": "latent", "values": {"rank": "many"}})
    assert "`model.layers.1.attention.rank` is required" in message({"match": "layers.1.attention", "replace": "latent"})


def test_transforms_bring_overrides_that_meet():
    found = resolve("fake/small", transforms=["latent"], plugins=PLUGINS)
    assert [type(attention).__name__ for attention in attentions(found.recipe)] == ["LatentConfig", "AttentionConfig", "LatentConfig"]
    assert found.values["model.layers.0.attention.rank"].source == "override by latent"
    assert found.values["model.layers.0.attention.window"].source == "recipe fake/small"
    with pytest.raises(UsageError, match=r"latent .* and everywhere .* both replace"):
        resolve("fake/small", transforms=["latent", "everywhere"], plugins=PLUGINS)
