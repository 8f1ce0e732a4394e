"""Qwen3.5 and Hugging Face, both ways. Torch-free. Rotations are half-split on both sides, so no row is permuted; a query head and its gate are stored together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from intarsia.contracts import HFRule, HFTable
from intarsia.errors import UsageError, did_you_mean
from intarsia_models_common.config import AttentionConfig, FeedForwardConfig, MixerConfig, OffsetRMSNormConfig, SwiGLUConfig
from intarsia_models_common.hf import EXPERTS_APART, EXPERTS_STACKED, SWIGLU, block_rules, check_values, placed, rope_from, rope_to, text_to
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.moe.config import JOINT_LOSS, GatedSwiGLUConfig, MoEConfig, SoftmaxRouterConfig
from intarsia_models_common.vision.hf import PROCESSOR, ids_from, ids_to, vision_from, vision_rules, vision_to

from intarsia_qwen3_5.config import FULL_EVERY, Qwen35Config, experts, qwen3_5

DENSE, SPARSE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
TEXT_DENSE, TEXT_SPARSE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
"""The same without a vision tower: `config.json` is what `text_config` is of the others, and names have no `language_model`."""
LINEAR, FULL = "linear_attention", "full_attention"
_DEPTHS = "mtp_num_hidden_layers"

_GATED = HFRule(
    "self_attn.q_proj.weight",
    ("attention.wq.weight", "attention.wg.weight"),
    "split_heads:2",
    "text_config.num_attention_heads|num_attention_heads",
)
_BLOCK = (
    *block_rules(_GATED),
    *placed(SWIGLU, "mlp.shared_expert", "feed_forward.shared"),
    HFRule("mlp.shared_expert_gate.weight", "feed_forward.shared.gate.weight"),
)
_LINEAR = (
    HFRule("linear_attn.in_proj_qkv.weight", ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight"), "split:3"),
    HFRule("linear_attn.in_proj_z.weight", "attention.wz.weight"),
    HFRule("linear_attn.in_proj_b.weight", "attention.wb.weight"),
    HFRule("linear_attn.in_proj_a.weight", "attention.wa.weight"),
    HFRule(
        "linear_attn.conv1d.weight",
        ("attention.q_conv.weight", "attention.k_conv.weight", "attention.v_conv.weight"),
        "flatten:1,*|split:3",
    ),
    HFRule("linear_attn.A_log", "attention.log_a"),
    HFRule("linear_attn.dt_bias", "attention.dt_bias"),
    HFRule("linear_attn.norm.weight", "attention.norm.weight"),
    HFRule("linear_attn.out_proj.weight", "attention.wo.weight"),
)


def _trunk(theirs: str) -> tuple[HFRule, ...]:
    return (
        HFRule(f"{theirs}.embed_tokens.weight", "tok_embeddings.weight"),
        # Released folders have the trunk's experts stacked, and those of multi-token prediction and all of transformers' and of FP8 releases apart.
        *placed((*_BLOCK, *_LINEAR, *EXPERTS_STACKED, *EXPERTS_APART), f"{theirs}.layers.{{i}}", "layers.{i}"),
        HFRule(f"{theirs}.norm.weight", "norm.weight"),
    )


_TRUNK, _TEXT = "model.language_model", "model"
_NO_TOWER = "!visual.patch_embedding.weight"

TABLE = HFTable(
    rules=(
        # Text models are written like this, and read in both forms: transformers keeps the names of the folder that it took a text model out of.
        *_trunk(_TEXT),
        *_trunk(_TRUNK),
        HFRule("lm_head.weight", "head.weight"),
        *vision_rules(),
        HFRule("mtp.pre_fc_norm_embedding.weight", "mtp.0.token_norm.weight"),
        HFRule("mtp.pre_fc_norm_hidden.weight", "mtp.0.hidden_norm.weight"),
        HFRule("mtp.fc.weight", "mtp.0.projection.weight"),
        *placed((*_BLOCK, *EXPERTS_APART, *EXPERTS_STACKED), "mtp.layers.{i}", "mtp.{i}.block"),
        HFRule("mtp.norm.weight", "mtp.0.norm.weight"),
    ),
    config_to_ours="intarsia_qwen3_5.hf:config_to_ours",
    config_to_theirs="intarsia_qwen3_5.hf:config_to_theirs",
    ignored=("*.rotary_emb.inv_freq", "*.rotary_pos_emb.inv_freq"),
    extra={
        **PROCESSOR,
        "experts_field": "text_config.num_experts|text_config.num_local_experts|num_experts|num_local_experts",
        "where": {
            # Both kinds of mixers have projections of one name of ours.
            "model.*layers.*.self_attn.*": "layers.{i}.attention.wg.weight",
            "model.*layers.*.linear_attn.*": "layers.{i}.attention.log_a",
            **{f"{_TEXT}.{part}.*": _NO_TOWER for part in ("embed_tokens", "layers", "norm")},
        },
        "keeps_dtype": ("*.attention.log_a", "*.attention.dt_bias"),
        "hints": {
            "mtp.*": (
                f"config.json says {_DEPTHS} of 1, so the layer of multi-token prediction must be there. transformers does not save it: set {_DEPTHS} to "
                "0 for a folder that it wrote."
            ),
            "visual.*": f"The folder has no vision tower: for a text-only checkpoint config.json must have no vision_config, or be one of {TEXT_DENSE}.",
        },
    },
)

_ONLY: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
}


def config_to_ours(theirs: Mapping[str, Any]) -> Qwen35Config:
    """Our config from a `config.json`. UsageError, which names key and value, for what this family does not have."""
    text, prefix = (theirs["text_config"], "text_config.") if "text_config" in theirs or not _is_text(theirs) else (theirs, "")
    check_values(text, _ONLY, prefix)
    heads, eps = text["num_attention_heads"], text.get("rms_norm_eps", 1e-6)
    full = AttentionConfig(
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text["head_dim"],
        qk_norm=OffsetRMSNormConfig(eps=eps),
        gate=True,
    )
    linear = GatedDeltaNetConfig(
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        kernel=text.get("linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )
    ahead = text.get(_DEPTHS) or 0
    if ahead > 1:
        raise UsageError(
            f"config.json says {prefix}{_DEPTHS} = {ahead}, which share their norms and projection; intarsia-qwen3-5 has only 0 and 1."
        )
    check_values(text, {"mtp_use_dedicated_embeddings": False}, prefix)
    rope = rope_from({"partial_rotary_factor": 0.25, **text}, head_dim=full.head_dim)
    return qwen3_5(
        dim=text["hidden_size"],
        mixers=[{LINEAR: linear, FULL: full}[kind] for kind in _kinds(text)],
        feed_forward=_feed_forward_of(text),
        vision=vision_from(theirs["vision_config"]) if theirs.get("vision_config") else None,
        ahead_mixer=full,
        ahead=ahead,
        vocab_size=text["vocab_size"],
        tied=bool(theirs.get("tie_word_embeddings", False)),
        rope=rope,
        max_positions=text.get("max_position_embeddings", 32768),
        eps=eps,
        **ids_from(theirs),
    )


def _is_text(theirs: Mapping[str, Any]) -> bool:
    return str(theirs.get("model_type")).endswith("_text") or bool(
        {TEXT_DENSE, TEXT_SPARSE}.intersection(theirs.get("architectures") or ())
    )


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """What each layer is. UsageError for kinds that this family does not have, and for a list of another length."""
    layers, every = text["num_hidden_layers"], text.get("full_attention_interval") or FULL_EVERY
    kinds = text.get("layer_types") or [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise UsageError(f"config.json has {kind!r} in layer_types. {did_you_mean(kind, (LINEAR, FULL))}")
    if len(kinds) != layers:
        raise UsageError(f"config.json has {len(kinds)} entries in layer_types for num_hidden_layers = {layers}.")
    return list(kinds)


def _feed_forward_of(text: Mapping[str, Any]) -> FeedForwardConfig:
    # Files of transformers may say num_local_experts.
    count = text.get("num_experts") or text.get("num_local_experts")
    if not count:
        return SwiGLUConfig(hidden=text["intermediate_size"])
    loss = float(text.get("router_aux_loss_coef", JOINT_LOSS))
    return experts(count, text["num_experts_per_tok"], text["moe_intermediate_size"], text["shared_expert_intermediate_size"], loss)


def config_to_theirs(ours: Qwen35Config) -> dict[str, Any]:
    """A `config.json` of `Qwen3_5ForConditionalGeneration`, or of `Qwen3_5MoeForConditionalGeneration` where blocks have experts; of `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM`
    for a model without a vision tower. UsageError for what those classes do not have."""
    full, linear = _mixers_of(ours)
    feed_forward, norm = ours.layers[0].feed_forward, ours.norm
    assert isinstance(norm, OffsetRMSNormConfig)
    if len(ours.ahead) > 1:
        _refuse(
            f"their layers of multi-token prediction share norms and projection, so they have one at most, and this model has {len(ours.ahead)}"
        )
    kind = "qwen3_5_moe" if isinstance(feed_forward, MoEConfig) else "qwen3_5"
    text = {
        "model_type": f"{kind}_text",
        **text_to(ours, full, norm.eps),
        "attn_output_gate": True,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.kernel,
        "mamba_ssm_dtype": "float32",
        "layer_types": [FULL if isinstance(block.attention, AttentionConfig) else LINEAR for block in ours.layers],
        _DEPTHS: len(ours.ahead),
        **_feed_forward_to(feed_forward),
        **rope_to(ours.rope, head_dim=full.head_dim),
    }
    if ours.vision is None:
        return {"architectures": [TEXT_SPARSE if kind == "qwen3_5_moe" else TEXT_DENSE], **text, **ids_to(ours)}
    return {
        "architectures": [SPARSE if kind == "qwen3_5_moe" else DENSE],
        "model_type": kind,
        "text_config": text,
        "vision_config": {"model_type": f"{kind}_vision", **vision_to(ours.vision)},
        **ids_to(ours),
        "tie_word_embeddings": ours.tied,
    }


def _mixers_of(ours: Qwen35Config) -> tuple[AttentionConfig, GatedDeltaNetConfig]:
    """The two kinds of mixers, each the same in all layers that have it. UsageError unless theirs can be like that."""
    blocks = (*ours.layers, *ours.ahead)
    mixers: list[MixerConfig] = list(dict.fromkeys(block.attention for block in blocks))
    full = [mixer for mixer in mixers if type(mixer) is AttentionConfig]
    linear = [mixer for mixer in mixers if type(mixer) is GatedDeltaNetConfig]
    if len(full) != 1 or len(linear) != 1 or len(mixers) != 2 or any(block.attention != full[0] for block in ours.ahead):
        _refuse(
            "they have gated DeltaNet and softmax attention, both kinds, each the same in all layers that have it, and softmax attention in layers that predict ahead"
        )
    norm = ours.norm
    if {each for block in blocks for each in (block.attention_norm, block.feed_forward_norm, norm)} != {norm} or type(
        norm
    ) is not OffsetRMSNormConfig:
        _refuse("their norms store what is added to 1 (offset_rms_norm) and have one epsilon")
    if len({block.feed_forward for block in blocks}) != 1 or type(ours.layers[0].feed_forward) not in (SwiGLUConfig, MoEConfig):
        _refuse("their feed-forward layers are all alike, a SwiGLU or a mixture of experts")
    one, other = full[0], linear[0]
    assert isinstance(norm, OffsetRMSNormConfig)
    plain = AttentionConfig(heads=one.heads, kv_heads=one.kv_heads, head_dim=one.head_dim, qk_norm=norm, gate=True)
    if one != plain or ours.rope.interleaved or ours.rope.dim is None or ours.rope.sections is None:
        _refuse(
            "their attention has a gate, norms over queries and keys with the blocks' epsilon, half-split rotations of rope.dim dimensions on three axes, and nothing "
            "else: no window, softcap, sinks, biases or own scale"
        )
    if other.norm_eps != norm.eps:
        _refuse(f"the norm within their gated DeltaNet has the others' epsilon, {norm.eps:g}, and this model's is {other.norm_eps:g}")
    return one, other


def _feed_forward_to(ours: FeedForwardConfig) -> dict[str, Any]:
    if isinstance(ours, SwiGLUConfig):
        return {"intermediate_size": ours.hidden}
    assert isinstance(ours, MoEConfig)
    router, shared = ours.router, ours.shared
    plain = SoftmaxRouterConfig(experts=router.experts, top_k=router.top_k, joint_loss=router.joint_loss)
    if router != plain or type(shared) is not GatedSwiGLUConfig:
        _refuse(
            f"their experts have a softmax router with normalised weights and no bias, and a shared expert behind a gate (gated_swiglu), and this is {ours}"
        )
    assert isinstance(shared, GatedSwiGLUConfig)
    return {
        "moe_intermediate_size": ours.hidden,
        "shared_expert_intermediate_size": shared.hidden,
        "num_experts": router.experts,
        "num_experts_per_tok": router.top_k,
        "router_aux_loss_coef": router.joint_loss,
    }


def _refuse(why: str) -> NoReturn:
    raise UsageError(f"{DENSE} and {SPARSE} cannot hold this model, so it cannot be exported as such: {why}.")
