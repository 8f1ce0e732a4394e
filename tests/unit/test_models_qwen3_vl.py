"""Qwen3-VL's sizes, configs and their way to Hugging Face and back, and its sharding table; no released weights."""

from __future__ import annotations

import re
from typing import Any

import chz
import pytest
import torch
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_models_common.config import AttentionConfig, RMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.moe.config import MoEConfig, SigmoidRouterConfig, softmax_experts
from intarsia_models_common.vision.config import VisionConfig
from intarsia_qwen3_vl import config as sizes
from intarsia_qwen3_vl import sharding
from intarsia_qwen3_vl.config import Qwen3VLConfig, qwen3_vl
from intarsia_qwen3_vl.hf import config_to_ours, config_to_theirs

PUBLISHED = {
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
    "qwen3_vl_30b_a3b": 31_070_754_032,
    "qwen3_vl_235b_a22b": 235_670_022_896,
}
TOWERS = {
    "qwen3_vl_2b": 406_957_056,
    "qwen3_vl_4b": 415_347_712,
    "qwen3_vl_8b": 576_388_336,
    "qwen3_vl_32b": 595_266_800,
    "qwen3_vl_30b_a3b": 538_631_408,
    "qwen3_vl_235b_a22b": 576_388_336,
}
ACTIVE = {"qwen3_vl_30b_a3b": 3.89e9, "qwen3_vl_235b_a22b": 22.77e9}
DEBUG = ("debug", "moe_debug")


def meta(config: Qwen3VLConfig) -> Any:
    with torch.device("meta"):
        return current().build(config)


def tiny(**changes: Any) -> Qwen3VLConfig:
    settings: dict[str, Any] = {
        "dim": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "feed_forward": SwiGLUConfig(hidden=48),
        "vision": VisionConfig(depth=3, dim=16, hidden=24, heads=2, out_dim=32, patch=4, table=4, deepstack=(0, 2)),
        "vocab_size": 96,
        "rope": RopeConfig(theta=5e6, sections=(2, 1, 1)),
        "max_positions": 128,
        "image_id": 90,
        "video_id": 91,
        "vision_start_id": 92,
        "vision_end_id": 93,
    }
    return qwen3_vl(**{**settings, **changes})


# ---------------------------------------------------------------- sizes


def text_by_formula(config: Qwen3VLConfig) -> int:
    """Section (d) of the sheet of Qwen3."""
    attention, feed_forward, wide = config.layers[0].attention, config.layers[0].feed_forward, config.dim
    assert isinstance(attention, AttentionConfig)
    layer = wide * attention.head_dim * (2 * attention.heads + 2 * attention.kv_heads) + 2 * wide + 2 * attention.head_dim
    if isinstance(feed_forward, MoEConfig):
        layer += feed_forward.router.experts * (3 * wide * feed_forward.hidden + wide)
    else:
        assert isinstance(feed_forward, SwiGLUConfig)
        layer += 3 * wide * feed_forward.hidden
    return config.vocab_size * wide * (2 - config.tied) + len(config.layers) * layer + wide


def tower_by_formula(config: VisionConfig) -> int:
    """Section (b2)."""
    c, f, out = config.dim, config.hidden, config.out_dim
    embedding = (config.values + 1) * c + config.table**2 * c
    block = 4 * c * c + 4 * c + 2 * c * f + f + c + 4 * c
    gathered = config.merge**2 * c
    merger = gathered * gathered + gathered + gathered * out + out
    return embedding + config.depth * block + merger + 2 * c + len(config.deepstack) * (merger + 2 * gathered)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    config = getattr(sizes, name)()
    model = meta(config)
    tower = sum(parameter.numel() for parameter in model.visual.parameters())
    assert tower == TOWERS[name] == tower_by_formula(config.vision)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == PUBLISHED[name] == text_by_formula(config) + tower


@pytest.mark.parametrize("name", ["qwen3_vl_4b", *ACTIVE])
def test_flops_are_those_of_the_layers(name):
    """6 for each weight that a token meets but the embedding's row, and attention over half of the sequence."""
    config = getattr(sizes, name)()
    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    active = text_by_formula(config)
    if isinstance(feed_forward, MoEConfig):
        idle = feed_forward.router.experts - feed_forward.router.top_k
        active -= len(config.layers) * idle * 3 * config.dim * feed_forward.hidden
        assert active + TOWERS[name] == pytest.approx(ACTIVE[name], rel=2e-3)
    norms = len(config.layers) * (2 * config.dim + 2 * attention.head_dim) + config.dim
    tokens = 8192
    mixing = len(config.layers) * 12 * attention.heads * attention.head_dim * (tokens + 1) / 2
    # A tied head is multiplied by as well: then the embedding's row is not counted twice.
    lookup = 0 if config.tied else config.vocab_size * config.dim
    assert meta(config).flops_per_token(tokens) == pytest.approx(6 * (active - norms - lookup) + mixing, rel=1e-12)


@pytest.mark.parametrize("name", [*DEBUG, *PUBLISHED])
def test_the_table_of_roles_fits_the_model(name):
    config = getattr(sizes, name)()
    model = meta(config)
    rows = sharding.table(config)
    modules = [found for found, _ in model.named_modules()]

    def matched(pattern: str) -> list[str]:
        form = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        return [found for found in modules if form.fullmatch(found)]

    places = {pattern: matched(pattern) for pattern, _, _ in rows}
    assert all(places.values()), [pattern for pattern, found in places.items() if not found]
    covered = {found for each in places.values() for found in each}
    bare = [
        found
        for found, module in model.named_modules()
        if list(module.parameters(recurse=False)) and not any(f"{found}.".startswith(f"{place}.") for place in covered)
    ]
    assert not bare
    assert len({row[:2] for row in rows}) == len(rows)


def test_the_whole_of_the_recipes_builds():
    found = [entry for entry in current().registry("recipe").entries() if entry.owner == "intarsia-qwen3-vl"]
    assert len(found) == len(PUBLISHED) + len(DEBUG)
    for entry in found:
        recipe = current().target(entry)()
        assert recipe.train.sequence_length <= recipe.model.max_positions, entry.name


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", [*DEBUG, *PUBLISHED])
def test_config_goes_to_hugging_face_and_back(name):
    """But for how parameters start."""
    config = getattr(sizes, name)()
    theirs = config_to_theirs(config)
    vision = chz.replace(config.vision, position_std=None)
    assert config_to_ours(theirs) == chz.replace(config, initial_std=0.02, embedding_std=0.02, vision=vision)
    moe = isinstance(config.layers[0].feed_forward, MoEConfig)
    assert theirs["architectures"] == [f"Qwen3VL{'Moe' if moe else ''}ForConditionalGeneration"]


def released() -> dict[str, Any]:
    """What the folder of Qwen3-VL-30B-A3B says."""
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "decoder_sparse_step": 1,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "use_cache": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": False,
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4304,
            "model_type": "qwen3_vl_moe",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2048,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


def test_the_released_config_is_read():
    assert config_to_ours(released()) == sizes.qwen3_vl_30b_a3b()
    theirs = released()
    theirs["text_config"]["num_local_experts"] = theirs["text_config"].pop("num_experts")
    assert config_to_ours(theirs) == sizes.qwen3_vl_30b_a3b()


@pytest.mark.parametrize(
    "key,value",
    [
        ("text_config.attention_bias", True),
        ("text_config.hidden_act", "gelu"),
        ("text_config.decoder_sparse_step", 2),
        ("text_config.mlp_only_layers", [0]),
        ("text_config.norm_topk_prob", False),
        ("vision_config.hidden_act", "silu"),
        ("vision_config.num_position_embeddings", 2305),
        ("vision_config.patch_size", [16, 14]),
    ],
)
def test_import_refuses_what_is_not_had_by_name(key, value):
    part, _, field = key.partition(".")
    theirs = config_to_theirs(tiny(feed_forward=softmax_experts(4, 2, 16)))
    with pytest.raises(UsageError, match=re.escape(f"{key} = {value!r}")):
        config_to_ours({**theirs, part: {**theirs[part], field: value}})


def test_import_refuses_positions_of_one_axis_and_of_axes_that_do_not_take_turns():
    theirs = config_to_theirs(tiny())
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": None}
    with pytest.raises(UsageError, match="mrope_section"):
        config_to_ours({**theirs, "text_config": {**theirs["text_config"], **plain}})
    settings = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    with pytest.raises(UsageError, match="mrope_interleaved"):
        config_to_ours({**theirs, "text_config": {**theirs["text_config"], "rope_parameters": settings, "rope_scaling": None}})


def test_export_refuses_what_their_classes_lack():
    plain = tiny()
    block = plain.layers[0]
    assert isinstance(block.attention, AttentionConfig) and plain.vision is not None
    bare = AttentionConfig(heads=4, kv_heads=2, head_dim=8)
    router = MoEConfig(router=SigmoidRouterConfig(experts=4, top_k=2), hidden=16)

    def alike(changed: Any) -> Qwen3VLConfig:
        return chz.replace(plain, layers=(changed,) * 3)

    cases = {
        "blocks or norms differ": chz.replace(plain, layers=(block, block, chz.replace(block, feed_forward=SwiGLUConfig(hidden=40)))),
        "one norm epsilon": chz.replace(plain, norm=RMSNormConfig(eps=1e-3)),
        "norms over queries": alike(chz.replace(block, attention=bare)),
        "no window": alike(chz.replace(block, attention=chz.replace(block.attention, window=4))),
        "three axes": chz.replace(plain, rope=RopeConfig(theta=5e6)),
        "have a vision tower": chz.replace(plain, vision=None),
        "softmax router": tiny(feed_forward=router),
        "epsilon of its norms": tiny(vision=chz.replace(plain.vision, eps=1e-5)),
    }
    for words, config in cases.items():
        with pytest.raises(UsageError, match=words):
            config_to_theirs(config)
