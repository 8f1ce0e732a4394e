"""Settings as JSON, by the names of their entries, so that another process with the same plugins makes them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intarsia.config import Config, Recipe, flatten, rebuild
from intarsia.config.shapes import Node
from intarsia.config.tree import Schema, plant, together
from intarsia.errors import UsageError
from intarsia.plugins import Plugins, import_reference


def plain_config(config: Config, plugins: Plugins) -> dict[str, Any]:
    """JSON of a config that is an entry's: `{"kind": ..., "values": {path: plain value}}`. The inverse of `config_of`."""
    kind = plugins.entry_of(config).kind
    base = import_reference(plugins.registry(kind).base)
    return {"kind": kind, "values": {path: branch.value for path, branch in Schema(plugins).grow(config, Node(base), "", "").flat()}}


def config_of(plain: Mapping[str, Any], plugins: Plugins) -> Any:
    """The config of `plain_config`. UsageError where the values make none."""
    base = import_reference(plugins.registry(plain["kind"]).base)
    problems: list[str] = []
    root = plant({path: value for path, value in plain["values"].items() if path}, "values")
    if "" in plain["values"]:
        root.value = plain["values"][""]
    config = Schema(plugins).build(root, Node(base), "", problems)
    if problems:
        raise UsageError(together(f"The values make no {plain['kind']}", problems))
    return config


def plain_recipe(recipe: Recipe | Mapping[str, Any], plugins: Plugins) -> dict[str, Any]:
    """JSON of a recipe; what is JSON already is passed on."""
    return dict(recipe) if isinstance(recipe, Mapping) else flatten(recipe, plugins)


def recipe_of(plain: Mapping[str, Any], plugins: Plugins) -> Recipe:
    """The recipe of `plain_recipe`."""
    return rebuild(plain, plugins)
