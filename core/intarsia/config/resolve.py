"""From a name to a final recipe: recipe, transforms, command line, component overrides, checks; and who set what on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chz.util import MISSING

from intarsia.config import checks, components, overrides, shapes
from intarsia.config.paths import join
from intarsia.config.recipe import Recipe
from intarsia.config.tree import ROOT, Branch, Dropped, Schema, finish, plant, together
from intarsia.discovery import Selection, contained, describe
from intarsia.errors import IntarsiaError, UsageError, did_you_mean
from intarsia.plugins import Plugins, current, load, use

# Version of recipe.json and resolved.json.
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A plain value and who set it: `default`, `recipe NAME`, `transform NAME`, `command line`, `override by OWNER` or a file. Stability: provisional."""

    value: Any
    source: str


@dataclasses.dataclass
class Resolved:
    """A final recipe with its history. Stability: provisional.

    `recipe` is what runs, component overrides applied; `values` its flat form with who set each. `requested` is the recipe before component
    overrides: what `recipe.json` holds. `dropped` lists values that vanished when an entry above them was replaced. `decisions` are automatic
    choices with their reasons, `pinned` those of the run that this one was loaded from.
    """

    name: str
    recipe: Recipe
    values: dict[str, Resolution]
    requested: dict[str, Any]
    dropped: list[Dropped] = dataclasses.field(default_factory=list)
    transforms: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    decisions: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    pinned: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def decide(self, path: str, value: Any, reason: str) -> None:
        """Record what was chosen automatically for `path` (a plain value) and why; a later decision on the same path replaces it."""
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the decision on {path!r} is no plain value: {value!r}") from error
        self.decisions[path] = {"value": value, "reason": reason}

    def recipe_json(self) -> dict[str, Any]:
        """What `recipe.json` holds: names and plain values that `load_saved` turns into this recipe again."""
        return {"schema": SCHEMA, "recipe": self.name, "values": {path: shapes.encode(value) for path, value in self.requested.items()}}

    def resolved_json(self) -> dict[str, Any]:
        """What `resolved.json` holds: final values with who set each, decisions with reasons, what was dropped, and what was asked for."""
        values = {path: {"value": shapes.encode(entry.value), "source": entry.source} for path, entry in self.values.items()}
        dropped = [{**dataclasses.asdict(entry), "value": shapes.encode(entry.value)} for entry in self.dropped]
        asked = {"recipe": self.name, "transforms": list(self.transforms), "overrides": list(self.overrides)}
        return {"schema": SCHEMA, "asked": asked, "values": values, "decisions": self.decisions, "dropped": dropped}


def resolve(name: str, overrides: Sequence[str] = (), transforms: Sequence[str] = (), plugins: Plugins | None = None) -> Resolved:
    """The final recipe for what stands on a command line. Stability: provisional.

    Arguments: `name` of a registered recipe, `path.py:function`, or a run directory or `recipe.json`; `overrides` as `path=value`; `transforms`
    by registered name or `path.py:function`. With `plugins` None those of the process are used, and selected anew where the recipe's own
    `plugins` section asks for it.
    Raises UsageError for everything that is wrong, as much of it at once as can be found.
    """
    if name.endswith(".json") or (Path(name) / "recipe.json").is_file():
        return load_saved(name, overrides, transforms, plugins)
    chosen = plugins or _selected(overrides, {})
    recipe, schema = _call(chosen, "recipe", name), Schema(chosen)
    root = schema.grow(recipe, ROOT, "", f"recipe {name}")
    resolved = _layers(name, root, overrides, transforms, schema)
    if plugins is None and _reselect(resolved.recipe, chosen):
        return resolve(name, overrides, transforms, current())
    return resolved


def load_saved(path: str | Path, overrides: Sequence[str] = (), transforms: Sequence[str] = (), plugins: Plugins | None = None) -> Resolved:
    """The recipe of a run directory or a `recipe.json`, to be run again. Stability: provisional.

    Automatic decisions of that run (`resolved.json` beside it) are in `pinned`. Unknown and doubled keys, wrong types and a newer
    schema are UsageErrors. Nothing in the files can name code.
    """
    file = Path(path) / "recipe.json" if Path(path).is_dir() else Path(path)
    if file.name == "resolved.json":
        file = file.with_name("recipe.json")
    saved = _read(file, {"schema", "recipe", "values"})
    beside = file.with_name("resolved.json")
    decided = _read(beside, {"schema", "asked", "values", "decisions", "dropped"}) if beside.exists() else {}
    values, decisions = saved.get("values"), decided.get("decisions", {})
    if not isinstance(values, dict) or not isinstance(decisions, dict):
        raise UsageError(f"{file}: `values`, and `decisions` of resolved.json beside it, must be objects.")
    chosen = plugins or _selected(overrides, values)
    schema = Schema(chosen)
    recipe = finish(plant(values, str(file)), schema, str(file))
    root = schema.grow(recipe, ROOT, "", str(file))
    resolved = _layers(str(saved.get("recipe") or recipe.name), root, overrides, transforms, schema)
    if plugins is None and _reselect(resolved.recipe, chosen):
        return load_saved(path, overrides, transforms, current())
    if wrong := [path for path, fact in decisions.items() if not isinstance(fact, dict) or "value" not in fact]:
        raise UsageError(f"{beside}: the decision on {wrong[0]!r} has no `value`.")
    resolved.pinned = decisions
    return resolved


# ---------------------------------------------------------------- layers


def _layers(name: str, root: Branch, texts: Sequence[str], transforms: Sequence[str], schema: Schema) -> Resolved:
    dropped: list[Dropped] = []
    recipe = finish(root, schema, f"recipe {name}")
    for transform in transforms:
        label = f"transform {transform}"
        recipe = _call(schema.plugins, "transform", transform, recipe)
        grown = schema.grow(recipe, ROOT, "", label)
        _inherit(root, grown, label, "", dropped)
        root = grown
    dropped += overrides.apply(root, overrides.read(texts), schema)
    recipe = finish(root, schema, f"recipe {name}")
    requested = {path: branch.value for path, branch in schema.grow(recipe, ROOT, "", "").flat()}
    if recipe.overrides:
        dropped += components.apply(root, recipe, schema)
        recipe = finish(root, schema, f"recipe {name} after its component overrides")
    if problems := checks.check(recipe, schema.plugins):
        raise UsageError(together(f"recipe {name}", problems))
    who = {path: branch.source for path, branch in root.flat()}
    values = {path: Resolution(branch.value, who[path]) for path, branch in schema.grow(recipe, ROOT, "", "").flat()}
    return Resolved(name, recipe, values, requested, dropped, tuple(transforms), tuple(texts))


def _same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)  # tells 1 from True and takes nan as equal to nan


def _inherit(old: Branch, new: Branch, label: str, path: str, dropped: list[Dropped]) -> None:
    """Give each value of `new` that is as in `old` its source there, any other the label; list what is gone."""
    replaced = not _same(old.value, new.value)
    if not replaced:
        new.source = old.source
    elif new.value is not MISSING:
        new.source = label
    was_chosen = replaced and MISSING not in (old.value, new.value)
    for key, child in old.children.items():
        if was_chosen or key not in new.children:
            dropped += [Dropped(gone, branch.value, branch.source, label) for gone, branch in child.flat(join(path, key))]
    for key, child in new.children.items():
        if key in old.children and not was_chosen:
            _inherit(old.children[key], child, label, join(path, key), dropped)


# ---------------------------------------------------------------- recipes and transforms by name


def _call(plugins: Plugins, kind: str, name: str, *arguments: Any) -> Recipe:
    """What the recipe or transform `name` returns, checked to be a Recipe."""
    if ".py:" in name or name.endswith(".py"):
        function = _function(name, kind)
    else:
        try:
            function = plugins.target(plugins.registry(kind).find(name))
        except UsageError as error:
            hint = f" There is a file of that name: name a function in it, `{name}.py:FUNCTION`." if Path(f"{name}.py").exists() else ""
            hint += f" The folder {name!r} holds no recipe.json." if Path(name).is_dir() else ""
            raise UsageError(f"{error}{Schema(plugins).missing_plugin(name)}{hint}") from error
    if not callable(function):
        raise UsageError(f"{kind} {name!r} is a {type(function).__name__}, not a function.")
    recipe, failure = contained(function, *arguments)
    if isinstance(failure, IntarsiaError):
        raise failure
    if failure is not None:
        raise UsageError(f"{kind} {name!r} failed: {describe(failure)}") from failure
    if not isinstance(recipe, Recipe):
        raise UsageError(f"{kind} {name!r} returned a {type(recipe).__name__}; it must return a Recipe.")
    return recipe


def _function(reference: str, kind: str) -> Any:
    """The attribute `path.py:function`; only ever called with text from a command line."""
    file_name, _, name = reference.rpartition(":") if ".py:" in reference else (reference, "", "")
    file = Path(file_name).resolve()
    if not file.is_file():
        raise UsageError(f"{kind} {reference!r}: there is no file {file_name!r} (looked in {file.parent}).")
    spec = importlib.util.spec_from_file_location(f"intarsia_file_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # config classes of the file find their own names through it
    _, error = contained(spec.loader.exec_module, module)
    if error is not None:
        raise UsageError(f"{kind} {reference!r}: the file fails: {describe(error)}") from error
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == spec.name]
        raise UsageError(f"{kind} {reference!r}: name a function of the file, `{file_name}:FUNCTION`. {did_you_mean(name, known)}")
    return getattr(module, name)


# ---------------------------------------------------------------- files and plugins


def _read(file: Path, known: set[str]) -> Mapping[str, Any]:
    try:
        saved = shapes.read_object(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}. A run directory holds a recipe.json.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: {error}") from error
    version = saved.get("schema")
    if type(version) is not int or version < 1:
        raise UsageError(f"{file}: `schema` must be a version number such as {SCHEMA}, got {version!r}.")
    if version > SCHEMA:
        raise UsageError(f"{file} has schema {version}; this version reads up to {SCHEMA}. Use the newer intarsia that wrote it.")
    if unknown := [key for key in saved if key not in known]:
        raise UsageError(f"{file}: unknown key {unknown[0]!r}. {did_you_mean(unknown[0], known)}")
    return saved


def _selected(texts: Sequence[str], saved: Mapping[str, Any]) -> Plugins:
    """The process's plugins, selected before any is imported where the command line or the saved recipe selects."""
    chosen = {
        path: tuple(value)
        for path, value in saved.items()
        if path.startswith("plugins.") and isinstance(value, list) and all(isinstance(name, str) for name in value)
    }
    for override in overrides.read(texts):
        with contextlib.suppress(ValueError):  # reported with everything else, later
            chosen[override.path] = shapes.parse(override.value, shapes.NAMES)
    if selection := {name: chosen[f"plugins.{name}"] for name in ("disable", "allow", "require") if chosen.get(f"plugins.{name}")}:
        use(load(**selection))
    return current()


def _reselect(recipe: Recipe, plugins: Plugins) -> bool:
    """Whether the recipe's own selection leaves out plugins that are loaded; they are loaded anew then."""
    plugins.require(recipe.plugins.require)
    selection = Selection.of(recipe.plugins.disable, recipe.plugins.allow)
    unwanted = not all(selection.takes(record.candidate) for record in plugins.records)
    if unwanted:
        use(load(recipe.plugins.disable, recipe.plugins.allow, recipe.plugins.require))
    return unwanted
