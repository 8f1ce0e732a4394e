"""What must hold between the values of a recipe, checked without torch and before anything is built."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from intarsia.config import shapes
from intarsia.config.recipe import DataConfig, ParameterGroup, Recipe
from intarsia.errors import did_you_mean
from intarsia.plugins import Plugins

DTYPES = ("float32", "bfloat16", "float16", "float64")
CHOICES = {
    "compile.mode": ("none", "model", "local"),
    "recompute.mode": ("none", "blocks"),
    "data.packing": ("concatenate", "one_per_row"),
    "train.device": ("auto", "cpu", "cuda"),
    "precision.master": DTYPES,
    "precision.compute": DTYPES,
    "precision.reduce": DTYPES,
}
AT_LEAST = {
    "train.steps": 0,
    "train.seed": 0,
    "train.sequence_length": 1,
    "train.micro_batch": 1,
    "train.global_batch": 1,
    "train.threads": 1,
    "train.log_every": 1,
    "data.epochs": 1,
    "data.prefetch": 0,
    "evaluation.every": 0,
    "evaluation.batches": 1,
    "checkpoint.every": 0,
    "checkpoint.keep_last": 0,
    "checkpoint.keep_every": 1,
    "recompute.every": 1,
    "mesh.pp": 1,
    "mesh.dp_replicate": 1,
    "mesh.cp": 1,
    "mesh.tp": 1,
    "mesh.ep": 1,
    "model.vocab_size": 1,
    "model.dim": 1,
    "model.max_positions": 1,
    "schedule.warmup_steps": 0,
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
}
INFINITE = float("inf")


def check(recipe: Recipe, plugins: Plugins | None = None) -> list[str]:
    """Every contradiction in the recipe, in words with the numbers; empty when there is none. Stability: provisional."""
    found = [*_values(recipe), *_rules(recipe), *_data(recipe.data)]
    for index, group in enumerate(recipe.parameter_groups):
        found += _group(recipe, index, group)
    return found + ([] if plugins is None else list(_extensions(recipe, plugins)))


def _values(recipe: Recipe) -> Iterator[str]:
    for path, least in AT_LEAST.items():
        value: Any = functools.reduce(getattr, path.split("."), recipe)
        if value is not None and not least <= value < INFINITE:
            yield f"`{path}` must be finite and at least {least}, and is {value}."
    for path, known in CHOICES.items():
        value = functools.reduce(getattr, path.split("."), recipe)
        if value not in known:
            yield f"`{path}` must be one of {', '.join(known)}, and is {value!r}. {did_you_mean(value, known)}"


def _rules(recipe: Recipe) -> list[str]:
    train, positions, name = recipe.train, recipe.model.max_positions, recipe.name
    bad_name = (
        not name
        or not name.isprintable()
        or len(name) > 100
        or set(name) & set('\\:*?"<>|\0')
        or name.startswith(("/", "."))
        or ".." in name.split("/")
    )
    wrong_steps = [step for step in recipe.profile.steps if not 0 <= step < train.steps]
    rules = (
        (
            recipe.mesh.dp_shard < 1 and recipe.mesh.dp_shard != -1,
            f"`mesh.dp_shard` must be at least 1, or -1 for all ranks that are left, and is {recipe.mesh.dp_shard}.",
        ),
        (
            train.clip_norm is not None and not train.clip_norm > 0,
            f"`train.clip_norm` must be greater than 0 (none: do not clip), and is {train.clip_norm}.",
        ),
        (not train.clip_norm_type > 0, f"`train.clip_norm_type` must be greater than 0, and is {train.clip_norm_type}."),
        (
            train.sequence_length > positions,
            f"`train.sequence_length` is {train.sequence_length}, but the model has only {positions} positions (`model.max_positions`): "
            "shorten the one or raise the other.",
        ),
        (
            train.micro_batch > train.global_batch,
            f"`train.micro_batch` is {train.micro_batch} rows, more than the {train.global_batch} of a whole step (`train.global_batch`): "
            "lower the one or raise the other.",
        ),
        (bad_name, f"`name` becomes part of a directory's name, and {name!r} cannot: use letters, digits, `-`, `_`, `.` and `/`."),
        (
            wrong_steps,
            f"`profile.steps` holds {wrong_steps[:1]}, but steps count from 0 and the run ends after step {train.steps - 1} (`train.steps`).",
        ),
    )
    return [text for broken, text in rules if broken]


def _data(data: DataConfig) -> Iterator[str]:
    if not data.mixture:
        yield "`data.mixture` is empty: name a source, `data.mixture.0.source=NAME`."
    for name, parts in (("mixture", data.mixture), ("evaluation", data.evaluation)):
        wrong = [(index, part.weight) for index, part in enumerate(parts) if not 0 < part.weight < INFINITE]
        yield from (f"`data.{name}.{index}.weight` must be finite and greater than 0, and is {weight}." for index, weight in wrong)
    if not 0 <= data.held_out < 1:
        yield f"`data.held_out` is a share of at least 0 and less than 1, and is {data.held_out}."


def _group(recipe: Recipe, index: int, group: ParameterGroup) -> Iterator[str]:
    path, optimizer = f"parameter_groups.{index}", type(recipe.optimizer)
    fields = {field.logical_name: shapes.shape_of(field.x_type, optimizer.__name__) for field in optimizer.__chz_fields__.values()}  # type: ignore[attr-defined]
    if group.name in ("default", *(earlier.name for earlier in recipe.parameter_groups[:index])):
        yield f"`{path}.name` is {group.name!r}, as is an earlier group's or that of all other parameters (`default`): names must differ."
    if not group.match:
        yield f"`{path}.match` is empty: give at least one glob on parameter names."
    for option, value in group.options.items():
        shape = fields.get(option)
        try:
            if not isinstance(shape, shapes.Leaf):
                raise ValueError(f"{optimizer.__name__} has no plain field {option!r}. {did_you_mean(option, fields)}")
            shapes.check(value, shape)
        except ValueError as error:
            yield f"`{path}.options.{option}`: {error}"


def _extensions(recipe: Recipe, plugins: Plugins) -> Iterator[str]:
    for key, value in recipe.extensions.items():
        entry = plugins.entry_of(value)
        if key not in (entry.name, entry.full_name):
            yield f"`extensions.{key}` holds the section of {entry.full_name}; its key must be {entry.name!r}."
