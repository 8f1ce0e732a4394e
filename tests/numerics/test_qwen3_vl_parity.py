"""Qwen3-VL gives the logits, the loss and the gradients of transformers' Qwen3VLForConditionalGeneration and Qwen3VLMoeForConditionalGeneration, on text, images and video."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.visual_parity import VisualParity

pytestmark = pytest.mark.parity

ROPE = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": ROPE,
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}
IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
# Not half of the hidden size: of stacks of square matrices transformers cannot tell whether they are transposed, as released ones are.
MOE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}


class TestDense(VisualParity):
    entry = "intarsia-qwen3-vl:qwen3_vl"

    def reference(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3VLConfig(text_config=TEXT, vision_config=VISION, **IDS, tie_word_embeddings=True)
        config._attn_implementation = "eager"
        return transformers.Qwen3VLForConditionalGeneration(config)


class TestExperts(VisualParity):
    entry = "qwen3_vl"

    def reference(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3VLMoeConfig(text_config={**TEXT, **MOE}, vision_config=VISION, **IDS)
        config._attn_implementation = "eager"
        return transformers.Qwen3VLMoeForConditionalGeneration(config)

    def as_files(self, tensors):
        """Released files have experts transposed."""
        return {name: tensor.transpose(1, 2) if ".experts." in name and tensor is not None else tensor for name, tensor in tensors.items()}
