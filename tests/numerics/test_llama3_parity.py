"""Llama 3 gives the logits, the loss and the gradients of transformers' LlamaForCausalLM."""

from __future__ import annotations

from typing import Any

import pytest
from intarsia_testing.parity import ParityTests

pytestmark = pytest.mark.parity

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    # 64 original positions make all three bands of frequencies occur at head dim 16.
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}


def reference(rope: str, tied: bool):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters=SCALINGS[rope],
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


class TestPlain(ParityTests):
    entry = "intarsia-llama3:llama3"

    def reference(self):
        return reference("default", tied=False)


class TestScaledAndTied(ParityTests):
    entry = "intarsia-llama3:llama3"

    def reference(self):
        return reference("llama3", tied=True)


class TestYarn(ParityTests):
    entry = "intarsia-llama3:llama3"
    tokens = 200

    def reference(self):
        return reference("yarn", tied=False)


class TestLinear(ParityTests):
    entry = "intarsia-llama3:llama3"

    def reference(self):
        return reference("linear", tied=False)
