"""Qwen3: the family and its recipes."""

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
            name="qwen3",
            config="intarsia_qwen3.config:Qwen3Config",
            target="intarsia_qwen3.model:Qwen3",
            doc="Qwen3, dense and with experts: grouped-query attention with head norms, rotary positions.",
            hf="intarsia_qwen3.hf:TABLE",
            sharding="intarsia_qwen3.sharding:table",
            architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        )
    ]


@hookimpl
def offer_recipes() -> Sequence[Entry]:
    """One recipe for each size."""
    recipes = "intarsia_qwen3.recipes"
    return [
        Entry(
            name="qwen3/debug",
            target=f"{recipes}:debug",
            doc="1.8 M parameters on bytes of the standard library's source: minutes on a laptop.",
        ),
        Entry(name="qwen3/moe-debug", target=f"{recipes}:moe_debug", doc="2.0 M parameters with 8 experts, on the same bytes."),
        Entry(name="qwen3/0.6b", target=f"{recipes}:qwen3_0_6b", doc="Qwen3 0.6B, sequence 4096, bfloat16."),
        Entry(name="qwen3/1.7b", target=f"{recipes}:qwen3_1_7b", doc="Qwen3 1.7B, sequence 4096, bfloat16."),
        Entry(name="qwen3/4b", target=f"{recipes}:qwen3_4b", doc="Qwen3 4B, sequence 4096, bfloat16."),
        Entry(name="qwen3/8b", target=f"{recipes}:qwen3_8b", doc="Qwen3 8B, sequence 4096, bfloat16."),
        Entry(name="qwen3/14b", target=f"{recipes}:qwen3_14b", doc="Qwen3 14B, sequence 4096, bfloat16."),
        Entry(name="qwen3/32b", target=f"{recipes}:qwen3_32b", doc="Qwen3 32B, sequence 4096, bfloat16."),
        Entry(name="qwen3/30b-a3b", target=f"{recipes}:qwen3_30b_a3b", doc="Qwen3 30B-A3B, 128 experts, sequence 4096, bfloat16."),
        Entry(name="qwen3/235b-a22b", target=f"{recipes}:qwen3_235b_a22b", doc="Qwen3 235B-A22B, 128 experts, sequence 4096, bfloat16."),
    ]
