"""Qwen3.5 gives the logits, the loss and the gradients of transformers' Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration, on text, images and video."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.visual_parity import VisualParity

pytestmark = pytest.mark.parity

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": ROPE,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


class TestDense(VisualParity):
    entry = "intarsia-qwen3-5:qwen3_5"
    # Both sides sum chunks of the gated delta rule in their own order.
    tolerance = 1e-4

    def reference(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3_5Config(text_config={**TEXT, "intermediate_size": 128}, vision_config=VISION, **IDS)
        config._attn_implementation = "eager"
        return transformers.Qwen3_5ForConditionalGeneration(config)


class TestExperts(VisualParity):
    entry = "qwen3_5"
    tolerance = 1e-4

    def reference(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3_5MoeConfig(text_config={**TEXT, **MOE}, vision_config=VISION, **IDS)
        config._attn_implementation = "eager"
        return transformers.Qwen3_5MoeForConditionalGeneration(config)
