"""Qwen3.5 gives the logits, the loss and the gradients of transformers' Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration, on text, images and video."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from intarsia_generation import CacheContext
from intarsia_generation.prompts import View, piece_of
from intarsia_testing.parity import ParityTests
from intarsia_testing.promise import keep

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


def without_chunks(recurrent: Callable[..., Any]) -> Callable[..., Any]:
    """Their recurrent form where the chunked one is called."""
    known = {"g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"}
    return lambda *inputs, **settings: recurrent(*inputs, **{name: value for name, value in settings.items() if name in known})


class Recurrent(ParityTests):
    # With weights as large as those of the other families' tests a rounding of them alone, 6e-8, moves the logits by 3e-5.
    noise = 0.05
    STEPS = 1e-4

    def test_gradients_agree(self, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[override]
        """With their recurrent form: gradients of their chunked one (of `A_log`) are up to 1e-2 from it, for rounding."""
        for kind in ("qwen3_5", "qwen3_5_moe"):
            module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
            monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", without_chunks(module.torch_recurrent_gated_delta_rule))
        super().test_gradients_agree(batch)


class Hybrid(Recurrent, VisualParity):
    def test_steps_agree_with_chunks(self) -> None:
        """Ours token by token, with states and caches, gives theirs of whole rows."""
        theirs, ours, _ = self._both()
        samples = self.samples(theirs, "mixed")
        tokens_BS = samples.tokens_BS
        rows, length = tokens_BS.shape
        context, logits = CacheContext(ours.eval(), rows, tokens_BS.device), []
        with torch.no_grad():
            expected_BSV = self.run_theirs(theirs, samples).logits
            views = [View(ours, each.shown, length, tokens_BS.device) for each in samples.inputs()]
            for place in range(length):
                context.begin([1] * rows, piece_of(views, place, [1] * rows, tokens_BS.device))
                logits.append(ours.project(ours(tokens_BS[:, place : place + 1], context)))
        error = float((torch.cat(logits, 1) - expected_BSV).abs().max() / expected_BSV.abs().max())
        self._measured(theirs, "mixed", "steps", error, self.STEPS)
        keep("parity", error <= self.STEPS, f"logits token by token differ by {error:.2e} relative.")


class TestDense(Hybrid):
    entry = "intarsia-qwen3-5:qwen3_5"

    def reference(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3_5Config(text_config={**TEXT, "intermediate_size": 128}, vision_config=VISION, **IDS)
        config._attn_implementation = "eager"
        return transformers.Qwen3_5ForConditionalGeneration(config)


class TestExperts(Hybrid):
    entry = "qwen3_5"

    def reference(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3_5MoeConfig(text_config={**TEXT, **MOE}, vision_config=VISION, **IDS)
        config._attn_implementation = "eager"
        return transformers.Qwen3_5MoeForConditionalGeneration(config)


class TestTextOnly(Recurrent):
    """Without a tower, as a class of its own, whose config.json is a text_config; rows of more than one chunk."""

    entry = "qwen3_5"
    tokens = 84

    def reference(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3_5TextConfig(**TEXT, intermediate_size=128)
        config._attn_implementation = "eager"
        return transformers.Qwen3_5ForCausalLM(config)


class TestTextOnlyExperts(Recurrent):
    entry = "qwen3_5"

    def reference(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3_5MoeTextConfig(**TEXT, **MOE, tie_word_embeddings=True)
        config._attn_implementation = "eager"
        return transformers.Qwen3_5MoeForCausalLM(config)
