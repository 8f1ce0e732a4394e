"""The entries of vision parts. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_VISION = "intarsia_models_common.vision"


@hookimpl
def offer_components() -> Sequence[Entry]:
    """The tower and its norm."""
    return [
        Entry(
            name="vision_tower",
            config=f"{_VISION}.config:VisionConfig",
            target=f"{_VISION}.tower:VisionTower",
            doc="A vision transformer over patches of images and video, with merged features (Qwen3-VL's).",
        ),
        Entry(
            name="layer_norm",
            config=f"{_VISION}.config:LayerNormConfig",
            target=f"{_VISION}.norm:LayerNorm",
            doc="Layer norm with a weight and a bias.",
        ),
    ]


@hookimpl
def offer_operators() -> Sequence[Entry]:
    """What kernels may replace."""
    return [
        Entry(
            name="layer_norm",
            target=f"{_VISION}.operators:LAYER_NORM",
            doc="Layer norm, in float32 and cast once.",
        ),
        Entry(
            name="segment_attention",
            target=f"{_VISION}.operators:SEGMENT_ATTENTION",
            doc="Attention within segments of packed rows, in both directions.",
        ),
    ]
