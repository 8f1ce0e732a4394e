"""Small models of the kinds that generators serve, and recipes of them. Their weights are large enough that a wrong cache shows."""

from __future__ import annotations

from typing import Any

import chz
from intarsia.config import Recipe
from intarsia.plugins import current
from intarsia_deepseek_v3.config import DeepSeekV3Config, deepseek_v3, v3_router
from intarsia_eager.config import WholeConfig
from intarsia_llama3.config import Llama3Config, llama3
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig


def dense(window: int | None = None, softcap: float | None = None, **changes: Any) -> Llama3Config:
    """Two layers of softmax attention; with `window` the second one has it, and sinks."""
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48, "vocab_size": 264, "max_positions": 192}
    model = llama3(**{**sizes, "initial_std": 0.2, "embedding_std": 0.5, **changes})
    if window is None:
        return model
    first, second = model.layers
    attention = chz.replace(second.attention, window=window, sinks=True, softcap=softcap)
    return chz.replace(model, layers=(first, chz.replace(second, attention=attention)))


def hybrid(chunk: int = 64, **changes: Any) -> Llama3Config:
    """Three layers of Gated DeltaNet and one of attention."""
    model = dense(layers=4, **changes)
    mixer = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=6, chunk=chunk)
    return chz.replace(model, layers=(*(chz.replace(block, attention=mixer) for block in model.layers[:3]), model.layers[3]))


def experts(**changes: Any) -> DeepSeekV3Config:
    """Three layers of latent attention, of which the last two have experts, and a depth of prediction."""
    sizes = {"dim": 32, "layers": 3, "dense_layers": 1, "dense_hidden": 48, "expert_hidden": 24, "shared_experts": 1, "vocab_size": 264}
    parts = {
        "attention": MLAConfig(heads=2, kv_rank=12, q_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
        "router": v3_router(experts=8, top_k=2, groups=4, top_groups=2, scale=2.5),
        "rope": RopeConfig(interleaved=True),
    }
    return deepseek_v3(**{**sizes, **parts, "max_positions": 192, "ahead": 1, "initial_std": 0.2, "embedding_std": 0.5, **changes})


def recipe_of(model: Llama3Config | DeepSeekV3Config, **changes: Any) -> Recipe:
    """The debug recipe of the model's family with this model, and other changes."""
    name = "llama3/debug" if isinstance(model, Llama3Config) else "deepseek_v3/debug"
    recipe: Recipe = current().target(current().registry("recipe").find(name))()
    return chz.replace(recipe, model=model, **changes)


def seeing(name: str) -> Recipe:
    """A family's debug recipe, whose processor leaves an image of 64 x 96 pixels as large as it is: 24 features."""
    recipe: Recipe = current().target(current().registry("recipe").find(name))()
    loader: Any = recipe.data.loader
    loader = chz.replace(loader, processor=chz.replace(loader.processor, max_pixels=8192))
    return chz.replace(recipe, data=chz.replace(recipe.data, loader=loader), sharder=WholeConfig(), kernels={"*": "reference"})
