"""Llama 3: the family and its recipes."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry, ModelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_models() -> Sequence[ModelEntry]:
    """The family."""
    return [
        ModelEntry(
            name="llama3",
            config="intarsia_llama3.config:Llama3Config",
            target="intarsia_llama3.model:Llama3",
            doc="Llama 3 dense decoder: grouped-query attention, rotary positions, SwiGLU.",
            hf="intarsia_llama3.hf:TABLE",
            sharding="intarsia_llama3.sharding:TABLE",
            architectures=("LlamaForCausalLM",),
        )
    ]


@hookimpl
def offer_recipes() -> Sequence[Entry]:
    """One recipe for each size."""
    recipes = "intarsia_llama3.recipes"
    return [
        Entry(
            name="llama3/debug",
            target=f"{recipes}:debug",
            doc="1.8 M parameters on bytes of the standard library's source: minutes on a laptop.",
        ),
        Entry(name="llama3/1b", target=f"{recipes}:llama3_1b", doc="Llama 3.2 1B, sequence 8192, bfloat16."),
        Entry(name="llama3/3b", target=f"{recipes}:llama3_3b", doc="Llama 3.2 3B, sequence 8192, bfloat16."),
        Entry(name="llama3/8b", target=f"{recipes}:llama3_8b", doc="Llama 3.1 8B, sequence 8192, bfloat16."),
        Entry(name="llama3/70b", target=f"{recipes}:llama3_70b", doc="Llama 3.1 70B, sequence 8192, bfloat16."),
        Entry(name="llama3/405b", target=f"{recipes}:llama3_405b", doc="Llama 3.1 405B, sequence 8192, bfloat16."),
    ]
