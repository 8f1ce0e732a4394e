"""Qwen3's sizes, configs and their way to Hugging Face and back; no weights."""

from __future__ import annotations

import chz
import pytest
import torch
from intarsia.config import resolve
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_models_common.config import OffsetRMSNormConfig, RMSNormConfig, SwiGLUConfig
from intarsia_models_common.moe.config import SigmoidRouterConfig, SoftmaxRouterConfig, softmax_experts
from intarsia_qwen3 import config as sizes
from intarsia_qwen3 import sharding
from intarsia_qwen3.config import qwen3, stretched
from intarsia_qwen3.hf import config_to_ours, config_to_theirs

PUBLISHED = {
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
}
ACTIVE = {"qwen3_30b_a3b": 3_353_032_704, "qwen3_235b_a22b": 22_190_763_520}


def on_meta(config):
    with torch.device("meta"):
        return current().build(config)


def tiny(**changes):
    settings = {
        "dim": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "feed_forward": SwiGLUConfig(hidden=40),
        "vocab_size": 64,
    }
    return qwen3(**{**settings, **changes})


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    config = getattr(sizes, name)()
    named = dict(on_meta(config).named_parameters())
    assert sum(parameter.numel() for parameter in named.values()) == PUBLISHED[name]
    if name in ACTIVE:
        routed = sum(parameter.numel() for key, parameter in named.items() if ".experts." in key)
        assert PUBLISHED[name] - routed + routed * 8 // 128 == ACTIVE[name]


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_30b_a3b"])
def test_flops_are_the_sheets_formula(name):
    """6 for each weight that a token meets, the lookup aside, and 6 L H d S for attention, exact for the tokens of a causal row."""
    config, tokens = getattr(sizes, name)(), 4096
    model = on_meta(config)
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    met = (
        sum(p.numel() for n, p in model.named_parameters(remove_duplicate=False) if p.dim() >= 2 and n != "tok_embeddings.weight") - routed
    )
    heads = config.layers[0].attention.heads
    causal = 6 * len(config.layers) * heads * 128 * (tokens + 1)
    assert model.flops_per_token(tokens) == pytest.approx(6 * (met + routed * 8 / 128) + causal, rel=1e-12)


RECIPES = ["debug", "moe-debug", "0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_resolve(name):
    recipe = resolve(f"qwen3/{name}").recipe
    assert recipe.name == f"qwen3-{name}"
    assert config_to_ours(config_to_theirs(recipe.model)) == chz.replace(recipe.model, initial_std=0.02, embedding_std=0.02)


def test_sharding_names_every_module_with_parameters_and_no_other():
    import fnmatch

    for config in (tiny(), tiny(feed_forward=softmax_experts(4, 2, 16), dense=SwiGLUConfig(hidden=24), dense_layers=(1,))):
        model = on_meta(config)
        patterns = [pattern for pattern, _, _ in sharding.table(config)]
        modules = [name for name, _ in model.named_modules()]
        unmatched = [pattern for pattern in patterns if not fnmatch.filter(modules, pattern)]
        assert not unmatched
        for name, _ in model.named_parameters():
            module = name.rpartition(".")[0]
            inherits = module.endswith(("q_norm", "k_norm"))
            assert inherits or any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns), name


def test_yarn_is_there_where_it_is_asked_for():
    plain = sizes.qwen3_8b()
    assert plain.rope.scaling == "none" and config_to_theirs(plain)["rope_scaling"] is None
    long = stretched(plain)
    theirs = config_to_theirs(long)
    assert theirs["max_position_embeddings"] == 131072
    # As their pages say: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}.items() <= theirs["rope_scaling"].items()
    assert config_to_ours(theirs) == long
    overrides = ["model.rope.scaling=yarn", "model.rope.factor=4.0", "model.rope.original_positions=32768", "model.max_positions=131072"]
    assert resolve("qwen3/8b", overrides).recipe.model == long


def test_a_model_that_has_more_positions_already_is_not_stretched_to_fewer():
    later = chz.replace(sizes.qwen3_8b(), max_positions=262144, rope=chz.replace(sizes.qwen3_8b().rope, theta=5e6))
    with pytest.raises(UsageError, match=r"262144 positions.*factor"):
        stretched(later)


@pytest.mark.parametrize(("name", "millions", "each"), [("debug", 1.8, None), ("moe_debug", 2.0, 0.8)])
def test_the_debug_sizes_are_as_large_as_they_say(name, millions, each):
    config = getattr(sizes, name)()
    named = dict(on_meta(config).named_parameters())
    total = sum(parameter.numel() for parameter in named.values())
    routed = sum(parameter.numel() for key, parameter in named.items() if ".experts." in key)
    assert round(total / 1e6, 1) == millions and (each is None or round((total - routed + routed / 4) / 1e6, 1) == each)


def test_released_configs_as_they_are_spelt():
    """What the files of Qwen3-30B-A3B say."""
    theirs = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert config_to_ours(theirs) == sizes.qwen3_30b_a3b()
    longer = config_to_ours({**theirs, "rope_theta": 5000000, "max_position_embeddings": 262144})
    assert longer.rope.theta == 5e6 and longer.max_positions == 262144
    # The class's default differs from every release.
    del theirs["norm_topk_prob"]
    assert not config_to_ours(theirs).layers[0].feed_forward.router.norm_topk


def test_every_second_layer_may_have_experts():
    theirs = config_to_theirs(tiny(layers=4, feed_forward=softmax_experts(4, 2, 16)))
    ours = config_to_ours({**theirs, "decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 40})
    assert [type(block.feed_forward).__name__ for block in ours.layers] == ["SwiGLUConfig", "MoEConfig", "SwiGLUConfig", "SwiGLUConfig"]
    back = config_to_theirs(ours)
    assert back["mlp_only_layers"] == [0, 2, 3] and back["intermediate_size"] == 40 and config_to_ours(back) == ours


def test_what_their_classes_take_for_absent_fields():
    """`Qwen3MoeConfig` has no head_dim of its own, `Qwen3Config` has 128; the latter's class never has experts."""
    sparse = config_to_theirs(tiny(dim=64, feed_forward=softmax_experts(4, 2, 16)))
    del sparse["head_dim"]
    assert config_to_ours(sparse).layers[0].attention.head_dim == 64 // 4
    dense = config_to_theirs(tiny(dim=64))
    del dense["head_dim"]
    assert config_to_ours(dense).layers[0].attention.head_dim == 128
    assert type(config_to_ours({**dense, "num_experts": 4}).layers[0].feed_forward) is SwiGLUConfig
    for said, meant in (("absent", 0.001), (None, 0.0), (0.5, 0.5)):
        found = config_to_ours({key: value for key, value in {**sparse, "router_aux_loss_coef": said}.items() if value != "absent"})
        assert found.layers[0].feed_forward.router.joint_loss == meant
    del sparse["num_experts"]
    with pytest.raises(UsageError, match="num_experts"):
        config_to_ours(sparse)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("model_type", "qwen2"),
        ("partial_rotary_factor", 0.5),
        ("mrope_section", [4, 2, 2]),
        ("num_hidden_layers", 0),
    ],
)
def test_import_refuses_what_this_family_does_not_have(key, value):
    """By key and value."""
    theirs = config_to_theirs(tiny())
    if key == "mrope_section":
        theirs["rope_parameters"] |= {key: value, "mrope_interleaved": True}
    else:
        theirs[key] = value
    shown = "sliding_attention" if key == "layer_types" else str(value)
    with pytest.raises(UsageError) as error:
        config_to_ours(theirs)
    assert key in str(error.value) and shown in str(error.value)


def changed(config, **changes):
    return chz.replace(config, layers=tuple(chz.replace(block, **changes) for block in config.layers))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (changed(tiny(), attention=chz.replace(tiny().layers[0].attention, gate=True)), "gate"),
        (changed(tiny(), attention=chz.replace(tiny().layers[0].attention, window=8)), "window"),
        (changed(tiny(), attention=chz.replace(tiny().layers[0].attention, qk_norm=None)), "norms over queries"),
        (chz.replace(tiny(), rope=chz.replace(tiny().rope, dim=8)), "rotations of whole heads"),
        (chz.replace(tiny(), rope=chz.replace(tiny().rope, sections=(4, 2, 2))), "rotations of whole heads"),
        (chz.replace(tiny(), norm=OffsetRMSNormConfig()), "replaced"),
        (changed(tiny(), attention_norm=RMSNormConfig(eps=1e-3)), "one norm epsilon"),
        (chz.replace(tiny(), layers=(tiny().layers[0], *changed(tiny(), feed_forward=SwiGLUConfig(hidden=8)).layers[1:])), "differ"),
        (tiny(feed_forward=chz.replace(softmax_experts(4, 2, 8), router=SigmoidRouterConfig(experts=4, top_k=2))), "softmax router"),
        (
            tiny(feed_forward=chz.replace(softmax_experts(4, 2, 8), router=SoftmaxRouterConfig(experts=4, top_k=2, scale=2.0))),
            "softmax router",
        ),
        (tiny(feed_forward=chz.replace(softmax_experts(4, 2, 8), shared=SwiGLUConfig(hidden=8))), "no shared expert"),
    ],
)
def test_export_refuses_what_their_classes_do_not_have(config, text):
    with pytest.raises(UsageError, match=text):
        config_to_theirs(config)
