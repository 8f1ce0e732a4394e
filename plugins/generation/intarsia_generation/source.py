"""From a path to a Generator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.checkpoint.weights import check_fit, open_weights
from intarsia.config import ModelConfig, TokenizerConfig
from intarsia.contracts import Tokenizer, WeightReader
from intarsia.errors import UsageError, did_you_mean
from intarsia.layout import DTYPE_BYTES
from intarsia.parameters import materialise_buffers, persistent_buffers
from intarsia.plugins import Plugins, current
from intarsia_checkpoint_formats.weights import CheckpointWeights
from torch import nn

from intarsia_generation.generator import Generator


def load(
    path: str | os.PathLike[str],
    *,
    tokenizer: str | TokenizerConfig | None = None,
    template: str | None = None,
    processor: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    kernels: Mapping[str, str] | None = None,
    plugins: Plugins | None = None,
    chunk: int = 512,
    batch: int = 32,
) -> Generator:
    """A Generator of the model at `path`: a run directory (its newest complete checkpoint), a checkpoint, or a folder that a checkpoint format knows.

    Arguments: `tokenizer` is a tokenizer.json, the folder it lies in, an entry's name (`byte`), or a config; None: the one that goes with the weights.
    `template` is a chat template for it, as in data.tokenizer.template (needs intarsia-chat). `processor` makes tokens and patches of images and video: an entry's name (`patches`), or a
    config; None, or the name alone: the one of the run's loader, or of the folder's `preprocessor_config.json`, if there is one. `dtype` auto is float32 on a CPU and elsewhere what the run computed in, else bfloat16. `kernels` as in a recipe. `chunk` prompt tokens
    are read at once, and `batch` sequences generated together.
    Stability: provisional.
    """
    chosen = plugins or current()
    target = devices.select(device)
    weights = open_weights(path, chosen)
    built = _tokenizer(tokenizer, template, weights, chosen)
    _check_vocabulary(built, weights.model)
    if dtype == "auto":
        computed = weights.recipe.precision.compute if isinstance(weights, CheckpointWeights) else "bfloat16"
        dtype = "float32" if target.type == "cpu" else computed
    if dtype not in DTYPE_BYTES or not getattr(torch, dtype).is_floating_point:
        floating = [name for name in DTYPE_BYTES if getattr(torch, name).is_floating_point]
        raise UsageError(f"A model cannot run in dtype {dtype!r}. {did_you_mean(dtype, floating)}")
    selection = ops.select(dict(kernels or {"*": "auto"}), chosen, devices.capabilities(), dtype)
    model = fill(weights, chosen, target, getattr(torch, dtype))
    place = Path(path).expanduser()
    return Generator(
        model,
        built,
        weights.model.max_positions,
        target,
        choices=selection.choices,
        stop_ids=weights.stop_ids,
        location=weights.location,
        step=weights.checkpoint.manifest.step if isinstance(weights, CheckpointWeights) else None,
        run=place if (place / "recipe.json").is_file() else None,
        chunk=chunk,
        batch=batch,
        processor=_processor(processor, built, weights, chosen),
    )


def _processor(choice: Any, tokenizer: Tokenizer, weights: WeightReader, plugins: Plugins) -> Callable[[], Any] | None:
    """What builds the processor that was named, else that of the run's loader or the folder's. UsageError for a name that there is not."""
    config = choice
    if choice is None:
        config = _own_processor(weights)
    elif isinstance(choice, str):
        if "processor" not in plugins.kinds():
            raise UsageError(f"The processor {choice!r} was asked for: install intarsia-multimodal.")
        made: Any = plugins.config_class(plugins.registry("processor").find(choice))
        own = _own_processor(weights)
        config = own if type(own) is made else made()

    def build() -> Any:
        # Configs of processors come with the distribution, which a model of text does without.
        from intarsia_multimodal.contracts import check_model

        processor = plugins.build(config, tokenizer)
        check_model(processor, weights.model)
        return processor

    return None if config is None else build


def _own_processor(weights: WeightReader) -> Any:
    """The config of the processor of the run's loader, or of what the folder's files say; None where there is neither."""
    if isinstance(weights, CheckpointWeights):
        return getattr(weights.recipe.data.loader, "processor", None)
    return getattr(weights, "processor", None)


def fill(weights: WeightReader, plugins: Plugins, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The whole model on one device, a tensor at a time. CheckpointError unless weights and model have the same names and shapes."""
    with torch.device("meta"):
        model: Any = plugins.build(weights.model)
    aliases = {alias: canonical for canonical, *others in model.regions().ties for alias in others}
    modules = dict(model.named_modules(remove_duplicate=False))
    named = dict(model.named_parameters(remove_duplicate=False))
    kept = persistent_buffers(model)
    check_fit(weights, {name: tuple(tensor.shape) for name, tensor in (named | kept).items() if name not in aliases})
    for name in named:
        if name not in aliases:
            owner, _, attribute = name.rpartition(".")
            wide = attribute in getattr(modules[owner], "keeps_float32", ())
            values = weights.read(name).to(device=device, dtype=torch.float32 if wide else dtype)
            parameter = nn.Parameter(values, requires_grad=False)
            for each in (name, *(alias for alias, canonical in aliases.items() if canonical == name)):
                owner, _, attribute = each.rpartition(".")
                setattr(modules[owner], attribute, parameter)
    materialise_buffers(model, device, 0)
    for name in kept:
        model.get_buffer(name).copy_(weights.read(name))
    return model.eval()


def _tokenizer(choice: str | TokenizerConfig | None, template: str | None, weights: WeightReader, plugins: Plugins) -> Tokenizer:
    """The tokenizer that was named, else the weights' own; with the chat template that was named."""
    registry = plugins.registry("tokenizer")
    config: Any = weights.tokenizer if choice is None else choice
    if isinstance(choice, str):
        name, settings = choice, {}
        if choice not in registry.names() and Path(choice).expanduser().exists():
            name, settings = "tokenizer_json", {"path": choice}
        elif os.sep in choice or choice.endswith(".json"):
            raise UsageError(f"--tokenizer: there is no {choice}.")
        made: Any = plugins.config_class(registry.find(name))
        config = made(**settings)
    if config is None:
        raise UsageError(
            f"{weights.location} has no tokenizer.json. Name one by --tokenizer PATH, or a tokenizer by name (--tokenizer byte)."
        )
    if template is not None:
        if "templated" not in registry.names():
            raise UsageError(f"The chat template {template!r} was asked for: install intarsia-chat.")
        templated: Any = plugins.config_class(registry.find("templated"))
        config = templated(tokenizer=getattr(config, "tokenizer", config), template=template)
    built: Tokenizer = plugins.build(config)
    return built


def _check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise UsageError(
            f"The tokenizer has {tokenizer.vocab_size} ids but the model's vocabulary holds {model.vocab_size}: it is not the tokenizer that this model "
            "was trained with. Name the right one by --tokenizer."
        )
