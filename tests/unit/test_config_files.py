"""recipe.json and resolved.json: written, run again, refused; and nothing in them, or in a value, makes code run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import chz
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import config_fakes as fakes
from intarsia.config import flatten, load_saved, rebuild, resolve
from intarsia.errors import IntarsiaError, UsageError

PLUGINS = fakes.loaded()


def save(directory, resolved):
    (directory / "recipe.json").write_text(json.dumps(resolved.recipe_json(), allow_nan=False))
    (directory / "resolved.json").write_text(json.dumps(resolved.resolved_json(), allow_nan=False))
    return directory


@pytest.fixture
def run(tmp_path):
    texts = ["train.clip_norm_type=inf", "extensions.my_section.x=3", "data.mixture.1.source=library"]
    resolved = resolve("fake/small", texts, ["latent"], PLUGINS)
    resolved.decide("kernels.rope", "triton", "fastest of 2")
    return save(tmp_path, resolved)


def test_a_run_directory_gives_the_same_recipe_again(run):
    first = resolve(
        "fake/small", ["train.clip_norm_type=inf", "extensions.my_section.x=3", "data.mixture.1.source=library"], ["latent"], PLUGINS
    )
    for path in (run, run / "recipe.json", run / "resolved.json", str(run)):
        again = load_saved(path, plugins=PLUGINS)
        assert again.recipe == first.recipe
        assert again.recipe_json() == first.recipe_json()
        assert again.pinned == {"kernels.rope": {"value": "triton", "reason": "fastest of 2"}}
        assert again.decisions == {}
    assert resolve(str(run), plugins=PLUGINS).recipe == first.recipe
    assert type(first.recipe.model.layers[0].attention).__name__ == "LatentConfig"
    assert "LatentConfig" not in repr(rebuild(first.requested, PLUGINS).model)  # recipe.json holds the recipe before component overrides


def test_a_saved_recipe_takes_overrides_and_transforms(run):
    again = load_saved(run, ["train.steps=3"], ["matrix"], PLUGINS)
    assert (again.recipe.train.steps, type(again.recipe.optimizer).__name__) == (3, "MatrixConfig")
    assert again.values["train.steps"].source == "command line"
    assert again.values["name"].source == str(run / "recipe.json")


def test_resolved_json_says_who_set_what_and_what_was_dropped(run):
    saved = json.loads((run / "resolved.json").read_text())
    assert saved["schema"] == 1
    assert saved["asked"]["transforms"] == ["latent"]
    assert saved["values"]["train.clip_norm_type"] == {"value": {"float": "inf"}, "source": "command line"}
    assert saved["values"]["model.layers.0.attention"] == {"value": "fake-family:latent", "source": "override by latent"}
    assert saved["decisions"]["kernels.rope"]["reason"] == "fastest of 2"
    assert {"path": "model.layers.0.attention.kind", "value": "full", "source": "default", "by": "override by latent"} in saved["dropped"]


def test_a_decision_must_be_plain():
    resolved = resolve("fake/small", plugins=PLUGINS)
    with pytest.raises(TypeError, match=r"mesh\.tp"):
        resolved.decide("mesh.tp", object(), "no")


def edited(run, **changes):
    saved = json.loads((run / "recipe.json").read_text())
    saved["values"] |= changes.pop("values", {})
    (run / "recipe.json").write_text(json.dumps(saved | changes))
    with pytest.raises(IntarsiaError) as caught:
        load_saved(run, plugins=PLUGINS)
    return str(caught.value)


def test_bad_files_are_refused_with_path_and_nearest(run):
    original = (run / "recipe.json").read_text()
    assert "has no field 'stpes'. Did you mean 'steps'?" in edited(run, values={"train.stpes": 3})
    assert str(run / "recipe.json") in edited(run, values={"train.stpes": 3})
    (run / "recipe.json").write_text(original)
    assert "expected int, got '3'" in edited(run, values={"train.steps": "3"})
    (run / "recipe.json").write_text(original)
    assert "expected bool, got 1" in edited(run, values={"data.shuffle": 1})
    (run / "recipe.json").write_text(original)
    assert "reads up to 1" in edited(run, schema=2)
    (run / "recipe.json").write_text(original)
    assert "`schema` must be a version number" in edited(run, schema=True)
    (run / "recipe.json").write_text(original)
    assert "unknown key 'valuse'. Did you mean 'values'?" in edited(run, valuse={})
    (run / "recipe.json").write_text(original)
    assert "No plugin 'gone-plugin' is installed here" in edited(run, values={"optimizer": "gone-plugin:sgd"})
    (run / "recipe.json").write_text(original)
    assert "No plugin 'gone-plugin' is installed here" in edited(run, values={"extensions.theirs": "gone-plugin:theirs"})
    (run / "recipe.json").write_text(original.replace('"train.steps": 10', '"train.steps": 10, "train.steps": 11'))
    assert "'train.steps' is given more than once" in edited_as_is(run)
    (run / "recipe.json").write_text(original[:-9])
    assert str(run / "recipe.json") in edited_as_is(run)
    (run / "recipe.json").write_text("[" * 100000)
    assert str(run / "recipe.json") in edited_as_is(run)
    (run / "recipe.json").unlink()
    assert "cannot be read" in edited_as_is(run)


def edited_as_is(run):
    with pytest.raises(UsageError) as caught:
        load_saved(run, plugins=PLUGINS)
    return str(caught.value)


def test_indices_with_gaps_and_missing_values_are_refused(run):
    saved = json.loads((run / "recipe.json").read_text())
    values = {path.replace("data.mixture.1", "data.mixture.2"): value for path, value in saved["values"].items()}
    with pytest.raises(UsageError, match=r"data\.mixture\.2"):
        rebuild(values, PLUGINS)
    del saved["values"]["model.vocab_size"], saved["values"]["data.tokenizer"]
    del saved["values"]["data.tokenizer.bos"]
    with pytest.raises(UsageError) as caught:
        rebuild(saved["values"], PLUGINS)
    assert "`model.vocab_size` is required" in str(caught.value)
    assert "`data.tokenizer` is required" in str(caught.value)


# ---------------------------------------------------------------- nothing executes


def attacks(marker):
    return [
        f"lambda: open({str(marker)!r}, 'w')",
        f"__import__('pathlib').Path({str(marker)!r}).touch()",
        "os:system",
        "os:getcwd",
        "config_fakes:small",
        "intarsia.config:Recipe",
        "subprocess:Popen",
        f"{Path(fakes.__file__)}:small",
        "eval",
        "{'a': 1}",
    ]


def rotated(choices, number):
    """Two of the choices, other ones for each number."""
    return [choices[(2 * number + index) % len(choices)] for index in range(2)]


@pytest.fixture
def guarded(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("chz's factories must not be reached")

    for name in ("standard", "_maybe_lambda", "_find_subclass", "get_unspecified_from_annotation", "_module_getattr", "function"):
        if hasattr(chz.factories, name):
            monkeypatch.setattr(chz.factories, name, forbidden)
    assert any(getattr(chz.factories, name, None) is forbidden for name in ("standard",))
    monkeypatch.setattr(chz.Blueprint, "__init__", forbidden)


def test_no_value_on_the_command_line_makes_code_run(tmp_path, guarded):
    marker = tmp_path / "touched"
    for number, (path, value) in enumerate(flatten(fakes.small(1), PLUGINS).items()):
        for attack in rotated(attacks(marker), number):
            try:
                resolved = resolve("fake/small", [f"{path}={attack}"], plugins=PLUGINS)
            except IntarsiaError:
                continue
            given = resolved.values[path].value
            assert given in (attack, value, [attack], [piece.strip() for piece in attack.split(",")]), (path, attack, given)
    assert not marker.exists()


def test_nothing_in_a_saved_recipe_makes_code_run(run, guarded, monkeypatch):
    marker = run / "touched"
    original = json.loads((run / "recipe.json").read_text())
    called = []
    monkeypatch.setattr(fakes, "small", lambda *args: called.append(args))
    for number, path in enumerate(original["values"]):
        for attack in rotated(attacks(marker), number):
            for value in (attack, {"float": attack}, [attack], {"": attack}):
                (run / "recipe.json").write_text(json.dumps({**original, "values": {**original["values"], path: value}}))
                try:
                    found = load_saved(run, plugins=PLUGINS)
                except IntarsiaError:
                    continue
                assert found.values[path].value in (attack, [attack]), (path, value)
    for attack in attacks(marker):
        (run / "recipe.json").write_text(json.dumps({**original, "recipe": attack}))
        load_saved(run, plugins=PLUGINS)
    assert not marker.exists()
    assert not called


@pytest.mark.parametrize(
    "values, word",
    [
        ({"name": "\ud800"}, "surrogate"),
        ({"name": "a\nb"}, "directory's name"),
        ({"name": "a" * 300}, "directory's name"),
        ({"optimizer.lr": {"float": [1]}}, "`optimizer.lr`"),
        ({"optimizer.lr": {"float": None}}, "`optimizer.lr`"),
        ({"optimizer.lr": 10**400}, "`optimizer.lr`"),
        ({"plugins.disable": [1, {}]}, "`plugins.disable`"),
    ],
)
def test_values_that_nothing_could_be_done_with_are_refused_in_words(run, values, word, monkeypatch):
    monkeypatch.setattr(sys.modules["intarsia.config.resolve"], "current", lambda: PLUGINS)
    assert word in edited(run, values=values)
    with pytest.raises(IntarsiaError, match=word):
        load_saved(run)


@pytest.mark.parametrize("decision", [5, {}, ["value"]])
def test_a_decision_without_a_value_is_refused(run, decision):
    saved = json.loads((run / "resolved.json").read_text())
    saved["decisions"]["kernels.rope"] = decision
    (run / "resolved.json").write_text(json.dumps(saved))
    with pytest.raises(UsageError, match=r"decision on 'kernels\.rope'"):
        load_saved(run, plugins=PLUGINS)


def test_a_command_line_that_is_no_utf_8_is_refused():
    with pytest.raises(UsageError, match=r"`data\.cache`.*surrogate"):
        resolve("fake/small", ["data.cache=\udcff"], plugins=PLUGINS)
