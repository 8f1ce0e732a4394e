"""Qwen3 and Hugging Face, both ways. Torch-free. Rotations are half-split on both sides, so no row is permuted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from intarsia.contracts import HFRule, HFTable
from intarsia.errors import UsageError
from intarsia_models_common.config import AttentionConfig, BlockConfig, FeedForwardConfig, RMSNormConfig, SwiGLUConfig
from intarsia_models_common.hf import EXPERTS_APART, EXPERTS_STACKED, block_rules, check_values, placed, rope_from, rope_to, text_to
from intarsia_models_common.moe.config import JOINT_LOSS, MoEConfig, SoftmaxRouterConfig, softmax_experts

from intarsia_qwen3.config import Qwen3Config, qwen3

DENSE, SPARSE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"

TABLE = HFTable(
    rules=(
        HFRule("model.embed_tokens.weight", "tok_embeddings.weight"),
        # Files have experts apart, and stacked where whoever saved them had them in memory so.
        *placed((*block_rules(), *EXPERTS_APART, *EXPERTS_STACKED), "model.layers.{i}", "layers.{i}"),
        HFRule("model.norm.weight", "norm.weight"),
        HFRule("lm_head.weight", "head.weight"),
    ),
    config_to_ours="intarsia_qwen3.hf:config_to_ours",
    config_to_theirs="intarsia_qwen3.hf:config_to_theirs",
    ignored=("*.rotary_emb.inv_freq",),
    # Released files say num_experts, those of transformers 5 num_local_experts.
    extra={"experts_field": "num_experts|num_local_experts"},
)

_ONLY: dict[str, Any] = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "use_sliding_window": False}


def config_to_ours(theirs: Mapping[str, Any]) -> Qwen3Config:
    """Our config from a `config.json`. UsageError, which names key and value, for what this family does not have."""
    kind = theirs.get("model_type")
    if kind not in (None, "qwen3", "qwen3_moe"):
        raise UsageError(f"config.json says model_type = {kind!r}; intarsia-qwen3 reads 'qwen3' and 'qwen3_moe'.")
    check_values(theirs, _ONLY)
    if theirs["num_hidden_layers"] < 1:
        raise UsageError(f"config.json says num_hidden_layers = {theirs['num_hidden_layers']}; a model has at least one.")
    others = sorted(set(theirs.get("layer_types") or ()) - {"full_attention"})
    if others:
        raise UsageError(f"config.json has layers of the type {others[0]!r} (layer_types), and Qwen3 of ours has only 'full_attention'.")
    layers, heads = theirs["num_hidden_layers"], theirs["num_attention_heads"]
    # Their class with experts has no head_dim of its own.
    head_dim = theirs.get("head_dim") or (theirs["hidden_size"] // heads if kind == "qwen3_moe" else 128)
    rope = rope_from(theirs, head_dim=head_dim)
    if rope.dim is not None or rope.sections is not None:
        found = f"mrope_section = {list(rope.sections)}" if rope.sections else f"partial_rotary_factor = {(rope.dim or 0) / head_dim:g}"
        raise UsageError(f"config.json says {found}, and Qwen3 turns whole heads by a token's place in its document.")
    dense = SwiGLUConfig(hidden=theirs["intermediate_size"])
    feed_forward = _experts_of(theirs) or dense
    step, only = theirs.get("decoder_sparse_step") or 1, set(theirs.get("mlp_only_layers") or ())
    return qwen3(
        dim=theirs["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=theirs.get("num_key_value_heads") or heads,
        feed_forward=feed_forward,
        dense=dense,
        dense_layers=[number for number in range(layers) if number in only or (number + 1) % step],
        head_dim=head_dim,
        vocab_size=theirs["vocab_size"],
        tied=bool(theirs.get("tie_word_embeddings", False)),
        rope=rope,
        max_positions=theirs.get("max_position_embeddings", 32768),
        eps=theirs.get("rms_norm_eps", 1e-6),
    )


def _experts_of(theirs: Mapping[str, Any]) -> MoEConfig | None:
    kind, count = theirs.get("model_type"), theirs.get("num_experts", theirs.get("num_local_experts"))
    if kind == "qwen3_moe" and count is None:
        raise UsageError("config.json says model_type = 'qwen3_moe' and lacks num_experts (or num_local_experts).")
    if kind == "qwen3" or not count:
        return None
    return softmax_experts(
        count,
        theirs["num_experts_per_tok"],
        theirs["moe_intermediate_size"],
        norm_topk=bool(theirs.get("norm_topk_prob", False)),
        joint_loss=float(theirs.get("router_aux_loss_coef", JOINT_LOSS) or 0.0),
    )


def config_to_theirs(ours: Qwen3Config) -> dict[str, Any]:
    """A `config.json` of `Qwen3ForCausalLM`, or of `Qwen3MoeForCausalLM` where blocks have experts. UsageError for what those classes do not have."""
    attention, norm = _shape_of(ours)
    dense = {block.feed_forward for block in ours.layers if isinstance(block.feed_forward, SwiGLUConfig)}
    sparse = {block.feed_forward for block in ours.layers if isinstance(block.feed_forward, MoEConfig)}
    if len(dense) > 1 or len(sparse) > 1:
        _refuse("their blocks of one kind are equal, and this model's differ")
    return {
        "architectures": [SPARSE if sparse else DENSE],
        "model_type": "qwen3_moe" if sparse else "qwen3",
        **text_to(ours, attention, norm.eps),
        "use_sliding_window": False,
        "sliding_window": None,
        **_feed_forward_to(ours, next(iter(dense), None), next(iter(sparse), None)),
        **rope_to(ours.rope),
    }


def _shape_of(ours: Qwen3Config) -> tuple[AttentionConfig, RMSNormConfig]:
    """What all blocks have. UsageError unless theirs can be like that."""
    attention, norm = ours.layers[0].attention, ours.norm
    if type(attention) is not AttentionConfig or type(norm) is not RMSNormConfig:
        _refuse("a component of this model was replaced, and they have no place for the replacement")
    assert isinstance(attention, AttentionConfig) and isinstance(norm, RMSNormConfig)
    plain = AttentionConfig(heads=attention.heads, kv_heads=attention.kv_heads, head_dim=attention.head_dim, qk_norm=norm)
    rope = ours.rope
    if attention != plain or rope.interleaved or rope.sections is not None or rope.dim not in (None, attention.head_dim):
        _refuse(
            "their attention has norms over queries and keys with the blocks' epsilon, half-split rotations of whole heads, and nothing else: no window, softcap, sinks, "
            "gate, biases or own scale"
        )
    alike = {
        BlockConfig(attention=plain, feed_forward=block.feed_forward, attention_norm=norm, feed_forward_norm=norm) for block in ours.layers
    }
    if alike != set(ours.layers) or any(type(block.feed_forward) not in (SwiGLUConfig, MoEConfig) for block in ours.layers):
        _refuse("their blocks differ in the feed-forward layer alone, which is a SwiGLU or a mixture of experts, and have one norm epsilon")
    return attention, norm


def _feed_forward_to(ours: Qwen3Config, dense: FeedForwardConfig | None, sparse: FeedForwardConfig | None) -> dict[str, Any]:
    width = {} if dense is None else {"intermediate_size": dense.hidden}  # type: ignore[attr-defined]
    if not isinstance(sparse, MoEConfig):
        return width
    router = sparse.router
    plain = SoftmaxRouterConfig(experts=router.experts, top_k=router.top_k, norm_topk=router.norm_topk, joint_loss=router.joint_loss)
    if router != plain or sparse.shared is not None:
        _refuse(
            f"their experts have a softmax router without a bias, balanced by a loss over all layers, and no shared expert, and this is {sparse}"
        )
    return {
        "intermediate_size": sparse.hidden,
        **width,
        "moe_intermediate_size": sparse.hidden,
        "num_experts": router.experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.norm_topk,
        "router_aux_loss_coef": router.joint_loss,
        "output_router_logits": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number, block in enumerate(ours.layers) if isinstance(block.feed_forward, SwiGLUConfig)],
    }


def _refuse(why: str) -> NoReturn:
    raise UsageError(f"{DENSE} and {SPARSE} cannot hold this model, so it cannot be exported as such: {why}.")
