"""The building blocks' entries."""

from __future__ import annotations

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_CONFIG = "intarsia_models_common.config"


@hookimpl
def offer_operators() -> list[Entry]:
    return [
        Entry(
            name="scaled_linear",
            target="intarsia_models_common.scaled_linear:scaled_linear",
            doc="A linear layer that reads its weight as float8 with one scale for each tile.",
        ),
        Entry(
            name="offset_rms_norm",
            target="intarsia_models_common.norm:offset_rms_norm",
            doc="Root-mean-square norm times 1 plus the weight, cast once.",
        ),
        Entry(
            name="sigmoid_gate",
            target="intarsia_models_common.attention:sigmoid_gate",
            doc="A product with the sigmoid of a gate.",
        ),
    ]


@hookimpl
def offer_components() -> list[Entry]:
    return [
        Entry(
            name="block",
            config=f"{_CONFIG}:BlockConfig",
            target="intarsia_models_common.block:Block",
            doc="Pre-norm residual block: attention, then feed-forward.",
        ),
        Entry(
            name="attention",
            config=f"{_CONFIG}:AttentionConfig",
            target="intarsia_models_common.attention:Attention",
            doc="Causal softmax attention with grouped key/value heads.",
        ),
        Entry(
            name="mla",
            config=f"{_CONFIG}:MLAConfig",
            target="intarsia_models_common.mla:MLA",
            doc="Multi-head latent attention: a compressed key/value latent for each token.",
        ),
        Entry(
            name="swiglu",
            config=f"{_CONFIG}:SwiGLUConfig",
            target="intarsia_models_common.feed_forward:SwiGLU",
            doc="Gated feed-forward layer, down(silu(gate x) * up x).",
        ),
        Entry(
            name="rms_norm",
            config=f"{_CONFIG}:RMSNormConfig",
            target="intarsia_models_common.norm:RMSNorm",
            doc="Root-mean-square norm with a weight.",
        ),
        Entry(
            name="offset_rms_norm",
            config=f"{_CONFIG}:OffsetRMSNormConfig",
            target="intarsia_models_common.norm:OffsetRMSNorm",
            doc="Root-mean-square norm times 1 plus the weight.",
        ),
        Entry(
            name="rope",
            config=f"{_CONFIG}:RopeConfig",
            target="intarsia_models_common.rope:Rope",
            doc="Rotary positions: plain, linear, llama3 and YaRN frequencies.",
        ),
    ]
