"""The weights of Intarsia's own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from intarsia.config import ModelConfig, Recipe, TokenizerConfig, load_saved, rebuild
from intarsia.contracts import Box
from intarsia.errors import UsageError

from intarsia_checkpoint_formats.reader import Checkpoint

if TYPE_CHECKING:
    from intarsia.plugins import Plugins
    from torch import Tensor

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
