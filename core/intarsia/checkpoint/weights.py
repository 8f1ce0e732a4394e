"""Weights to start from or to run, wherever they lie: a run, a checkpoint, or a folder that a checkpoint format knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from intarsia import plugins as registry
from intarsia.checkpoint.manifest import MANIFEST, MARKER
from intarsia.checkpoint.reader import BASE, Checkpoint, open_checkpoint
from intarsia.config import ModelConfig, Recipe, TokenizerConfig, flatten, load_saved, rebuild
from intarsia.contracts import Box, WeightFormat, WeightReader
from intarsia.errors import CheckpointError, UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from intarsia.plugins import Plugins

NO_MATTER = ("max_positions", "initial_std", "embedding_std")

OWNER = "model/"
"""What the keys of a checkpoint's weights begin with."""


class CheckpointWeights:
    """The weights of an Intarsia checkpoint; see `intarsia.contracts.WeightReader`."""

    stop_ids: tuple[int, ...] = ()

    def __init__(self, checkpoint: Checkpoint, run: Path | None, plugins: Plugins):
        self.checkpoint, self.location = checkpoint, checkpoint.location
        self._run, self._plugins = run, plugins
        self._recipe: Recipe | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe that the checkpoint was saved under, else its run's."""
        if self._recipe is None:
            values = self.checkpoint.manifest.facts.get("recipe")
            if values:
                self._recipe = rebuild(values, self._plugins)
            elif self._run is not None:
                self._recipe = load_saved(self._run, plugins=self._plugins).recipe
            else:
                raise UsageError(f"{self.location} does not say which model it holds: no recipe was saved with it, and it lies in no run.")
        return self._recipe

    @property
    def model(self) -> ModelConfig:
        """As in the recipe."""
        return self.recipe.model

    @property
    def tokenizer(self) -> TokenizerConfig | None:
        """As in the recipe."""
        return self.recipe.data.tokenizer

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of parameters and persistent buffers."""
        found = self.checkpoint.manifest.tensors
        return {key.removeprefix(OWNER): record.shape for key, record in found.items() if key.startswith(OWNER)}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """See `Checkpoint.read`."""
        return self.checkpoint.read(OWNER + name, box)


def check_fit(weights: WeightReader, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError, with all that is wrong, unless the weights have exactly the names and shapes that a model wants."""
    found = weights.shapes()
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} belongs to nothing in the model. {did_you_mean(name, wanted)}" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {list(found[name])}, the model's has {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"The weights in {weights.location} do not fit the model:\n  " + "\n  ".join(problems[:8]) + more)


def model_differences(recipe: Recipe, model: ModelConfig, plugins: Plugins) -> list[str]:
    """Where a recipe's model computes something else than `model`, both sides of each. How parameters start is no matter, nor is `max_positions`."""
    one, other = (flatten(each, plugins) for each in (recipe, chz.replace(recipe, model=model)))
    paths = [path for path in one | other if path.startswith("model") and path.rpartition(".")[2] not in NO_MATTER]
    return [f"{path} is {one.get(path)!r}, there {other.get(path)!r}" for path in paths if one.get(path) != other.get(path)]


def open_weights(path: str | os.PathLike[str], plugins: Plugins | None = None) -> WeightReader:
    """The weights at `path`: a run directory (its newest complete checkpoint), a checkpoint's folder, or a folder of a format that says it knows it.

    UsageError that says what was looked for where it is none of these. Stability: provisional.
    """
    place, chosen = Path(path).expanduser(), plugins or registry.current()
    if not place.exists():
        raise UsageError(f"There is nothing at {place}.")
    run = next((each for each in (place, place.parent.parent) if (each / "recipe.json").is_file()), None)
    if run == place or any((place / name).exists() for name in (MARKER, MANIFEST, BASE)):
        return CheckpointWeights(open_checkpoint(place, plugins=chosen), run, chosen)
    asked = ["a run directory (recipe.json, checkpoints/)", f"a checkpoint ({MANIFEST}, {MARKER})"]
    for entry in chosen.registry("checkpoint format").entries():
        target = chosen.target(entry)()
        if isinstance(target, WeightFormat):
            if target.recognises(place):
                return target.open_weights(place)
            asked.append(f"{entry.name} ({target.looks_for})")
    raise UsageError(f"{place} holds no weights that can be read here. Looked for: {'; '.join(asked)}.")
