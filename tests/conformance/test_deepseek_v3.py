"""DeepSeek-V3 keeps the promises of model families."""

from __future__ import annotations

from intarsia_deepseek_v3.config import DeepSeekV3Config, deepseek_v3, v3_router, yarn
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_models_common.moe.config import SoftmaxRouterConfig
from intarsia_testing.model import ModelConformance

MLA = MLAConfig(heads=4, kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=6)


class TestDeepSeekV3(ModelConformance):
    """Both kinds of blocks, YaRN, and two depths of multi-token prediction."""

    entry = "intarsia-deepseek-v3:deepseek_v3"

    def config(self) -> DeepSeekV3Config:
        return deepseek_v3(
            dim=32,
            layers=3,
            dense_layers=1,
            attention=MLA,
            dense_hidden=48,
            router=v3_router(experts=8, top_k=3, groups=4, top_groups=2, scale=2.5),
            expert_hidden=16,
            shared_experts=2,
            vocab_size=96,
            rope=yarn(10000.0, 8.0, 32, 1.0),
            max_positions=128,
            ahead=2,
        )


class TestDeepSeekV2(ModelConformance):
    """No latent for queries, a softmax for scores, the head tied to the embedding, no shared expert."""

    entry = "deepseek_v3"

    def config(self) -> DeepSeekV3Config:
        return deepseek_v3(
            dim=32,
            layers=2,
            dense_layers=0,
            attention=MLAConfig(heads=2, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6),
            dense_hidden=16,
            router=SoftmaxRouterConfig(experts=4, top_k=2, norm_topk=False, sequence_loss=1e-3),
            expert_hidden=16,
            shared_experts=0,
            vocab_size=64,
            rope=RopeConfig(interleaved=True),
            max_positions=128,
            tied=True,
        )

    def test_hugging_face_table_is_complete(self) -> None:
        """Their `architectures` are V2's: see the unit tests."""
