"""Qwen3.5 keeps the promises of model families."""

from __future__ import annotations

from typing import Any

from intarsia_models_common.config import AttentionConfig, FeedForwardConfig, OffsetRMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.vision.config import VisionConfig
from intarsia_qwen3_5.config import Qwen35Config, experts, in_turns, qwen3_5
from intarsia_testing.model import LENGTHS, ModelConformance

from tests.support.visual_samples import packed_media

VALUES = 3 * 2 * 4 * 4


def small(feed_forward: FeedForwardConfig, tied: bool, ahead: int, vision: bool = True) -> Qwen35Config:
    full = AttentionConfig(heads=4, kv_heads=2, head_dim=16, qk_norm=OffsetRMSNormConfig(eps=1e-6), gate=True)
    return qwen3_5(
        dim=32,
        mixers=in_turns(GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=8), full, 4),
        feed_forward=feed_forward,
        vision=VisionConfig(depth=2, dim=16, hidden=24, heads=2, out_dim=32, patch=4, table=4) if vision else None,
        ahead_mixer=full,
        ahead=ahead,
        vocab_size=96,
        tied=tied,
        rope=RopeConfig(theta=1e7, dim=8, sections=(2, 1, 1)),
        max_positions=128,
        image_id=90,
        video_id=91,
        vision_start_id=92,
        vision_end_id=93,
    )


class TestQwen35(ModelConformance):
    """Dense, the head tied to the embedding, one depth of multi-token prediction."""

    entry = "intarsia-qwen3-5:qwen3_5"

    def config(self) -> Qwen35Config:
        return small(SwiGLUConfig(hidden=48), True, 1)

    def media(self) -> dict[str, Any]:
        return packed_media(LENGTHS, VALUES)


class TestQwen35Moe(ModelConformance):
    """With experts and a gated shared one."""

    entry = "qwen3_5"

    def config(self) -> Qwen35Config:
        return small(experts(8, 3, 16, 24), False, 1)

    def media(self) -> dict[str, Any]:
        return packed_media(LENGTHS, VALUES)


class TestQwen35TextMoe(ModelConformance):
    """Without a vision tower, with experts and multi-token prediction."""

    entry = "qwen3_5"

    def config(self) -> Qwen35Config:
        return small(experts(8, 3, 16, 24), True, 1, vision=False)


class TestQwen35Text(ModelConformance):
    """Without a vision tower, and without multi-token prediction."""

    entry = "qwen3_5"

    def config(self) -> Qwen35Config:
        return small(SwiGLUConfig(hidden=48), False, 0, vision=False)
