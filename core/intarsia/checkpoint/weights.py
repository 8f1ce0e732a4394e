"""Weights to start from or to run, wherever they lie: in whatever an installed checkpoint format knows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from intarsia import plugins as registry
from intarsia.config import ModelConfig, Recipe, flatten
from intarsia.contracts import WeightFormat, WeightReader
from intarsia.errors import CheckpointError, UsageError, did_you_mean

if TYPE_CHECKING:
    from intarsia.plugins import Plugins


def check_fit(weights: WeightReader, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError, with all that is wrong, unless the weights have exactly the names and shapes that a model wants."""
    found = weights.shapes()
    # Shapes first, since another size of the model is told best by them.
    problems = [
        f"{name} has shape {list(found[name])}, the model's has {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems += [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} belongs to nothing in the model. {did_you_mean(name, wanted)}" for name in found if name not in wanted]
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"The weights in {weights.location} do not fit the model:\n  " + "\n  ".join(problems[:8]) + more)


def model_differences(recipe: Recipe, model: ModelConfig, plugins: Plugins) -> list[str]:
    """Where a recipe's model computes something else than `model`, both sides of each. Fields whose metadata say `"computes": False` are no matter (`intarsia.config.Config`)."""
    one, other = (flatten(each, plugins) for each in (recipe, chz.replace(recipe, model=model)))
    skipped = {*_no_matter("model", recipe.model), *_no_matter("model", model)}
    paths = [path for path in one | other if path.startswith("model") and one.get(path) != other.get(path)]
    # A path is skipped with any that it lies beneath.
    told = (path for path in paths if skipped.isdisjoint(itertools.accumulate(path.split("."), "{}.{}".format)))
    return [f"{path} is {one.get(path)!r}, there {other.get(path)!r}" for path in told]


def _no_matter(path: str, node: object) -> Iterator[str]:
    """Paths of the fields of a config, and of those within, whose metadata say that the model computes the same whatever they are."""
    if isinstance(node, tuple):
        for number, item in enumerate(node):
            yield from _no_matter(f"{path}.{number}", item)
    for name, field in chz.chz_fields(node).items() if chz.is_chz(node) else ():
        if (field.metadata or {}).get("computes") is False:
            yield f"{path}.{name}"
        else:
            yield from _no_matter(f"{path}.{name}", getattr(node, name))


def open_weights(path: str | os.PathLike[str], plugins: Plugins | None = None) -> WeightReader:
    """The weights at `path`, which is a file or folder of an installed format: a run directory, a checkpoint's folder, a Hugging Face folder.

    UsageError that says what was looked for where it is none of these. Stability: provisional.
    """
    place, chosen = Path(path).expanduser(), plugins or registry.current()
    if not place.exists():
        raise UsageError(f"There is nothing at {place}.")
    asked = []
    for entry in chosen.registry("checkpoint format").entries():
        target = chosen.target(entry)()
        if isinstance(target, WeightFormat):
            if target.recognises(place):
                return target.open_weights(place)
            asked.append(f"{entry.name} ({target.looks_for})")
    raise UsageError(
        f"{place} holds no weights that can be read here. Looked for: {'; '.join(asked) or 'nothing, since no plugin reads weights'}."
    )
