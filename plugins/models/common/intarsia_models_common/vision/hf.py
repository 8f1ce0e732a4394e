"""The vision tower of Qwen3-VL's kind and Hugging Face, both ways: what families that have it add to their tables. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from intarsia.contracts import HFRule
from intarsia.errors import UsageError

from intarsia_models_common.hf import check_values, placed
from intarsia_models_common.vision.config import VisionConfig, VisionLanguageModelConfig

PROCESSOR = {
    "processor_to_ours": "intarsia_multimodal.hf:processor_to_ours",
    "processor_to_theirs": "intarsia_multimodal.hf:processor_to_theirs",
}
"""For `HFTable.extra` of families that see by the processor `patches`."""
_ONLY: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh"}
_IDS = {
    "image_id": "image_token_id",
    "video_id": "video_token_id",
    "vision_start_id": "vision_start_token_id",
    "vision_end_id": "vision_end_token_id",
}
_SIDES = ("patch_size", "temporal_patch_size")
_CONVOLUTION = "flatten:" + ",".join(f"vision_config.{name}" for name in ("in_channels", "temporal_patch_size", "patch_size", "patch_size"))


def vision_rules(theirs: str = "model.visual", ours: str = "visual") -> tuple[HFRule, ...]:
    """The tower's rules: `theirs` and `ours` are its names. Convolutions are matrices of ours, and the fused projection is three."""
    pairs: list[tuple[str, str | tuple[str, ...], str]] = [("pos_embed.weight", "positions.weight", "same")]
    pairs += [
        ("patch_embed.proj.weight", "patch_embedding.weight", _CONVOLUTION),
        ("patch_embed.proj.bias", "patch_embedding.bias", "same"),
    ]
    for kind in ("weight", "bias"):
        fused = tuple(f"blocks.{{i}}.attention.{name}.{kind}" for name in ("wq", "wk", "wv"))
        pairs += [
            (f"blocks.{{i}}.norm1.{kind}", f"blocks.{{i}}.norm1.{kind}", "same"),
            (f"blocks.{{i}}.attn.qkv.{kind}", fused, "split:3"),
            (f"blocks.{{i}}.attn.proj.{kind}", f"blocks.{{i}}.attention.wo.{kind}", "same"),
            (f"blocks.{{i}}.norm2.{kind}", f"blocks.{{i}}.norm2.{kind}", "same"),
            (f"blocks.{{i}}.mlp.linear_fc1.{kind}", f"blocks.{{i}}.feed_forward.w1.{kind}", "same"),
            (f"blocks.{{i}}.mlp.linear_fc2.{kind}", f"blocks.{{i}}.feed_forward.w2.{kind}", "same"),
        ]
        for merger, place in (("merger", "merger"), ("deepstack_merger_list.{i}", "deepstack.{i}")):
            parts = (("norm", "norm"), ("linear_fc1", "w1"), ("linear_fc2", "w2"))
            pairs += [(f"{merger}.{one}.{kind}", f"{place}.{other}.{kind}", "same") for one, other in parts]
    return placed((HFRule(*pair) for pair in pairs), theirs, ours)


def ids_from(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of a `VisionLanguageModelConfig`, from the whole `config.json`. Of a text model's (no `vision_config`), those that it has."""
    return {ours: theirs[key] for ours, key in _IDS.items() if theirs.get("vision_config") or theirs.get(key) is not None}


def ids_to(ours: VisionLanguageModelConfig) -> dict[str, int]:
    """Their keys of the same ids."""
    return {key: getattr(ours, name) for name, key in _IDS.items()}


def vision_from(theirs: Mapping[str, Any]) -> VisionConfig:
    """Our config from a `vision_config`. UsageError, which names key and value, for what the tower does not have."""
    check_values(theirs, _ONLY, "vision_config.")
    sizes = {}
    for key in _SIDES:
        value = theirs[key]
        sides = set(value) if isinstance(value, list | tuple) else {value}
        if len(sides) != 1:
            raise UsageError(f"config.json says vision_config.{key} = {value!r}; the tower has square patches, one number.")
        sizes[key] = sides.pop()
    table = math.isqrt(theirs["num_position_embeddings"])
    if table**2 != theirs["num_position_embeddings"]:
        raise UsageError(
            f"config.json says vision_config.num_position_embeddings = {theirs['num_position_embeddings']}: the table of positions is a square, and this is none."
        )
    return VisionConfig(
        depth=theirs["depth"],
        dim=theirs["hidden_size"],
        hidden=theirs["intermediate_size"],
        heads=theirs["num_heads"],
        out_dim=theirs["out_hidden_size"],
        channels=theirs["in_channels"],
        patch=sizes["patch_size"],
        temporal_patch=sizes["temporal_patch_size"],
        merge=theirs["spatial_merge_size"],
        table=table,
        deepstack=tuple(theirs.get("deepstack_visual_indexes") or ()),
    )


def vision_to(ours: VisionConfig) -> dict[str, Any]:
    """Their `vision_config`, without its `model_type`. UsageError for what their classes do not have."""
    if type(ours) is not VisionConfig or ours.eps != 1e-6:
        raise UsageError(
            "The vision tower of this model was replaced, or the epsilon of its norms is not 1e-6, and their classes have no place for that, so it cannot be "
            "exported as such."
        )
    return {
        "depth": ours.depth,
        "hidden_size": ours.dim,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": ours.hidden,
        "num_heads": ours.heads,
        "in_channels": ours.channels,
        "patch_size": ours.patch,
        "spatial_merge_size": ours.merge,
        "temporal_patch_size": ours.temporal_patch,
        "out_hidden_size": ours.out_dim,
        "num_position_embeddings": ours.table**2,
        **({"deepstack_visual_indexes": list(ours.deepstack)} if ours.deepstack else {}),
    }
