"""Qwen3.5: the family and its recipes."""

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
            name="qwen3_5",
            config="intarsia_qwen3_5.config:Qwen35Config",
            target="intarsia_qwen3_5.model:Qwen35",
            doc="Qwen3.5, dense and with experts: gated DeltaNet and gated attention in turns, images and video, multi-token prediction.",
            hf="intarsia_qwen3_5.hf:TABLE",
            sharding="intarsia_qwen3_5.sharding:table",
            architectures=(
                "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration",
                "Qwen3_5ForCausalLM",
                "Qwen3_5MoeForCausalLM",
            ),
        )
    ]


@hookimpl
def offer_recipes() -> Sequence[Entry]:
    """One recipe for each size."""
    recipes = "intarsia_qwen3_5.recipes"
    return [
        Entry(
            name="qwen3_5/debug",
            target=f"{recipes}:debug",
            doc="Questions on drawn images, every part of the dense models: minutes on a laptop.",
        ),
        Entry(name="qwen3_5/moe-debug", target=f"{recipes}:moe_debug", doc="The same with experts."),
        Entry(
            name="qwen3_5/text-debug", target=f"{recipes}:text_debug", doc="Bytes of the standard library's source, without a vision tower."
        ),
        Entry(name="qwen3_5/0.8b", target=f"{recipes}:qwen3_5_0_8b", doc="Qwen3.5 0.8B, sequence 8192."),
        Entry(name="qwen3_5/2b", target=f"{recipes}:qwen3_5_2b", doc="Qwen3.5 2B, sequence 8192."),
        Entry(name="qwen3_5/4b", target=f"{recipes}:qwen3_5_4b", doc="Qwen3.5 4B, sequence 8192."),
        Entry(name="qwen3_5/9b", target=f"{recipes}:qwen3_5_9b", doc="Qwen3.5 9B, sequence 8192."),
        Entry(name="qwen3_5/27b", target=f"{recipes}:qwen3_5_27b", doc="Qwen3.5 27B, sequence 8192."),
        Entry(name="qwen3_5/35b-a3b", target=f"{recipes}:qwen3_5_35b_a3b", doc="Qwen3.5 35B-A3B, sequence 8192."),
        Entry(name="qwen3_5/122b-a10b", target=f"{recipes}:qwen3_5_122b_a10b", doc="Qwen3.5 122B-A10B, sequence 8192."),
        Entry(name="qwen3_5/397b-a17b", target=f"{recipes}:qwen3_5_397b_a17b", doc="Qwen3.5 397B-A17B, sequence 8192."),
    ]
