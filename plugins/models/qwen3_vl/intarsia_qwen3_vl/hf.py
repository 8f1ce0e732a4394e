"""Qwen3-VL and Hugging Face, both ways. Torch-free. Rotations are half-split on both sides, so no row is permuted; released experts are stacked and transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from intarsia.contracts import HFRule, HFTable
from intarsia.errors import UsageError
from intarsia_models_common.config import AttentionConfig, FeedForwardConfig, RMSNormConfig, SwiGLUConfig
from intarsia_models_common.hf import EXPERTS_STACKED, block_rules, check_values, placed, rope_from, rope_to, text_to
from intarsia_models_common.moe.config import JOINT_LOSS, MoEConfig, SoftmaxRouterConfig, softmax_experts
from intarsia_models_common.vision.hf import PROCESSOR, ids_from, ids_to, vision_from, vision_rules, vision_to

from intarsia_qwen3_vl.config import Qwen3VLConfig, qwen3_vl

DENSE, SPARSE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"

_TRANSPOSED = (
    HFRule("mlp.experts.gate_up_proj", ("feed_forward.experts.w1", "feed_forward.experts.w3"), "transpose|split:2@1"),
    HFRule("mlp.experts.down_proj", "feed_forward.experts.w2", "transpose"),
)

TABLE = HFTable(
    rules=(
        HFRule("model.language_model.embed_tokens.weight", "tok_embeddings.weight"),
        # Transformers 5 saves experts as they are, while it reads both forms.
        *placed((*block_rules(), *_TRANSPOSED, *EXPERTS_STACKED), "model.language_model.layers.{i}", "layers.{i}"),
        HFRule("model.language_model.norm.weight", "norm.weight"),
        HFRule("lm_head.weight", "head.weight"),
        *vision_rules(),
    ),
    config_to_ours="intarsia_qwen3_vl.hf:config_to_ours",
    config_to_theirs="intarsia_qwen3_vl.hf:config_to_theirs",
    ignored=("*.rotary_emb.inv_freq", "*.rotary_pos_emb.inv_freq"),
    extra={
        **PROCESSOR,
        "hints": {
            "visual.*": "The folder has no vision tower. Text models of the family Qwen3 are read by intarsia-qwen3, as architectures = Qwen3ForCausalLM."
        },
    },
)

_ONLY: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config_to_ours(theirs: Mapping[str, Any]) -> Qwen3VLConfig:
    """Our config from a `config.json`. UsageError, which names key and value, for what this family does not have."""
    text = theirs["text_config"]
    check_values(text, _ONLY, "text_config.")
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    rope = rope_from(text, theta=5e5)
    if rope.sections is None:
        raise UsageError("config.json has no mrope_section: Qwen3-VL's positions have three axes.")
    return qwen3_vl(
        dim=text["hidden_size"],
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        feed_forward=_feed_forward_of(text, (theirs.get("architectures") or [theirs.get("model_type", "")])[0]),
        vision=vision_from(theirs["vision_config"]),
        head_dim=head_dim,
        vocab_size=text["vocab_size"],
        tied=bool(theirs.get("tie_word_embeddings", False)),
        rope=rope,
        max_positions=text.get("max_position_embeddings", 128000),
        eps=text.get("rms_norm_eps", 1e-6),
        **ids_from(theirs),
    )


def _feed_forward_of(text: Mapping[str, Any], kind: str) -> FeedForwardConfig:
    # Files of transformers 5 say num_local_experts, released ones num_experts.
    count = text.get("num_experts") or text.get("num_local_experts")
    if not count:
        return SwiGLUConfig(hidden=text["intermediate_size"])
    check_values(text, {"norm_topk_prob": True}, "text_config.")
    loss = float(text.get("router_aux_loss_coef", JOINT_LOSS))
    return softmax_experts(count, text["num_experts_per_tok"], text["moe_intermediate_size"], joint_loss=loss)


def config_to_theirs(ours: Qwen3VLConfig) -> dict[str, Any]:
    """A `config.json` of `Qwen3VLForConditionalGeneration`, or of `Qwen3VLMoeForConditionalGeneration` where blocks have experts. UsageError for what those classes do not have."""
    block, norm = ours.layers[0], ours.norm
    attention, feed_forward = block.attention, block.feed_forward
    if any(other != block for other in ours.layers) or not (norm == block.attention_norm == block.feed_forward_norm):
        _refuse("they have equal blocks and one norm epsilon, and this model's blocks or norms differ")
    if type(attention) is not AttentionConfig or type(norm) is not RMSNormConfig or type(feed_forward) not in (SwiGLUConfig, MoEConfig):
        _refuse("a component of this model was replaced, and they have no place for the replacement")
    assert isinstance(attention, AttentionConfig) and isinstance(norm, RMSNormConfig)
    plain = AttentionConfig(heads=attention.heads, kv_heads=attention.kv_heads, head_dim=attention.head_dim, qk_norm=norm)
    if attention != plain or ours.rope.interleaved or ours.rope.dim not in (None, attention.head_dim) or ours.rope.sections is None:
        _refuse(
            "their attention has norms over queries and keys with the blocks' epsilon, half-split rotations of whole heads on three axes, and nothing else: no window, "
            "softcap, sinks, gate, biases or own scale"
        )
    if ours.vision is None:
        _refuse("they have a vision tower, and this model has none")
    assert ours.vision is not None
    kind = "qwen3_vl_moe" if isinstance(feed_forward, MoEConfig) else "qwen3_vl"
    text = {
        "model_type": f"{kind}_text",
        **text_to(ours, attention, norm.eps),
        **_feed_forward_to(feed_forward),
        **rope_to(ours.rope),
    }
    return {
        "architectures": [SPARSE if kind == "qwen3_vl_moe" else DENSE],
        "model_type": kind,
        "text_config": text,
        "vision_config": {"model_type": f"{kind}_vision", "deepstack_visual_indexes": [], **vision_to(ours.vision)},
        **ids_to(ours),
        "tie_word_embeddings": ours.tied,
    }


def _feed_forward_to(ours: FeedForwardConfig) -> dict[str, Any]:
    if isinstance(ours, SwiGLUConfig):
        return {"intermediate_size": ours.hidden}
    assert isinstance(ours, MoEConfig)
    router = ours.router
    if router != SoftmaxRouterConfig(experts=router.experts, top_k=router.top_k, joint_loss=router.joint_loss) or ours.shared is not None:
        _refuse(f"their experts have a softmax router with normalised weights, no bias and no shared expert, and this is {ours}")
    return {
        "intermediate_size": ours.hidden,
        "moe_intermediate_size": ours.hidden,
        "num_experts": router.experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": True,
        "router_aux_loss_coef": router.joint_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _refuse(why: str) -> NoReturn:
    raise UsageError(f"{DENSE} and {SPARSE} cannot hold this model, so it cannot be exported as such: {why}.")
