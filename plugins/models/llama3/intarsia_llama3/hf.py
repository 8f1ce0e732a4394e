"""Llama 3 and Hugging Face, both ways. Torch-free. Rotations are half-split on both sides, so no row is permuted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intarsia.contracts import HFRule, HFTable
from intarsia.errors import UsageError
from intarsia_models_common.config import AttentionConfig, RMSNormConfig, SwiGLUConfig
from intarsia_models_common.hf import SWIGLU, placed, rope_from, rope_to, text_to

from intarsia_llama3.config import Llama3Config, llama3

_BLOCK = (
    HFRule("input_layernorm.weight", "attention_norm.weight"),
    HFRule("self_attn.q_proj.weight", "attention.wq.weight"),
    HFRule("self_attn.k_proj.weight", "attention.wk.weight"),
    HFRule("self_attn.v_proj.weight", "attention.wv.weight"),
    HFRule("self_attn.o_proj.weight", "attention.wo.weight"),
    HFRule("post_attention_layernorm.weight", "feed_forward_norm.weight"),
    *placed(SWIGLU, "mlp", "feed_forward"),
)

TABLE = HFTable(
    rules=(
        HFRule("model.embed_tokens.weight", "tok_embeddings.weight"),
        *placed(_BLOCK, "model.layers.{i}", "layers.{i}"),
        HFRule("model.norm.weight", "norm.weight"),
        HFRule("lm_head.weight", "head.weight"),
    ),
    config_to_ours="intarsia_llama3.hf:config_to_ours",
    config_to_theirs="intarsia_llama3.hf:config_to_theirs",
    ignored=("*.rotary_emb.inv_freq",),
)


def config_to_ours(theirs: Mapping[str, Any]) -> Llama3Config:
    """Our config from a `config.json`. UsageError for what Llama 3 of ours does not have."""
    unsupported = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "pretraining_tp": 1}
    for key, expected in unsupported.items():
        if theirs.get(key, expected) != expected:
            raise UsageError(f"config.json says {key} = {theirs[key]!r}; intarsia-llama3 has only {expected!r}.")
    heads = theirs["num_attention_heads"]
    return llama3(
        dim=theirs["hidden_size"],
        layers=theirs["num_hidden_layers"],
        heads=heads,
        kv_heads=theirs.get("num_key_value_heads") or heads,
        head_dim=theirs.get("head_dim") or theirs["hidden_size"] // heads,
        hidden=theirs["intermediate_size"],
        vocab_size=theirs["vocab_size"],
        tied=bool(theirs.get("tie_word_embeddings", False)),
        rope=rope_from(theirs),
        max_positions=theirs.get("max_position_embeddings", 2048),
        eps=theirs.get("rms_norm_eps", 1e-6),
    )


def config_to_theirs(ours: Llama3Config) -> dict[str, Any]:
    """A `config.json` of `LlamaForCausalLM`. UsageError for what that class does not have: unlike blocks, replaced components, interleaved rotations."""
    block = ours.layers[0]
    attention, feed_forward, norm = block.attention, block.feed_forward, ours.norm
    if any(other != block for other in ours.layers) or not (norm == block.attention_norm == block.feed_forward_norm):
        raise UsageError(
            "LlamaForCausalLM has equal blocks and one norm epsilon; this model's blocks or norms differ, so it cannot be exported as such."
        )
    if type(attention) is not AttentionConfig or type(feed_forward) is not SwiGLUConfig or type(norm) is not RMSNormConfig:
        raise UsageError(
            "A component of this model was replaced, and LlamaForCausalLM has no place for the replacement, so it cannot be exported as such."
        )
    plain = AttentionConfig(heads=attention.heads, kv_heads=attention.kv_heads, head_dim=attention.head_dim)
    if attention != plain or ours.rope.interleaved:
        raise UsageError(
            "LlamaForCausalLM has plain attention with half-split rotations: no window, softcap, sinks, head norms, biases or own scale, and "
            "rope.interleaved = false. This model cannot be exported as such."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **text_to(ours, attention, norm.eps),
        "intermediate_size": feed_forward.hidden,
        "mlp_bias": False,
        **rope_to(ours.rope),
    }
