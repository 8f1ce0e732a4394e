"""DeepSeek-V3 and its kin: the family and its recipes."""

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
            name="deepseek_v3",
            config="intarsia_deepseek_v3.config:DeepSeekV3Config",
            target="intarsia_deepseek_v3.model:DeepSeekV3",
            doc="DeepSeek-V3, V2 and Moonlight: latent attention, mixtures of experts, multi-token prediction.",
            hf="intarsia_deepseek_v3.hf:TABLE",
            sharding="intarsia_deepseek_v3.sharding:table",
            architectures=("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"),
        )
    ]


@hookimpl
def offer_recipes() -> Sequence[Entry]:
    """One recipe for each size."""
    recipes = "intarsia_deepseek_v3.recipes"
    return [
        Entry(
            name="deepseek_v3/debug",
            target=f"{recipes}:debug",
            doc="2 M parameters with every part of V3, on bytes of the standard library's source: minutes on a laptop.",
        ),
        Entry(
            name="deepseek_v3/671b",
            target=f"{recipes}:deepseek_v3_671b",
            doc="DeepSeek-V3 671B with multi-token prediction, sequence 4096.",
        ),
        Entry(name="deepseek_v3/moonlight-16b", target=f"{recipes}:moonlight_16b", doc="Moonlight-16B-A3B, sequence 8192, Muon."),
        Entry(name="deepseek_v3/v2-lite", target=f"{recipes}:deepseek_v2_lite", doc="DeepSeek-V2-Lite 16B, sequence 4096."),
    ]
