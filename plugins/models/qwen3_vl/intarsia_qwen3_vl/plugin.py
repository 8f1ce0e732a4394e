"""Qwen3-VL: the family and its recipes."""

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
            name="qwen3_vl",
            config="intarsia_qwen3_vl.config:Qwen3VLConfig",
            target="intarsia_qwen3_vl.model:Qwen3VL",
            doc="Qwen3-VL, dense and with experts: images and video by a vision tower, DeepStack, positions in time, height and width.",
            hf="intarsia_qwen3_vl.hf:TABLE",
            sharding="intarsia_qwen3_vl.sharding:table",
            architectures=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        )
    ]


@hookimpl
def offer_recipes() -> Sequence[Entry]:
    """One recipe for each size."""
    recipes = "intarsia_qwen3_vl.recipes"
    return [
        Entry(
            name="qwen3_vl/debug",
            target=f"{recipes}:debug",
            doc="Questions on drawn images, every part of the dense models: minutes on a laptop.",
        ),
        Entry(name="qwen3_vl/moe-debug", target=f"{recipes}:moe_debug", doc="The same with experts."),
        Entry(name="qwen3_vl/2b", target=f"{recipes}:qwen3_vl_2b", doc="Qwen3-VL 2B, sequence 8192."),
        Entry(name="qwen3_vl/4b", target=f"{recipes}:qwen3_vl_4b", doc="Qwen3-VL 4B, sequence 8192."),
        Entry(name="qwen3_vl/8b", target=f"{recipes}:qwen3_vl_8b", doc="Qwen3-VL 8B, sequence 8192."),
        Entry(name="qwen3_vl/32b", target=f"{recipes}:qwen3_vl_32b", doc="Qwen3-VL 32B, sequence 8192."),
        Entry(name="qwen3_vl/30b-a3b", target=f"{recipes}:qwen3_vl_30b_a3b", doc="Qwen3-VL 30B-A3B, sequence 8192."),
        Entry(name="qwen3_vl/235b-a22b", target=f"{recipes}:qwen3_vl_235b_a22b", doc="Qwen3-VL 235B-A22B, sequence 8192."),
    ]
