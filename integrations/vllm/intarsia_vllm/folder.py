"""The folder that vLLM takes for a model: `config.json` with what its scheduler asks of a model, and the recipe that our model is built from.

No weights are in it: they are drawn or read by the recipe (version 0), or published by a trainer. Torch-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intarsia.config import Recipe, flatten, rebuild
from intarsia.errors import UsageError
from intarsia.plugins import Plugins

FORMAT = "intarsia"
"""The model type, the config format and the load format by which vLLM finds what `register` registers."""

RECIPE = "intarsia.json"
"""The file of the recipe's values, beside `config.json`."""

FLOATING = ("float32", "bfloat16", "float16")


def architecture(family: str) -> str:
    """What a family is called in vLLM's registry: `llama3` is `IntarsiaLlama3ForCausalLM`. The ending says to vLLM that it generates text."""
    return f"Intarsia{''.join(part[:1].upper() + part[1:] for part in re.split(r'[^0-9A-Za-z]+', family))}ForCausalLM"


def write(folder: str | Path, recipe: Recipe, plugins: Plugins, **facts: Any) -> Path:
    """Write the folder for a recipe's model; returns it. Files of the same names are replaced.

    Arguments: `facts` are those of `facts_of`.
    """
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(facts_of(recipe, plugins, **facts), indent=1) + "\n")
    (home / RECIPE).write_text(json.dumps(flatten(recipe, plugins), indent=1) + "\n")
    return home


def facts_of(
    recipe: Recipe,
    plugins: Plugins,
    *,
    max_tokens: int | None = None,
    dtype: str = "auto",
    invariant: bool = False,
    initial: bool = False,
) -> dict[str, Any]:
    """`config.json`. vLLM shares out its cache by what our cache layers declare, not by the head counts here, which only have to be plausible.

    Arguments: `max_tokens` bounds prompt and completion together; `dtype` auto is what the run computes in; `invariant` asks for batch-invariant operators, `initial` for the run's
    initial weights.
    Raises UsageError for more tokens than the model has positions, and for a dtype that vLLM cannot compute in.
    """
    model: Any = recipe.model
    entry = plugins.entry_of(model)
    name = next(name for name in plugins.registry("model").names() if name in (entry.name, entry.full_name))
    positions = model.max_positions
    if max_tokens is not None and not 2 <= max_tokens <= positions:
        raise UsageError(
            f"generator.max_tokens is {max_tokens}; this model has {positions} positions, of which prompt and completion need at least 2."
        )
    return {
        "architectures": [architecture(name)],
        "model_type": FORMAT,
        "vocab_size": model.vocab_size,
        "hidden_size": getattr(model, "dim", 1),
        "num_hidden_layers": len(getattr(model, "layers", ())) or 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        # One more than is ever asked for: a request that only scores tokens has to let the engine choose one behind them.
        "max_position_embeddings": (max_tokens or positions) + 1,
        "dtype": dtype_of(recipe, dtype),
        "intarsia": {"invariant": invariant, "initial": initial},
    }


def dtype_of(recipe: Recipe, dtype: str) -> str:
    """What the model computes in; auto is what the run does. UsageError for what vLLM cannot compute in."""
    chosen = recipe.precision.compute if dtype == "auto" else dtype
    if chosen not in FLOATING:
        raise UsageError(f"vLLM cannot compute in {chosen!r}. Set generator.dtype to one of {', '.join(FLOATING)}.")
    return chosen


def read(folder: str | Path, plugins: Plugins) -> tuple[Recipe, Mapping[str, Any]]:
    """The recipe of a folder, and what `config.json` says to our model. UsageError where it is not such a folder."""
    home = Path(folder)
    try:
        facts = json.loads((home / "config.json").read_text())["intarsia"]
        values = json.loads((home / RECIPE).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{home} is no folder that intarsia_vllm.folder.write made ({type(error).__name__}: {error}).") from error
    return rebuild(values, plugins), facts
