"""What must hold between the values of a recipe, checked without torch and before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from intarsia.config import shapes
from intarsia.config.recipe import DataConfig, Recipe
from intarsia.errors import IntarsiaError, did_you_mean
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
}


def check(recipe: Recipe, plugins: Plugins | None = None) -> list[str]:
    """Every contradiction in the recipe, in words with the numbers; empty when there is none. Stability: provisional."""
    problems = [*_ranges(recipe), *_choices(recipe), *_batches(recipe), *_data(recipe.data), *_optimizer(recipe), *_names(recipe)]
    return problems + (_extensions(recipe, plugins) if plugins else [])


def _value(recipe: Recipe, path: str) -> Any:
    value: Any = recipe
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _ranges(recipe: Recipe) -> Iterator[str]:
    for path, least in AT_LEAST.items():
        value = _value(recipe, path)
        if value is not None and value < least:
            yield f"`{path}` must be at least {least}, and is {value}."
    if recipe.mesh.dp_shard < 1 and recipe.mesh.dp_shard != -1:
        yield f"`mesh.dp_shard` must be at least 1, or -1 for all ranks that are left, and is {recipe.mesh.dp_shard}."
    for path, positive in (("train.clip_norm", recipe.train.clip_norm), ("train.clip_norm_type", recipe.train.clip_norm_type)):
        if positive is not None and not positive > 0:
            yield f"`{path}` must be greater than 0, and is {positive}."
    for path, value in (("optimizer.lr", recipe.optimizer.lr), ("optimizer.weight_decay", recipe.optimizer.weight_decay)):
        if not 0 <= value < float("inf"):
            yield f"`{path}` must be a finite number of at least 0, and is {value}."


def _choices(recipe: Recipe) -> Iterator[str]:
    for path, known in CHOICES.items():
        if _value(recipe, path) not in known:
            yield f"`{path}` must be one of {', '.join(known)}, and is {_value(recipe, path)!r}. {did_you_mean(_value(recipe, path), known)}"


def _batches(recipe: Recipe) -> Iterator[str]:
    train, positions = recipe.train, recipe.model.max_positions
    if train.sequence_length > positions:
        yield (
            f"`train.sequence_length` is {train.sequence_length}, but the model has only {positions} positions (`model.max_positions`): "
            "shorten the one or raise the other."
        )
    if train.micro_batch > train.global_batch:
        yield (
            f"`train.micro_batch` is {train.micro_batch} rows, more than the {train.global_batch} of a whole step (`train.global_batch`): "
            "raise the one or lower the other."
        )


def _data(data: DataConfig) -> Iterator[str]:
    if not data.mixture:
        yield "`data.mixture` is empty: name a source, `data.mixture.0.source=NAME`."
    for name in ("mixture", "evaluation"):
        for index, part in enumerate(getattr(data, name)):
            if not 0 < part.weight < float("inf"):
                yield f"`data.{name}.{index}.weight` must be a finite number greater than 0, and is {part.weight}."
    if not 0 <= data.held_out < 1:
        yield f"`data.held_out` is a share of at least 0 and less than 1, and is {data.held_out}."


def _optimizer(recipe: Recipe) -> Iterator[str]:
    fields = {field.logical_name: field for field in type(recipe.optimizer).__chz_fields__.values()}  # type: ignore[attr-defined]
    names = [group.name for group in recipe.parameter_groups]
    for index, group in enumerate(recipe.parameter_groups):
        path = f"parameter_groups.{index}"
        if group.name == "default":
            yield f"`{path}.name` is 'default', which is the name of the group of all other parameters."
        if names.index(group.name) < index:
            yield f"`{path}.name` is {group.name!r}, as is `parameter_groups.{names.index(group.name)}.name`: names must differ."
        if not group.match:
            yield f"`{path}.match` is empty: give at least one glob on parameter names."
        for option, value in group.options.items():
            if option not in fields:
                yield f"`{path}.options.{option}`: {type(recipe.optimizer).__name__} has no field {option!r}. {did_you_mean(option, fields)}"
                continue
            shape = shapes.shape_of(fields[option].x_type, option)
            try:
                assert isinstance(shape, shapes.Leaf), "is no plain value and cannot differ between groups"
                shapes.check(value, shape)
            except (AssertionError, ValueError) as error:
                yield f"`{path}.options.{option}`: {error}."


def _names(recipe: Recipe) -> Iterator[str]:
    if not recipe.name or set(recipe.name) & set('\\:*?"<>|\0') or recipe.name.startswith(("/", ".")) or ".." in recipe.name.split("/"):
        yield f"`name` becomes part of a directory's name: {recipe.name!r} cannot. Use letters, digits, `-`, `_`, `.` and `/`."
    if negative := [step for step in recipe.profile.steps if step < 0]:
        yield f"`profile.steps` counts from 0, and holds {negative[0]}."
    late = [step for step in recipe.profile.steps if step >= recipe.train.steps]
    if late:
        yield f"`profile.steps` holds {late[0]}, but the run ends after step {recipe.train.steps - 1} (`train.steps` is {recipe.train.steps})."


def _extensions(recipe: Recipe, plugins: Plugins) -> list[str]:
    problems = []
    for key, value in recipe.extensions.items():
        try:
            entry = plugins.entry_of(value)
        except IntarsiaError as error:
            problems.append(f"`extensions.{key}`: {error}")
            continue
        if key not in (entry.name, entry.full_name):
            problems.append(f"`extensions.{key}` holds the section of {entry.full_name}; its key must be {entry.name!r}.")
    return problems
