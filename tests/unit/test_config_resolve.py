"""Recipes by name or file, transforms, overrides: what they give, who set what, and what goes wrong in which words."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import config_fakes as fakes
from intarsia.config import flatten, resolve
from intarsia.errors import PluginError, UsageError
from intarsia_console.differences import diff

PLUGINS = fakes.loaded()
BASE = resolve("fake/small", plugins=PLUGINS)


def resolved(*overrides, recipe="fake/small", transforms=()):
    return resolve(recipe, overrides, transforms, PLUGINS)


def changes(*overrides, transforms=()):
    found = diff(BASE, resolved(*overrides, transforms=transforms))
    return {difference.path: difference.right.value if difference.right else "gone" for difference in found}


def message(*overrides, recipe="fake/small", transforms=()):
    with pytest.raises(UsageError) as caught:
        resolved(*overrides, recipe=recipe, transforms=transforms)
    return str(caught.value)


# ---------------------------------------------------------------- values and provenance


def test_each_value_says_who_set_it():
    found = resolved("train.seed=7", "...window=4", transforms=["longer"])
    sources = {path: entry.source for path, entry in found.values.items()}
    assert sources["optimizer.lr"] == "recipe fake/small"
    assert sources["optimizer.betas"] == "default"
    assert sources["train.steps"] == "transform longer"
    assert sources["train.sequence_length"] == "recipe fake/small"
    assert sources["train.seed"] == "command line"
    assert sources["model.layers.1.attention.window"] == "command line (...window)"
    assert sources["model.layers.1.attention.heads"] == "default"
    assert found.values["optimizer"].value == "fake-family:adam"
    assert {path: entry.value for path, entry in found.values.items()} == flatten(found.recipe, PLUGINS)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.steps=1_000", "train.steps", 1000),
        ("train.steps=1e3", "train.steps", 1000),
        ("train.clip_norm=none", "train.clip_norm", None),
        ("train.clip_norm=2", "train.clip_norm", 2.0),
        ("train.clip_norm_type=inf", "train.clip_norm_type", math.inf),
        ("data.shuffle=False", "data.shuffle", False),
        ("data.shuffle=off", "data.shuffle", False),
        ("optimizer.betas=0.8,0.9", "optimizer.betas", [0.8, 0.9]),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", [0.8, 0.9]),
        ("profile.steps=(3,)", "profile.steps", [3]),
        ("profile.steps=4", "profile.steps", [4]),
        ("parameter_groups.0.match=a*,b", "parameter_groups.0.match", ["a*", "b"]),
        ('parameter_groups.0.match=["a,b"]', "parameter_groups.0.match", ["a,b"]),
        ("model.grid=[[1, 2], [3]]", "model.grid", [[1, 2], [3]]),
        ("data.cache=", "data.cache", ""),
        ('data.cache="a b"', "data.cache", "a b"),
        ("data.cache=a=b", "data.cache", "a=b"),
        ("model.layers.0.attention.kind=sliding", "model.layers.0.attention.kind", "sliding"),
        ("parameter_groups.0.options.lr=1e-2", "parameter_groups.0.options.lr", 0.01),
        ("kernels.rope=triton", "kernels.rope", "triton"),
        ("kernels.*=reference", "kernels.*", "reference"),
        ('model.scales."a.b=c"=2', 'model.scales."a.b=c"', 2.0),
    ],
)
def test_text_is_read_by_the_fields_type(text, path, value):
    found = resolved(text)
    assert repr(found.values[path].value) == repr(value)
    assert set(changes(text)) <= {path, path.rpartition(".")[0], "model.scales"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.steps=abc", ["`train.steps`", "expected int", "'abc'"]),
        ("train.steps=1.5", ["expected int", "'1.5'"]),
        ("train.steps=1e99999999", ["expected int"]),
        ("train.steps=none", ["expected int"]),
        ("train.clip_norm=much", ["expected float or none"]),
        ("data.shuffle=maybe", ["expected bool"]),
        ("optimizer.betas=0.9", ["`optimizer.betas`", "float"]),
        ("optimizer.betas=0.9,x", ["`optimizer.betas`", "'x'"]),
        ("model.layers.0.attention.kind=slidng", ["'full', 'sliding'", "Did you mean 'sliding'"]),
        ("train=3", ["`train` is always a TrainConfig", "train.FIELD=VALUE"]),
        ("train.steps.x=3", ["`train.steps` is one value"]),
        ("kernels.a.b=1", ["nothing can be set beneath `kernels.a`"]),
        ('kernels={"a": "x", "a": "y"}', ["'a'", "more than once"]),
        ("data.mixture.x.weight=3", ["`data.mixture`", "`data.mixture.1`"]),
        ("noequals", ["'noequals': it is not PATH=VALUE", "--with"]),
        ("a..b=1", ["`a..b` is no path"]),
    ],
)
def test_a_wrong_value_or_path_is_named_with_what_was_expected(text, words):
    found = message(text)
    assert all(word in found for word in words), found


# ---------------------------------------------------------------- globs


def test_globs_at_every_depth():
    every = [f"model.layers.{index}.dim" for index in range(3)]
    assert changes("model.layers.*.dim=4") == dict.fromkeys(every, 4)
    assert changes("...layers.*.dim=4") == dict.fromkeys(every, 4)
    assert changes("model.layers.{0,2}.dim=4") == dict.fromkeys(every[::2], 4)
    assert changes("model.layers.1-2.dim=4") == dict.fromkeys(every[1:], 4)
    assert changes("model...dim=4") == dict.fromkeys(["model.dim", *every], 4)
    assert changes("...theta=4") == {f"model.layers.{index}.attention.rope.theta": 4.0 for index in range(3)}


def test_an_exact_path_beats_a_glob_in_any_order():
    for texts in (["...window=1", "model.layers.1.attention.window=2"], ["model.layers.1.attention.window=2", "...window=1"]):
        assert [layer.attention.window for layer in resolved(*texts).recipe.model.layers] == [1, 2, 1]
    assert [layer.dim for layer in resolved("model.layers.*.dim=1", "model.layers.{0,1}.dim=2").recipe.model.layers] == [2, 2, 1]
    texts = ["...attention=none", "model.layers.1.attention=latent", "model.layers.1.attention.rank=5"]
    for order in (texts, texts[::-1]):
        kinds = [type(layer.attention).__name__ for layer in resolved(*order).recipe.model.layers]
        assert kinds == ["NothingConfig", "LatentConfig", "NothingConfig"]


def test_a_glob_never_adds_a_key_to_a_mapping():
    assert "parameter_groups.0.options.lr" not in resolved("...lr=1").values


def test_a_glob_that_matches_nothing():
    assert "Did you mean 'window'" in message("...windw=3")
    found = message("layers.*.dim=4")
    assert "matches nothing" in found
    assert "`model.layers.*.dim`" in found


# ---------------------------------------------------------------- choices


def test_choosing_an_entry_drops_what_was_beneath_and_lists_it():
    found = resolved("optimizer=matrix")
    assert found.recipe.optimizer == fakes.MatrixConfig()  # lr 0.001 of the recipe is not kept
    assert [(entry.path, entry.value) for entry in found.dropped] == [
        ("optimizer.lr", 0.001),
        ("optimizer.weight_decay", 0.0),
        ("optimizer.betas", [0.9, 0.95]),
    ]
    assert {entry.by for entry in found.dropped} == {"optimizer=matrix"}
    assert found.dropped[0].source == "recipe fake/small"
    assert found.values["optimizer.lr"].source == "default"


@pytest.mark.parametrize("name", ["matrix", "fake-family:matrix"])
def test_choices_come_before_fields_in_any_order(name):
    for texts in (["optimizer.lr=1", f"optimizer={name}"], [f"optimizer={name}", "optimizer.lr=1"]):
        assert resolved(*texts).recipe.optimizer == fakes.MatrixConfig(lr=1.0)
    nested = ["optimizer.inner.lr=3", "optimizer.inner=adam", f"optimizer={name}"]
    assert resolved(*nested).recipe.optimizer == fakes.MatrixConfig(inner=fakes.AdamConfig(lr=3.0))


def test_choosing_what_stands_there_already_changes_nothing():
    assert changes("optimizer=adam") == {}
    assert resolved("optimizer=adam").dropped == []


def test_nested_choices_and_growing_tuples():
    texts = ["data.mixture.1.source.paths=a.txt,b.txt", "data.mixture.1.source=files", "data.mixture.1.weight=2"]
    part = resolved(*texts).recipe.data.mixture[1]
    assert (part.source, part.weight) == (fakes.TextConfig(paths=("a.txt", "b.txt")), 2.0)
    assert len(resolved("data.mixture.2.source=library", "data.mixture.1.source=library").recipe.data.mixture) == 3
    assert "the next one is `data.mixture.1`" in message("data.mixture.2.source=library")
    assert resolved("sinks=board,board", "sinks.1.port=3").recipe.sinks == (fakes.BoardConfig(), fakes.BoardConfig(port=3))
    assert resolved("sinks.0=board").recipe.sinks == (fakes.BoardConfig(),)
    assert len(resolved("data.evaluation.0.source=library").recipe.data.evaluation) == 1


def test_extensions_appear_by_name():
    assert resolved("extensions.my_section.x=3").recipe.extensions == {"my_section": fakes.SectionConfig(x=3)}
    assert resolved("extensions.my_section=my_section").recipe.extensions == {"my_section": fakes.SectionConfig()}
    assert resolved("extensions.my_section.options.q=7").recipe.extensions["my_section"].options == {"q": 7}
    assert "Did you mean 'my_section'" in message("extensions.my_secton.x=3")
    assert "has no field 'y'" in message("extensions.my_section.y=3")
    assert "x must be at most 1000, and is 3000" in message("extensions.my_section.x=3000")
    assert "its key must be 'my_section'" in message("extensions.other=my_section")


def test_optional_nodes_can_be_emptied_and_filled():
    assert resolved("model.layers.0.attention.rope=none").recipe.model.layers[0].attention.rope is None
    assert "model.layers.1.attention.rope.theta" not in resolved("...rope=none").values
    assert resolved("optimizer=matrix", "optimizer.inner=adam").recipe.optimizer.inner == fakes.AdamConfig()
    assert "unknown optimizer 'none'" in message("optimizer=none")
    assert "has no field 'x'" in message("model.extra.x=1")


def test_an_entry_of_another_kind_is_refused():
    assert "unknown component 'adam'" in message("model.layers.0.attention=adam")
    assert "Did you mean 'library'" in message("data.mixture.0.source=libary")
    assert "No plugin 'nobody' is installed here" in message("optimizer=nobody:adam")


# ---------------------------------------------------------------- mistakes are named


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimzer.lr=1", ["`optimizer.lr`"]),
        ("optimizer.Lr=1", ["Did you mean `optimizer.lr`"]),
        ("lr=1", ["`lr` is at `optimizer.lr`"]),
        ("train.lr=1", ["`train` (TrainConfig) has no field 'lr'", "`lr` is at `optimizer.lr`"]),
        ("data.mixture.0.wieght=1", ["Did you mean `data.mixture.0.weight`"]),
        ("model.layers.1.attention.rope.tehta=1", ["Did you mean `model.layers.1.attention.rope.theta`"]),
        ("model.layer.1.dim=1", ["Did you mean `model.layers.1.dim`"]),
    ],
)
def test_unknown_paths_name_the_nearest_and_where_the_key_is(text, words):
    found = message(text)
    assert all(word in found for word in words), found


def test_all_problems_are_reported_together():
    found = message("train.steps=x", "optimzer.lr=1", "optimizer=matrx", "...windw=3")
    assert found.count("\n  - ") == 4
    found = message("data.mixture.0.source=files", "model.layers.{0,1}.attention=latent")
    for path in ("data.mixture.0.source.paths", "model.layers.0.attention.rank", "model.layers.1.attention.rank"):
        assert f"`{path}` is required and not set" in found


def test_a_path_given_twice():
    found = message("train.steps=1", "train.steps=2")
    assert "'train.steps=2': it sets the same path as 'train.steps=1'" in found
    assert changes("train.steps=1", "train.steps=1") == {"train.steps": 1}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["compile.mode=modle"], ["none, model, local", "Did you mean 'model'"]),
        (["train.device=cdua"], ["Did you mean 'cuda'"]),
        (["precision.compute=bf16"], ["bfloat16"]),
        (["train.sequence_length=999"], ["999", "128 positions"]),
        (["train.micro_batch=99"], ["99", "8 of a whole step"]),
        (["train.global_batch=0"], ["at least 1, and is 0"]),
        (["mesh.dp_shard=0"], ["-1 for all ranks"]),
        (["data.mixture=[]"], ["`data.mixture` is empty"]),
        (["data.mixture.0.weight=0"], ["`data.mixture.0.weight`", "greater than 0"]),
        (["data.mixture.0.weight=nan"], ["`data.mixture.0.weight`"]),
        (["data.held_out=1"], ["less than 1, and is 1.0"]),
        (["optimizer.lr=inf"], ["`optimizer.lr`", "inf"]),
        (["parameter_groups.0.options.weight_decy=1"], ["AdamConfig has no plain field", "Did you mean 'weight_decay'"]),
        (["parameter_groups.0.options.lr=fast"], ["`parameter_groups.0.options.lr`", "float"]),
        (["parameter_groups.1.name=norms", "parameter_groups.1.match=x"], ["`parameter_groups.1.name` is 'norms'", "must differ"]),
        (["parameter_groups.0.name=default"], ["'default'"]),
        (["parameter_groups.0.match=[]"], ["is empty"]),
        (["profile.steps=10"], ["ends after step 9"]),
        (["name=../up"], ["directory's name"]),
        (["evaluation.every=-1"], ["at least 0"]),
    ],
)
def test_contradictions_are_named_with_their_numbers(overrides, words):
    found = message(*overrides)
    assert all(word in found for word in words), found


# ---------------------------------------------------------------- recipes and transforms by name and by file


def test_unknown_and_wrong_recipes_and_transforms():
    assert "Did you mean 'fake/small'" in message(recipe="fake/smal")
    assert "returned a str; it must return a Recipe" in message(recipe="fake/wrong")
    assert "Did you mean 'longer'" in message(transforms=["longr"])
    assert "'broken' returned a NoneType" in message(transforms=["broken"])


def test_transforms_compose_in_order_and_a_changed_entry_drops_what_was_beneath():
    found = resolved(transforms=["matrix", "longer"])
    assert (found.recipe.optimizer, found.recipe.train.steps) == (fakes.MatrixConfig(lr=0.05), 20)
    assert [entry.path for entry in found.dropped] == ["optimizer.lr", "optimizer.weight_decay", "optimizer.betas"]
    assert {entry.by for entry in found.dropped} == {"transform matrix"}
    assert found.values["optimizer.lr"].source == "transform matrix"
    assert found.values["optimizer.momentum"].source == "default"


FILE = """
from __future__ import annotations
import chz
import config_fakes
from intarsia.config import Config, Recipe

def run() -> Recipe:
    return chz.replace(config_fakes.small(), name="from-file")

def slower(recipe: Recipe) -> Recipe:
    return chz.replace(recipe, optimizer=config_fakes.AdamConfig(lr=1e-5))

def fails() -> Recipe:
    return 1 / 0

number = 3
"""


def test_a_recipe_and_a_transform_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    found = resolved(recipe=f"{file}:run", transforms=[f"{file}:slower"])
    assert (found.recipe.name, found.recipe.optimizer.lr) == ("from-file", 1e-5)
    assert found.values["name"].source == f"recipe {file}:run"
    assert found.values["optimizer.lr"].source == f"transform {file}:slower"
    monkeypatch.chdir(tmp_path)
    assert resolved(recipe="mine.py:run").recipe.name == "from-file"
    assert "Did you mean 'run'" in message(recipe="mine.py:rnu")
    assert "mine.py:FUNCTION" in message(recipe="mine.py")
    assert "there is no file 'your.py'" in message(recipe="your.py:run")
    assert f"ZeroDivisionError: division by zero ({file}:14)" in message(recipe="mine.py:fails")
    assert "is a int, not a function" in message(recipe="mine.py:number")
    (tmp_path / "bad.py").write_text("import nowhere_to_be_found\n")
    assert "nowhere_to_be_found" in message(recipe="bad.py:run")


def test_a_recipe_that_cannot_be_written_down(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        FILE
        + """
@chz.chz(typecheck=True)
class MyOptimizer(config_fakes.OptimizerConfig):
    pass

def unregistered() -> Recipe:
    return chz.replace(config_fakes.small(), optimizer=MyOptimizer(lr=1.0))
"""
    )
    with pytest.raises(PluginError, match="`optimizer` cannot be written down by name"):
        resolved(recipe=f"{file}:unregistered")


# ---------------------------------------------------------------- plugins chosen by the recipe


def test_the_command_line_selects_plugins_before_they_are_loaded(monkeypatch):
    asked = []
    monkeypatch.setattr(sys.modules["intarsia.config.resolve"], "load", lambda *a, **k: asked.append((a, k)) or PLUGINS)
    monkeypatch.setattr(sys.modules["intarsia.config.resolve"], "current", lambda: PLUGINS)
    monkeypatch.setattr(sys.modules["intarsia.config.resolve"], "use", lambda plugins: None)
    resolve("fake/small", ["plugins.disable=some-plugin"])
    assert asked[0] == ((), {"disable": ("some-plugin",)})
