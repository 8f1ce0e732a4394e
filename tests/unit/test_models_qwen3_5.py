"""Qwen3.5's sizes, configs and their way to Hugging Face and back, its sharding table and its depth of prediction; no released weights."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import chz
import pytest
import torch
import torch.nn.functional as F
from intarsia.contracts import Batch
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_eager.following import with_following
from intarsia_huggingface.rules import experts_of, whole_numbers
from intarsia_models_common.config import AttentionConfig, OffsetRMSNormConfig, RMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.moe.config import GatedSwiGLUConfig, MoEConfig, SoftmaxRouterConfig
from intarsia_models_common.moe.shared import GatedSwiGLU
from intarsia_models_common.vision.config import VisionConfig
from intarsia_qwen3_5 import config as sizes
from intarsia_qwen3_5 import sharding
from intarsia_qwen3_5.config import Qwen35Config, experts, in_turns, qwen3_5
from intarsia_qwen3_5.hf import TABLE, config_to_ours, config_to_theirs
from intarsia_testing.model import fill, outputs, predictions

PUBLISHED = {
    "qwen3_5_0_8b": 852_985_920,
    "qwen3_5_2b": 2_213_241_664,
    "qwen3_5_4b": 4_539_265_536,
    "qwen3_5_9b": 9_409_813_744,
    "qwen3_5_27b": 27_356_728_560,
    "qwen3_5_35b_a3b": 35_107_181_936,
    "qwen3_5_122b_a10b": 122_562_817_776,
    "qwen3_5_397b_a17b": 396_802_360_816,
}
ACTIVE = {"qwen3_5_35b_a3b": 3.90e9, "qwen3_5_122b_a10b": 10.22e9, "qwen3_5_397b_a17b": 17.81e9}
DEBUG = ("debug", "moe_debug", "text_debug")
FULL = AttentionConfig(heads=4, kv_heads=2, head_dim=16, qk_norm=OffsetRMSNormConfig(eps=1e-6), gate=True)
LINEAR = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=8)


def meta(config: Qwen35Config) -> Any:
    with torch.device("meta"):
        return current().build(config)


def tiny(ahead: int = 1, **changes: Any) -> Qwen35Config:
    settings: dict[str, Any] = {
        "dim": 32,
        "mixers": in_turns(LINEAR, FULL, 4),
        "feed_forward": SwiGLUConfig(hidden=48),
        "vision": VisionConfig(depth=2, dim=16, hidden=24, heads=2, out_dim=32, patch=4, table=4),
        "ahead_mixer": FULL,
        "ahead": ahead,
        "vocab_size": 96,
        "rope": RopeConfig(theta=1e7, dim=8, sections=(2, 1, 1)),
        "max_positions": 128,
        "image_id": 90,
        "video_id": 91,
        "vision_start_id": 92,
        "vision_end_id": 93,
    }
    return qwen3_5(**{**settings, **changes})


# ---------------------------------------------------------------- sizes


def by_formula(config: Qwen35Config) -> tuple[int, int, int]:
    """Section (d) of the sheet: the text model, its layer of multi-token prediction, and what of both no token of a mixture meets."""
    wide = config.dim
    full = next(block.attention for block in config.layers if isinstance(block.attention, AttentionConfig))
    linear = next(block.attention for block in config.layers if isinstance(block.attention, GatedDeltaNetConfig))
    heads, kv_heads, keys, values = full.heads, full.kv_heads, linear.key_heads, linear.value_heads
    softmax = wide * 256 * (2 * heads + 2 * kv_heads) + heads * 256 * wide + 512
    delta = wide * 128 * (2 * keys + values) + wide * 128 * values + 2 * wide * values
    delta += (2 * keys + values) * 128 * 4 + 2 * values + 128 + values * 128 * wide
    feed_forward = config.layers[0].feed_forward
    idle = 0
    if isinstance(feed_forward, MoEConfig):
        assert isinstance(feed_forward.shared, GatedSwiGLUConfig)
        count, expert = feed_forward.router.experts, 3 * wide * feed_forward.hidden
        channel = count * expert + count * wide + 3 * wide * feed_forward.shared.hidden + wide
        idle = (count - feed_forward.router.top_k) * expert
    else:
        assert isinstance(feed_forward, SwiGLUConfig)
        channel = 3 * wide * feed_forward.hidden
    layers = len(config.layers)
    text = layers // 4 * softmax + 3 * layers // 4 * delta + layers * (channel + 2 * wide)
    text += config.vocab_size * wide * (2 - config.tied) + wide
    return text, softmax + channel + 2 * wide + 2 * wide * wide + 3 * wide, idle


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    config = getattr(sizes, name)()
    model = meta(config)
    text, depth, idle = by_formula(config)
    tower = sum(parameter.numel() for parameter in model.visual.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    depths = sum(parameter.numel() for found, parameter in model.named_parameters() if found.startswith("mtp."))
    assert depths == depth
    assert count - depths == PUBLISHED[name] == text + tower
    assert sum(parameter.numel() for parameter in meta(getattr(sizes, name)(ahead=0)).parameters()) == PUBLISHED[name]
    if name in ACTIVE:
        assert PUBLISHED[name] - len(config.layers) * idle == pytest.approx(ACTIVE[name], rel=2e-3)


def test_flops_are_those_of_the_layers():
    """6 for each weight that a token meets, softmax attention over half of the sequence in a quarter of the layers, and the delta rule's chunks in the others."""
    config = sizes.qwen3_5_397b_a17b(ahead=0)
    model = meta(config)
    text, _, idle = by_formula(config)
    layers, tokens = len(config.layers), 8192
    small = sum(
        parameter.numel()
        for found, parameter in model.named_parameters()
        if not found.startswith("visual.") and (parameter.dim() == 1 or "_conv." in found)
    )
    met = text - layers * idle - small - config.vocab_size * config.dim
    softmax = layers // 4 * 12 * 32 * 256 * (tokens + 1) / 2
    delta = sum(3 * block.attention.mixing_flops_per_token(tokens) for block in model.layers if hasattr(block.attention, "log_a"))
    assert model.flops_per_token(tokens) == pytest.approx(6 * met + softmax + delta, rel=1e-9)
    sheet = 3 * layers // 4 * 3 * 64 * (8 * 128**2 + 4 * 64 * 128 * 2)
    assert delta == pytest.approx(sheet, rel=0.5)
    deeper = meta(sizes.qwen3_5_397b_a17b()).flops_per_token(tokens) - model.flops_per_token(tokens)
    _, depth, _ = by_formula(config)
    norms = 5 * config.dim + 512
    head = config.vocab_size * config.dim
    assert deeper == pytest.approx(6 * (depth - idle - norms + head) + 4 * softmax / layers, rel=1e-9)


@pytest.mark.parametrize("name", [*DEBUG, *PUBLISHED])
def test_the_table_of_roles_fits_the_model(name):
    config = getattr(sizes, name)()
    model = meta(config)
    rows = sharding.table(config)
    modules = [found for found, _ in model.named_modules()]
    assert all(pattern in modules for pattern, _, _ in rows), [pattern for pattern, _, _ in rows if pattern not in modules]
    covered = {pattern for pattern, _, _ in rows}
    bare = [
        found
        for found, module in model.named_modules()
        if list(module.parameters(recurse=False)) and not any(f"{found}.".startswith(f"{place}.") for place in covered)
    ]
    assert not bare
    assert len({row[:2] for row in rows}) == len(rows)


def test_regions_cut_pipelines_between_blocks_only():
    regions = meta(tiny()).regions()
    blocks = tuple(f"layers.{i}" for i in range(4))
    assert regions.blocks == ("visual.blocks.0", "visual.blocks.1", *blocks, "mtp.0") and regions.stages == blocks
    assert regions.ties == (("tok_embeddings.weight", "following_embeddings.weight"),)
    assert meta(tiny(tied=True)).regions().ties == (("tok_embeddings.weight", "head.weight", "following_embeddings.weight"),)
    assert meta(tiny(ahead=0, vision=None)).regions().blocks == blocks


def test_the_whole_of_the_recipes_builds():
    found = [entry for entry in current().registry("recipe").entries() if entry.owner == "intarsia-qwen3-5"]
    assert len(found) == len(PUBLISHED) + len(DEBUG)
    for entry in found:
        recipe = current().target(entry)()
        assert recipe.train.sequence_length <= recipe.model.max_positions, entry.name


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", ["debug", "moe_debug", *PUBLISHED])
def test_config_goes_to_hugging_face_and_back(name):
    """But for how parameters start, and how chunks are cut."""
    config = getattr(sizes, name)()
    theirs = config_to_theirs(config)
    mixers = [chz.replace(block.attention, chunk=64) if hasattr(block.attention, "chunk") else block.attention for block in config.layers]
    layers = tuple(chz.replace(block, attention=mixer) for block, mixer in zip(config.layers, mixers, strict=True))
    vision = chz.replace(config.vision, position_std=None)
    assert config_to_ours(theirs) == chz.replace(config, initial_std=0.02, embedding_std=0.02, layers=layers, vision=vision)
    moe = isinstance(config.layers[0].feed_forward, MoEConfig)
    assert theirs["architectures"] == [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"]


def released() -> dict[str, Any]:
    """What the folder of Qwen3.5-397B-A17B says."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5_moe",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 64,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 1024,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 60,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "router_aux_loss_coef": 0.001,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "shared_expert_intermediate_size": 1024,
            "use_cache": True,
            "vocab_size": 248320,
        },
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4304,
            "model_type": "qwen3_5_moe",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


def test_the_released_config_is_read():
    assert config_to_ours(released()) == sizes.qwen3_5_397b_a17b()
    theirs = released()
    del theirs["text_config"]["layer_types"], theirs["text_config"]["mtp_num_hidden_layers"]
    assert config_to_ours(theirs) == sizes.qwen3_5_397b_a17b(ahead=0)


def test_experts_are_counted_by_either_name():
    theirs = released()
    assert experts_of(TABLE, whole_numbers(theirs)) == 512
    theirs["text_config"]["num_local_experts"] = theirs["text_config"].pop("num_experts")
    assert config_to_ours(theirs) == sizes.qwen3_5_397b_a17b()
    assert experts_of(TABLE, whole_numbers(theirs)) == 512


@pytest.mark.parametrize(
    "key,value",
    [
        ("text_config.attention_bias", True),
        ("text_config.hidden_act", "gelu"),
        ("text_config.attn_output_gate", False),
        ("text_config.mamba_ssm_dtype", "bfloat16"),
        ("text_config.mtp_num_hidden_layers", 2),
        ("text_config.mtp_use_dedicated_embeddings", True),
        ("vision_config.hidden_act", "silu"),
    ],
)
def test_import_refuses_what_is_not_had_by_name(key, value):
    part, _, field = key.partition(".")
    theirs = config_to_theirs(tiny())
    with pytest.raises(UsageError, match=re.escape(f"{key} = {value!r}")):
        config_to_ours({**theirs, part: {**theirs[part], field: value}})


def test_import_refuses_layers_that_it_does_not_have():
    theirs = config_to_theirs(tiny())
    with pytest.raises(UsageError, match=r"'linear_atention'.*linear_attention"):
        config_to_ours({**theirs, "text_config": {**theirs["text_config"], "layer_types": ["linear_atention"] * 4}})
    with pytest.raises(UsageError, match="2 entries"):
        config_to_ours({**theirs, "text_config": {**theirs["text_config"], "layer_types": ["full_attention"] * 2}})


def test_export_refuses_what_their_classes_lack():
    plain = tiny(ahead=0)
    linear, full = plain.layers[0], plain.layers[3]
    shared = MoEConfig(router=SoftmaxRouterConfig(experts=4, top_k=2), hidden=16, shared=SwiGLUConfig(hidden=16))
    cases = {
        "both kinds": chz.replace(plain, layers=(linear, linear)),
        "each the same": chz.replace(plain, layers=(*plain.layers, chz.replace(linear, attention=chz.replace(LINEAR, key_heads=4)))),
        "offset_rms_norm": chz.replace(plain, norm=RMSNormConfig(eps=1e-6)),
        "all alike": chz.replace(plain, layers=(*plain.layers, chz.replace(full, feed_forward=SwiGLUConfig(hidden=40)))),
        "a gate": tiny(mixers=in_turns(LINEAR, chz.replace(FULL, gate=False), 4), ahead=0),
        r"rope\.dim": chz.replace(plain, rope=RopeConfig(theta=1e7)),
        "has the others' epsilon": tiny(mixers=in_turns(chz.replace(LINEAR, norm_eps=1e-5), FULL, 4)),
        "at most": tiny(ahead=2),
        "gated_swiglu": tiny(feed_forward=shared),
    }
    for words, config in cases.items():
        with pytest.raises(UsageError, match=words):
            config_to_theirs(config)


# ---------------------------------------------------------------- the mathematics


def test_the_shared_expert_is_multiplied_by_a_gate_of_its_own():
    model = fill(current().build(tiny(feed_forward=experts(4, 2, 16, 24))), 0, 0.05)
    shared = model.layers[0].feed_forward.shared
    assert isinstance(shared, GatedSwiGLU)
    x_BSD = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    plain = (F.silu(x_BSD @ shared.w1.weight.T) * (x_BSD @ shared.w3.weight.T)) @ shared.w2.weight.T
    assert torch.allclose(shared(x_BSD), torch.sigmoid(x_BSD @ shared.gate.weight.T) * plain, atol=1e-6)


def offset_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (1 + weight) * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_depth_is_given_the_normed_hidden_states_before_it():
    """As vLLM wires it: the embedding of the following token comes first, and both are normed; the second depth is given what the first gave to the head."""
    model = fill(current().build(tiny(ahead=2)), 0, 0.05).eval()
    tokens_BS = torch.randint(0, 80, (1, 20), generator=torch.Generator().manual_seed(3))
    hidden = predictions(model, tokens_BS, ((20,),))
    context = TrainContext(torch.arange(20)[None], None, ((20,),))
    chained = hidden[0]
    rope = model.shared(context)
    assert len(hidden) == 3
    for k, depth in enumerate(model.mtp):
        following_BS = torch.cat((tokens_BS[:, k + 1 :], torch.zeros(1, k + 1, dtype=torch.int64)), 1)
        embedded_BSD = model.tok_embeddings.weight[following_BS]
        both = torch.cat((offset_norm(embedded_BSD, depth.token_norm.weight), offset_norm(chained, depth.hidden_norm.weight)), -1)
        chained = offset_norm(depth.block(both @ depth.projection.weight.T, rope, context), depth.norm.weight)
        assert torch.allclose(hidden[k + 1], chained, atol=1e-5), k


def test_a_depth_is_given_the_features_that_stand_in_following_places():
    """As vLLM merges them for its drafts: the following token's feature, not the placeholder's embedding, in its own document only; and so the tower learns from what is predicted further ahead."""
    model = fill(current().build(tiny(ahead=2)), 0, 0.05).eval()
    tokens_BS = torch.randint(0, 60, (1, 12), generator=torch.Generator().manual_seed(3))
    visual_BS = torch.full((1, 12), -1)
    visual_BS[0, 2:4], visual_BS[0, 7], visual_BS[0, 10] = torch.arange(2), 2, 3
    patches_NC = torch.randn(16, 96, generator=torch.Generator().manual_seed(4))
    documents_BS = torch.tensor([[0] * 7 + [1] * 5])
    batch = Batch(
        tokens_BS=tokens_BS,
        labels_BS=tokens_BS,
        positions_BS=torch.tensor([[*range(7), *range(5)]]),
        documents_BS=documents_BS,
        lengths=((7, 5),),
        extra={"visual_BS": visual_BS, "patches_NC": patches_NC, "grids": ((1, 2, 4), (1, 2, 2), (1, 2, 2))},
    )
    batch = with_following(batch, 2)
    assert batch.extra["following_visual_BSK"][0].tolist() == [
        [-1, 0], [0, 1], [1, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1], [-1, 3], [3, -1], [-1, -1], [-1, -1],
    ]  # fmt: skip
    context = TrainContext.of(batch)
    found = model(tokens_BS, context)
    features_MD, _ = model.see(patches_NC, batch.extra["grids"])
    chained, rope = found[0], model.shared(context)
    for k, depth in enumerate(model.mtp):
        following_S, rows_S = batch.extra["following_BSK"][0, :, k], batch.extra["following_visual_BSK"][0, :, k]
        entered = [
            features_MD[row] if row >= 0 else model.tok_embeddings.weight[token] for token, row in zip(following_S, rows_S, strict=True)
        ]
        both = torch.cat(
            (offset_norm(torch.stack(entered)[None], depth.token_norm.weight), offset_norm(chained, depth.hidden_norm.weight)), -1
        )
        chained = offset_norm(depth.block(both @ depth.projection.weight.T, rope, context), depth.norm.weight)
        assert torch.allclose(found[k + 1], chained, atol=1e-5), k
    swapped = torch.where(visual_BS >= 0, 61, tokens_BS)
    again = model(
        swapped,
        TrainContext.of(
            with_following(
                dataclasses.replace(batch, tokens_BS=swapped, extra={n: batch.extra[n] for n in ("visual_BS", "patches_NC", "grids")}), 2
            )
        ),
    )
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), "which token is the placeholder does not matter"


def test_packed_equals_separate_and_recomputed_equals_kept():
    from intarsia.config import CompileConfig, RecomputeConfig
    from intarsia_eager.engine import prepare_regions

    lengths = ((5, 1, 70),)
    tokens_BS = torch.randint(0, 80, (1, 76), generator=torch.Generator().manual_seed(0))
    model = fill(current().build(tiny()), 0, 0.05)
    packed = outputs(model, tokens_BS, lengths)
    parts = [outputs(model, tokens_BS[:, a:b], ((b - a,),)) for a, b in ((0, 5), (5, 6), (6, 76))]
    assert torch.allclose(packed, torch.cat(parts, 1), atol=2e-5)
    used = [parameter for name, parameter in model.named_parameters() if name != "head.weight" and not name.startswith("visual.")]
    gradients = torch.autograd.grad(packed.square().sum(), used)
    prepare_regions(model, CompileConfig(), RecomputeConfig(mode="blocks"))
    again = torch.autograd.grad(outputs(model, tokens_BS, lengths).square().sum(), used)
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))
