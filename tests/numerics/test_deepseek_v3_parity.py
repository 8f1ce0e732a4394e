"""DeepSeek-V3 gives the logits, the loss and the gradients of transformers' DeepseekV3ForCausalLM, and V2's routers those of DeepseekV2ForCausalLM."""

from __future__ import annotations

from typing import Any

import pytest
from intarsia_testing.parity import ParityTests

pytestmark = pytest.mark.parity

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": YARN,
    "attn_implementation": "eager",
    "pad_token_id": None,
}


def unfused(tensors: Any) -> dict[str, Any]:
    """What transformers fuses in memory, as released files have it: gate and up of all experts, gate rows first, and down."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out[f"{base}{e}.gate_proj.weight"], out[f"{base}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            out |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": one for e, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def v3(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**SIZES, "num_nextn_predict_layers": 0, **changes}))


class Unfused(ParityTests):
    entry = "intarsia-deepseek-v3:deepseek_v3"

    def as_files(self, tensors):
        return unfused(tensors)


class TestV3(Unfused):
    def reference(self):
        return v3()


class TestMoonlight(Unfused):
    """No latent for queries, one group, two shared experts, another epsilon, plain rotations."""

    tokens = 80

    def reference(self):
        rope = {"rope_type": "default", "rope_theta": 50000.0}
        return v3(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            n_shared_experts=2,
            rms_norm_eps=1e-5,
            rope_parameters=rope,
            routed_scaling_factor=2.446,
        )


class TestHalfSplitRotations(Unfused):
    def reference(self):
        return v3(rope_interleave=False, norm_topk_prob=False, tie_word_embeddings=True)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
class TestV2(Unfused):
    @pytest.fixture(autouse=True)
    def _choose(self, method):
        self.method = method

    def reference(self):
        transformers = pytest.importorskip("transformers")
        groups = {} if self.method == "greedy" else {"n_group": 4, "topk_group": 2}
        sizes = {key: value for key, value in SIZES.items() if key not in ("n_group", "topk_group")}
        config = transformers.DeepseekV2Config(
            **sizes, **groups, topk_method=self.method, architectures=["DeepseekV2ForCausalLM"], routed_scaling_factor=16.0
        )
        return transformers.DeepseekV2ForCausalLM(config)
