"""DeepSeek-V3 and V2 and Hugging Face, both ways. Torch-free. Rotated pairs are interleaved on both sides, so no row is permuted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chz
from intarsia.contracts import HFRule, HFTable
from intarsia.errors import UsageError, did_you_mean
from intarsia_models_common.config import BlockConfig, MLAConfig, RMSNormConfig, SwiGLUConfig
from intarsia_models_common.hf import EXPERTS_APART, SWIGLU, placed, rope_from, rope_to
from intarsia_models_common.moe.config import GroupLimitedRouterConfig, MoEConfig, RouterConfig, SoftmaxRouterConfig

from intarsia_deepseek_v3.config import DeepSeekV3Config, deepseek_v3, v3_router

V3, V2 = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"
LATENT_EPS = 1e-6
"""What their classes have for the latents' norms, whatever rms_norm_eps says."""

_BLOCK = (
    HFRule("input_layernorm.weight", "attention_norm.weight"),
    HFRule("self_attn.q_proj.weight", "attention.wq.weight"),
    HFRule("self_attn.q_a_proj.weight", "attention.wq_a.weight"),
    HFRule("self_attn.q_a_layernorm.weight", "attention.q_norm.weight"),
    HFRule("self_attn.q_b_proj.weight", "attention.wq_b.weight"),
    HFRule("self_attn.kv_a_proj_with_mqa.weight", "attention.wkv_a.weight"),
    HFRule("self_attn.kv_a_layernorm.weight", "attention.kv_norm.weight"),
    HFRule("self_attn.kv_b_proj.weight", "attention.wkv_b.weight"),
    HFRule("self_attn.o_proj.weight", "attention.wo.weight"),
    HFRule("post_attention_layernorm.weight", "feed_forward_norm.weight"),
    *placed(SWIGLU, "mlp", "feed_forward"),
    HFRule("mlp.gate.weight", "feed_forward.router.weight"),
    HFRule("mlp.gate.e_score_correction_bias", "feed_forward.router.bias"),
    *EXPERTS_APART,
    *placed(SWIGLU, "mlp.shared_experts", "feed_forward.shared"),
)
_LAYER, _DEPTH, _DEPTHS = "model.layers.{i}", "model.layers.{i+num_hidden_layers}", "num_nextn_predict_layers"

TABLE = HFTable(
    rules=(
        HFRule("model.embed_tokens.weight", "tok_embeddings.weight"),
        *placed(_BLOCK, _LAYER, "layers.{i}"),
        HFRule("model.norm.weight", "norm.weight"),
        HFRule("lm_head.weight", "head.weight"),
        HFRule(f"{_DEPTH}.enorm.weight", "mtp.{i}.token_norm.weight"),
        HFRule(f"{_DEPTH}.hnorm.weight", "mtp.{i}.hidden_norm.weight"),
        HFRule(f"{_DEPTH}.eh_proj.weight", "mtp.{i}.projection.weight"),
        *placed(_BLOCK, _DEPTH, "mtp.{i}.block"),
        HFRule(f"{_DEPTH}.shared_head.norm.weight", "mtp.{i}.norm.weight"),
        HFRule(f"{_DEPTH}.embed_tokens.weight", "tok_embeddings.weight", "copy", _DEPTHS),
        HFRule(f"{_DEPTH}.shared_head.head.weight", "head.weight", "copy", _DEPTHS),
    ),
    config_to_ours="intarsia_deepseek_v3.hf:config_to_ours",
    config_to_theirs="intarsia_deepseek_v3.hf:config_to_theirs",
    ignored=("*.rotary_emb.inv_freq",),
    extra={
        "experts_field": "n_routed_experts",
        "hints": {
            "mtp.*": (
                f"config.json says {_DEPTHS} of 1 or more, so the layers of multi-token prediction must be there. transformers does not save them: set "
                f"{_DEPTHS} to 0 for a folder that it wrote."
            )
        },
    },
)

_ONLY: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "moe_layer_freq": 1,
}


def config_to_ours(theirs: Mapping[str, Any]) -> DeepSeekV3Config:
    """Our config from a `config.json`. UsageError, which names key and value, for what this family does not have."""
    version = V2 if (theirs.get("architectures") or [V3])[0] == V2 else V3
    expected = _ONLY | ({"scoring_func": "sigmoid", "topk_method": "noaux_tc"} if version == V3 else {"scoring_func": "softmax"})
    heads = theirs["num_attention_heads"]
    expected["num_key_value_heads"] = heads
    for key, value in expected.items():
        found = theirs.get(key)
        if found is not None and found != value:
            raise UsageError(f"config.json says {key} = {found!r}; intarsia-deepseek-v3 has only {value!r} for {version}.")
    attention = MLAConfig(
        heads=heads,
        kv_rank=theirs["kv_lora_rank"],
        q_rank=theirs.get("q_lora_rank"),
        nope_dim=theirs["qk_nope_head_dim"],
        rope_dim=theirs["qk_rope_head_dim"],
        value_dim=theirs["v_head_dim"],
        norm=RMSNormConfig(eps=LATENT_EPS),
    )
    return deepseek_v3(
        dim=theirs["hidden_size"],
        layers=theirs["num_hidden_layers"],
        dense_layers=min(theirs.get("first_k_dense_replace", 0), theirs["num_hidden_layers"]),
        attention=attention,
        dense_hidden=theirs["intermediate_size"],
        router=_router_of(theirs) if version == V3 else _v2_router_of(theirs),
        expert_hidden=theirs["moe_intermediate_size"],
        shared_experts=theirs.get("n_shared_experts") or 0,
        vocab_size=theirs["vocab_size"],
        rope=chz.replace(rope_from(theirs), interleaved=bool(theirs.get("rope_interleave", True))),
        max_positions=theirs.get("max_position_embeddings", 4096),
        ahead=theirs.get(_DEPTHS) or theirs.get("num_mtp_layers") or 0,
        tied=bool(theirs.get("tie_word_embeddings", False)),
        eps=theirs.get("rms_norm_eps", 1e-6),
    )


def _router_of(theirs: Mapping[str, Any]) -> RouterConfig:
    """V3's."""
    router = v3_router(
        experts=theirs["n_routed_experts"],
        top_k=theirs["num_experts_per_tok"],
        groups=theirs.get("n_group") or 1,
        top_groups=theirs.get("topk_group") or 1,
        scale=float(theirs.get("routed_scaling_factor", 1.0)),
    )
    return chz.replace(router, norm_topk=bool(theirs.get("norm_topk_prob", True)))


def _v2_router_of(theirs: Mapping[str, Any]) -> RouterConfig:
    """V2's: a softmax, with or without groups, weights as they are."""
    method, known = theirs.get("topk_method") or "greedy", ("greedy", "group_limited_greedy")
    if method not in known:
        raise UsageError(f"config.json says topk_method = {method!r}. {did_you_mean(str(method), known)}")
    if theirs.get("norm_topk_prob"):
        raise UsageError(
            f"config.json says norm_topk_prob = true, which {V2} does not compute; intarsia-deepseek-v3 has only false for it."
        )
    settings: dict[str, Any] = {
        "experts": theirs["n_routed_experts"],
        "top_k": theirs["num_experts_per_tok"],
        "norm_topk": False,
        "scale": float(theirs.get("routed_scaling_factor", 1.0)),
        "sequence_loss": 1e-3,
    }
    if method == "greedy":
        return SoftmaxRouterConfig(**settings)
    return GroupLimitedRouterConfig(
        **settings, scoring="softmax", group_score="max", groups=theirs["n_group"], top_groups=theirs["topk_group"]
    )


def config_to_theirs(ours: DeepSeekV3Config) -> dict[str, Any]:
    """A `config.json` of `DeepseekV3ForCausalLM`, or of `DeepseekV2ForCausalLM` where the router is a softmax. UsageError for what those classes do not have."""
    block, dense_layers, dense_hidden = _shape_of(ours)
    attention, experts, norm = block.attention, block.feed_forward, ours.norm
    assert isinstance(attention, MLAConfig) and isinstance(experts, MoEConfig) and isinstance(norm, RMSNormConfig)
    shared = experts.shared.hidden if isinstance(experts.shared, SwiGLUConfig) else 0
    if shared % experts.hidden:
        _refuse(f"the shared experts' width {shared} is no multiple of a routed one's, {experts.hidden}")
    rope = rope_to(ours.rope)
    if ours.rope.dim not in (None, attention.rope_dim):
        _refuse(f"rope.dim = {ours.rope.dim} is not the attention's rope_dim = {attention.rope_dim}")
    return {
        **_router_to(experts.router, ours),
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.dim,
        "intermediate_size": dense_hidden,
        "moe_intermediate_size": experts.hidden,
        "num_hidden_layers": len(ours.layers),
        _DEPTHS: len(ours.ahead),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "n_shared_experts": shared // experts.hidden,
        "n_routed_experts": experts.router.experts,
        "num_experts_per_tok": experts.router.top_k,
        "routed_scaling_factor": experts.router.scale,
        "norm_topk_prob": experts.router.norm_topk,
        "first_k_dense_replace": dense_layers,
        "moe_layer_freq": 1,
        "kv_lora_rank": attention.kv_rank,
        "q_lora_rank": attention.q_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": ours.max_positions,
        "rms_norm_eps": norm.eps,
        "tie_word_embeddings": ours.tied,
        **rope,
    }


def _router_to(router: RouterConfig, ours: DeepSeekV3Config) -> dict[str, Any]:
    """What says which class it is, and which experts it chooses."""
    groups = type(router) is GroupLimitedRouterConfig
    if groups and router.scoring == "sigmoid" and router.group_score == "top2" and router.bias_rate is not None:  # type: ignore[attr-defined]
        return {
            "architectures": [V3],
            "model_type": "deepseek_v3",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": router.groups,  # type: ignore[attr-defined]
            "topk_group": router.top_groups,  # type: ignore[attr-defined]
            "rope_interleave": ours.rope.interleaved,
        }
    softmax = type(router) is SoftmaxRouterConfig or (groups and router.scoring == "softmax" and router.group_score == "max")  # type: ignore[attr-defined]
    if not softmax or router.bias_rate is not None or router.norm_topk or not ours.rope.interleaved:
        _refuse(
            f"they have V3's router (group_limited: sigmoid scores, top2 groups, a bias) or V2's (softmax, or group_limited with softmax scores and max "
            f"groups; no bias, norm_topk false, interleaved rotations), and this is {router}"
        )
    return {
        "architectures": [V2],
        "model_type": "deepseek_v2",
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if groups else "greedy",
        "n_group": router.groups if groups else None,  # type: ignore[attr-defined]
        "topk_group": router.top_groups if groups else None,  # type: ignore[attr-defined]
    }


def _shape_of(ours: DeepSeekV3Config) -> tuple[BlockConfig, int, int]:
    """A block with experts, how many dense ones come before the first, and the dense ones' width. UsageError unless theirs can be like that."""
    dense = [block for block in ours.layers if isinstance(block.feed_forward, SwiGLUConfig)]
    sparse = [*ours.layers[len(dense) :], *ours.ahead]
    if not sparse or not all(isinstance(block.feed_forward, MoEConfig) for block in sparse):
        _refuse("they have dense blocks first and then at least one with experts, and nothing else")
    first = sparse[0]
    if any(block != first for block in sparse) or any(block != dense[0] for block in dense):
        _refuse("their blocks of one kind are equal, and this model's differ")
    norms = {
        first.attention_norm,
        first.feed_forward_norm,
        *(norm for block in dense[:1] for norm in (block.attention_norm, block.feed_forward_norm)),
    }
    if norms != {ours.norm} or type(ours.norm) is not RMSNormConfig:
        _refuse("their norms are RMS norms with one epsilon")
    attention, experts = first.attention, first.feed_forward
    replaced = type(attention) is not MLAConfig or type(experts) is not MoEConfig or type(experts.shared) not in (type(None), SwiGLUConfig)
    if replaced or any(block.attention != attention for block in dense):
        _refuse("a component of this model was replaced, and they have no place for the replacement")
    assert isinstance(attention, MLAConfig)
    if attention.norm != RMSNormConfig(eps=LATENT_EPS) or attention.scale is not None:
        _refuse(f"their latents' norms have an epsilon of {LATENT_EPS:g}, and scores no scale of their own")
    hidden = dense[0].feed_forward.hidden if dense else first.feed_forward.hidden  # type: ignore[attr-defined]
    return first, len(dense), hidden


def _refuse(why: str) -> None:
    raise UsageError(f"{V3} and {V2} cannot hold this model, so it cannot be exported as such: {why}.")
