"""Llama 3's sizes, configs and their way to Hugging Face and back; no weights."""

from __future__ import annotations

import math

import chz
import pytest
import torch
from intarsia.config import resolve
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import current
from intarsia_llama3 import config as sizes
from intarsia_llama3 import sharding
from intarsia_llama3.config import llama3
from intarsia_llama3.hf import config_to_ours, config_to_theirs
from intarsia_models_common.build import Scope
from intarsia_models_common.config import AttentionConfig, RMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.hf import rope_from, rope_to
from intarsia_models_common.rope import Rope

PUBLISHED = {
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    with torch.device("meta"):
        model = current().build(getattr(sizes, name)())
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_flops_are_the_sheets_formula():
    config = sizes.llama3_8b()
    with torch.device("meta"):
        model = current().build(config)
    matmul = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and n != "tok_embeddings.weight")
    tokens = 8192
    causal = 6 * 32 * 32 * 128 * (tokens + 1)  # 6 L H d S, exact for the tokens of a causal row
    assert model.flops_per_token(tokens) == pytest.approx(6 * matmul + causal, rel=1e-12)


def test_a_window_lowers_flops():
    def flops(window):
        plain = llama3(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, hidden=32, vocab_size=32)
        attention = AttentionConfig(heads=2, kv_heads=1, head_dim=16, window=window)
        with torch.device("meta"):
            return current().build(chz.replace(plain, layers=(chz.replace(plain.layers[0], attention=attention),)))

    seen = sum(min(t, 4) for t in range(1, 11)) / 10
    one, other = flops(4).flops_per_token(10), flops(None).flops_per_token(10)
    assert other - one == pytest.approx(3 * 4 * 32 * (5.5 - seen))


def test_sharding_names_every_module_with_parameters():
    import fnmatch

    with torch.device("meta"):
        model = current().build(sizes.debug())
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            assert [role for pattern, role in sharding.TABLE if fnmatch.fnmatchcase(name, pattern)], name


def test_a_model_cast_to_bfloat16_keeps_its_angles_in_float32():
    scope = Scope(name="", dim=64, layer=-1, layers=1, rope_interleaved=False, std=0.02, output_std=0.02)
    rope = Rope(RopeConfig(theta=500000.0), scope)
    before = rope(torch.arange(5000)[None])[0]
    assert torch.equal(rope.bfloat16()(torch.arange(5000)[None])[0], before) and before.dtype == torch.float32


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_goes_to_hugging_face_and_back(name):
    config = getattr(sizes, name)()
    assert config_to_ours(config_to_theirs(config)) == config


def test_released_spelling_of_rope():
    theirs = {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    assert rope_from(theirs) == sizes.scaled_rope(32.0)
    assert rope_from({"rope_theta": 500000.0, "rope_scaling": None}) == RopeConfig(theta=500000.0)
    assert rope_from(rope_to(RopeConfig(scaling="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5))).mscale_all_dim == 0.5


def test_unknown_scaling_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="llama3"):
        rope_from({"rope_scaling": {"rope_type": "lama3"}})
    with pytest.raises(UsageError, match="yarn"):
        RopeConfig(scaling="yarm")


@pytest.mark.parametrize("key,value", [("attention_bias", True), ("mlp_bias", True), ("hidden_act", "gelu")])
def test_import_refuses_what_llama_of_ours_lacks(key, value):
    theirs = config_to_theirs(sizes.debug())
    with pytest.raises(UsageError, match=key):
        config_to_ours({**theirs, key: value})


def test_export_refuses_what_their_class_lacks():
    plain = llama3(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, hidden=32, vocab_size=32)
    window = chz.replace(plain.layers[1], attention=AttentionConfig(heads=2, kv_heads=1, head_dim=16, window=8))
    with pytest.raises(UsageError, match="equal blocks"):
        config_to_theirs(chz.replace(plain, layers=(plain.layers[0], window)))
    with pytest.raises(UsageError, match="window"):
        config_to_theirs(chz.replace(plain, layers=(window, window)))
    with pytest.raises(UsageError, match="interleaved"):
        config_to_theirs(chz.replace(plain, rope=chz.replace(plain.rope, interleaved=True)))


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"heads": 6, "kv_heads": 4}, "multiple"),
        ({"heads": 4, "kv_heads": 0}, "at least 1"),
        ({"heads": 0}, "at least 1"),
        ({"head_dim": -2}, "at least 1"),
        ({"softcap": 0.0}, "softcap"),
        ({"head_dim": 15}, "odd"),
        ({"window": 0}, "window"),
    ],
)
def test_impossible_attention_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        AttentionConfig(**{"heads": 4, "kv_heads": 2, "head_dim": 16, **fields})


@pytest.mark.parametrize(
    "config,fields",
    [
        (SwiGLUConfig, {"hidden": -3}),
        (RMSNormConfig, {"eps": -1.0}),
        (RMSNormConfig, {"eps": math.nan}),
        (RopeConfig, {"theta": 0.0}),
        (RopeConfig, {"dim": 3}),
    ],
)
def test_impossible_components_are_refused_before_anything_is_built(config, fields):
    with pytest.raises(UsageError, match=rf"\.{next(iter(fields))} = "):
        config(**fields)


def test_a_component_without_inits_is_named():
    with torch.device("meta"):
        model = current().build(sizes.debug())
    model.norm.inits = dict
    with pytest.raises(PluginError, match=r"norm\.weight.*RMSNorm"):
        model.inits()


def test_the_whole_of_the_recipes_builds():
    for entry in current().registry("recipe").entries():
        if entry.owner == "intarsia-llama3":
            recipe = current().target(entry)()
            assert recipe.train.sequence_length <= recipe.model.max_positions, entry.name
            assert recipe.train.global_batch % recipe.train.micro_batch == 0, entry.name


def test_a_component_of_another_role_is_refused_where_the_recipe_is_resolved():
    override = ["overrides.0.match=layers.0.attention", "overrides.0.replace=rms_norm"]
    with pytest.raises(UsageError, match=r"layers\.0\.attention` takes a MixerConfig, which intarsia-models-common:rms_norm"):
        resolve("llama3/debug", override)
