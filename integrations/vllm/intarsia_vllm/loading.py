"""How vLLM reads our folder, and how our model gets its first weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from intarsia_vllm.folder import FORMAT


class IntarsiaConfig(PreTrainedConfig):
    """`config.json` of our folder. The model itself is in the recipe beside it."""

    model_type = FORMAT


class FolderParser(ConfigParserBase):
    """The config format `intarsia`."""

    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None, code_revision: str | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """What `config.json` says, as it is and as a config object."""
        facts = json.loads((Path(model) / "config.json").read_text())
        found: Any = IntarsiaConfig
        return facts, found(name_or_path=str(model), **facts)


class InitialLoader(BaseModelLoader):
    """The load format `intarsia`: a run's initial weights where they are asked for, else none until the first update."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is anywhere else."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill the model where it begins with version 0."""
        found: Any = model
        found.fill_initial()
