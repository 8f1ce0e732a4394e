"""The vision tower gives the features and every gradient of transformers' Qwen3-VL tower, for images and videos of several sizes at once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from intarsia_models_common.build import Scope
from intarsia_models_common.vision.config import VisionConfig
from intarsia_models_common.vision.tower import VisionTower
from torch import Tensor, nn

TOLERANCE = 1e-5
GRIDS = ((1, 4, 6), (2, 2, 8), (1, 2, 2), (3, 4, 4), (1, 10, 2))
NAMES = {
    "patch_embed.proj": "patch_embedding",
    "pos_embed": "positions",
    "deepstack_merger_list": "deepstack",
    "linear_fc": "w",
    "mlp": "feed_forward",
    "attn.proj": "attention.wo",
}


def as_ours(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors by our names."""
    found = {}
    for name, value in theirs.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "attn.qkv" in name:
            found |= {
                name.replace("attn.qkv", f"attention.{each}"): part for each, part in zip(("wq", "wk", "wv"), value.chunk(3), strict=True)
            }
        else:
            found[name] = value.flatten(1) if name == "patch_embedding.weight" else value
    return found


def both(heads: int = 2, dim: int = 32) -> tuple[nn.Module, VisionTower]:
    """Their tower with random parameters, and ours with the same."""
    pytest.importorskip("transformers")
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(
        depth=4,
        hidden_size=dim,
        intermediate_size=64,
        num_heads=heads,
        in_channels=3,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=48,
        num_position_embeddings=25,
        deepstack_visual_indexes=[0, 2],
        attn_implementation="eager",
    )
    theirs = Qwen3VLVisionModel(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    scope = Scope("visual", dim, -1, 1, False, 0.02, 0.02)
    ours = VisionTower(VisionConfig(depth=4, dim=dim, hidden=64, heads=heads, out_dim=48, patch=4, table=5, deepstack=(0, 2)), scope)
    ours.load_state_dict(as_ours(theirs.state_dict()))
    return theirs, ours


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("heads_dim", [(2, 32), (1, 72)])
def test_the_tower_is_that_of_transformers(heads_dim: tuple[int, int]) -> None:
    theirs, ours = both(*heads_dim)
    patches = torch.randn(sum(t * h * w for t, h, w in GRIDS), ours.config.values)
    result = theirs(patches, torch.tensor(GRIDS))
    expected = [result.pooler_output, *result.deepstack_features]
    features, deepstack = ours(patches, GRIDS)
    found = [features, *deepstack]
    assert len(found) == len(expected) == 3
    assert max(error(one, other) for one, other in zip(found, expected, strict=True)) < TOLERANCE
    weights = [torch.randn_like(each) for each in found]
    for outputs in (found, expected):
        sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True)).backward()
    gradients = as_ours({name: parameter.grad for name, parameter in theirs.named_parameters()})
    worst = {name: error(parameter.grad, gradients[name]) for name, parameter in ours.named_parameters()}
    assert max(worst.values()) < TOLERANCE, sorted(worst.items(), key=lambda each: -each[1])[:5]
