"""Each key of each recipe, misspelt, misplaced, in the wrong case, doubled or by an old name: an error, or a changed recipe; never silence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import config_fakes as fakes
from intarsia import plugins as all_plugins
from intarsia.config import load_saved, resolve
from intarsia.config.paths import folded, join, split
from intarsia.errors import IntarsiaError, UsageError, nearest

PLUGINS = fakes.loaded()
EXTRA = ["extensions.my_section.options.q=1", "sinks=board", "data.mixture.1.source=files", "data.mixture.1.source.paths=a"]


def mutations(path, number):
    """(what, path) for each way to get one key wrong; which typo and which wrong section goes by `number`."""
    *above, last = split(path)
    parent = ".".join(above)
    typos = [
        join(parent, last[:-1] + ("x" if last[-1] != "x" else "y")),
        join(parent, last + "s"),
        join(parent, last[1:] or "zz"),
        ".".join([*above[:-1], above[-1] + "x", last]) if above else "x" + last,
    ]
    sections = [join("train" if above[:1] != ["train"] else "mesh", last), f"{last}.{path}", last if above else f"train.{last}"]
    yield "typo", typos[number % len(typos)]
    yield "wrong section", sections[number % len(sections)]
    yield "wrong case", join(parent, last.upper() if last.upper() != last else last + "X")
    yield "wrong case", ".".join([*(segment.upper() for segment in above), last]) if parent.upper() != parent else "X" + path
    yield "old name", join(parent, "old_" + last)


def other(value):
    """A value of the same type that is not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return 7 if value is None else value


def same(left, right):
    return {path: repr(entry.value) for path, entry in left.values.items()} == {
        path: repr(entry.value) for path, entry in right.values.items()
    }


def recipes():
    """(plugins, recipe, overrides, paths to mutate): the fake one, and of every installed recipe the paths that no earlier one has."""
    first = representatives(resolve("fake/small", EXTRA, plugins=PLUGINS))
    yield PLUGINS, "fake/small", EXTRA, list(first.values())
    installed, seen = all_plugins.load(), set(first)
    for entry in installed.registry("recipe").entries():
        try:
            installed.target(entry)
        except IntarsiaError:
            continue  # a broken distribution: reported by `intarsia plugins doctor`, tested there
        new = {key: path for key, path in representatives(resolve(entry.full_name, plugins=installed)).items() if key not in seen}
        seen |= set(new)
        if new:
            yield installed, entry.full_name, [], list(new.values())


def representatives(resolved):
    """One path for each of those that differ in indices only."""
    return {folded(path): path for path in resolved.values}


RECIPES = list(recipes())
IDS = [name for _, name, _, _ in RECIPES]


@pytest.mark.parametrize(("plugins", "name", "extra", "paths"), RECIPES, ids=IDS)
def test_every_mutated_key_on_the_command_line(plugins, name, extra, paths):
    base = resolve(name, extra, plugins=plugins)
    silent, unhelpful, tried = [], [], 0
    for number, path in enumerate(paths):
        for what, mutated in mutations(path, number):
            if mutated in base.values:
                continue
            tried += 1
            try:
                found = resolve(name, [*extra, f"{mutated}={other(base.values[path].value)}"], plugins=plugins)
            except IntarsiaError as error:
                if what == "typo" and isinstance(error, UsageError) and "[" not in path:
                    last = split(path)[-1]
                    if len(last) > 4 and nearest(split(mutated)[-1], [last]) and last not in str(error):
                        unhelpful.append((mutated, str(error)))
                continue
            if same(found, base):
                silent.append((what, mutated))
    assert tried > len(paths)
    assert not silent
    assert not unhelpful


@pytest.mark.parametrize(("plugins", "name", "extra", "paths"), RECIPES, ids=IDS)
def test_every_doubled_key(plugins, name, extra, paths, tmp_path):
    base = resolve(name, extra, plugins=plugins)
    text = json.dumps(base.recipe_json())
    for path in paths:
        with pytest.raises(UsageError, match="to a different value"):
            resolve(name, [f"{path}=1", f"{path}=2"], plugins=plugins)
        key = json.dumps(path) + ": "
        assert text.count(key) == 1
        (tmp_path / "recipe.json").write_text(text.replace(key, f"{key}1, {key}"))
        with pytest.raises(UsageError, match="more than once"):
            load_saved(tmp_path, plugins=plugins)


@pytest.mark.parametrize(("plugins", "name", "extra", "paths"), RECIPES, ids=IDS)
def test_every_mutated_key_in_a_file(plugins, name, extra, paths, tmp_path):
    base = resolve(name, extra, plugins=plugins)
    saved = base.recipe_json()
    silent = []
    for number, path in enumerate(paths):
        for what, mutated in mutations(path, number):
            if mutated in saved["values"]:
                continue
            values = {mutated if key == path else key: value for key, value in saved["values"].items()}
            (tmp_path / "recipe.json").write_text(json.dumps({**saved, "values": values}))
            try:
                found = load_saved(tmp_path, plugins=plugins)
            except IntarsiaError:
                continue
            if same(found, base):
                silent.append((what, mutated))
    assert not silent
