"""Llama 3 keeps the promises of model families."""

from __future__ import annotations

import chz
from intarsia_llama3.config import Llama3Config, llama3, scaled_rope
from intarsia_models_common.config import AttentionConfig, RMSNormConfig
from intarsia_testing.model import ModelConformance


class TestLlama3(ModelConformance):
    entry = "intarsia-llama3:llama3"

    def config(self) -> Llama3Config:
        return llama3(
            dim=32, layers=3, heads=4, kv_heads=2, head_dim=8, hidden=48, vocab_size=96, max_positions=128, rope=scaled_rope(8.0, 32)
        )


class TestTiedLlama3(ModelConformance):
    entry = "llama3"

    def config(self) -> Llama3Config:
        return llama3(dim=32, layers=2, heads=4, kv_heads=4, head_dim=10, hidden=40, vocab_size=64, tied=True, max_positions=128)


class TestEveryAttentionOption(ModelConformance):
    """The common attention with a window, a softcap, sinks, head norms, biases and interleaved rotations, inside Llama's blocks."""

    entry = "llama3"

    def config(self) -> Llama3Config:
        plain = llama3(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=40, vocab_size=64, max_positions=128)
        attention = AttentionConfig(
            heads=4, kv_heads=2, head_dim=8, window=4, softcap=5.0, sinks=True, qk_norm=RMSNormConfig(), bias=True, scale=0.5
        )
        layers = (plain.layers[0], chz.replace(plain.layers[1], attention=attention))
        return chz.replace(plain, layers=layers, rope=chz.replace(plain.rope, interleaved=True, dim=6))

    def test_hugging_face_table_is_complete(self) -> None:
        """LlamaForCausalLM has none of this: the unit tests see that export refuses it."""
