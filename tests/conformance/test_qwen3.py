"""Qwen3 keeps the promises of model families."""

from __future__ import annotations

import chz
import pytest
from intarsia.errors import UsageError
from intarsia_models_common.config import OffsetRMSNormConfig, SwiGLUConfig
from intarsia_models_common.moe.config import softmax_experts
from intarsia_qwen3.config import Qwen3Config, qwen3, stretched
from intarsia_testing.model import ModelConformance


class TestQwen3(ModelConformance):
    """Dense, heads that are wider together than the residual stream, the head tied to the embedding."""

    entry = "intarsia-qwen3:qwen3"

    def config(self) -> Qwen3Config:
        feed_forward = SwiGLUConfig(hidden=48)
        return qwen3(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, feed_forward=feed_forward, vocab_size=96, tied=True)


class TestQwen3Experts(ModelConformance):
    """Experts, but for one dense block; YaRN."""

    entry = "qwen3"

    def config(self) -> Qwen3Config:
        return stretched(
            qwen3(
                dim=32,
                layers=3,
                heads=4,
                kv_heads=1,
                head_dim=12,
                feed_forward=softmax_experts(8, 3, 16),
                dense=SwiGLUConfig(hidden=40),
                dense_layers=(1,),
                vocab_size=96,
            )
        )


class TestGatedAttention(ModelConformance):
    """The common attention behind a gate, norms that store what is added to 1, and positions on three axes, inside Qwen3's blocks."""

    entry = "qwen3"

    def config(self) -> Qwen3Config:
        plain = qwen3(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, feed_forward=SwiGLUConfig(hidden=40), vocab_size=64)
        norm = OffsetRMSNormConfig()
        attention = chz.replace(plain.layers[0].attention, gate=True, qk_norm=norm, bias=True)
        block = chz.replace(plain.layers[0], attention=attention, attention_norm=norm, feed_forward_norm=norm)
        return chz.replace(plain, layers=(block, block), norm=norm, rope=chz.replace(plain.rope, dim=8, sections=(2, 1, 1)))

    def test_hugging_face_table_is_complete(self) -> None:
        """Qwen3ForCausalLM has none of this."""
        with pytest.raises(UsageError, match="cannot be exported"):
            super().test_hugging_face_table_is_complete()
