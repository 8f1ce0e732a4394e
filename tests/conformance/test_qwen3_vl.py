"""Qwen3-VL keeps the promises of model families."""

from __future__ import annotations

from typing import Any

from intarsia_models_common.config import FeedForwardConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.moe.config import softmax_experts
from intarsia_models_common.vision.config import VisionConfig
from intarsia_qwen3_vl.config import Qwen3VLConfig, qwen3_vl
from intarsia_testing.model import LENGTHS, ModelConformance

from tests.support.visual_samples import packed_media

VALUES = 3 * 2 * 4 * 4


def small(feed_forward: FeedForwardConfig, tied: bool) -> Qwen3VLConfig:
    return qwen3_vl(
        dim=32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        feed_forward=feed_forward,
        vision=VisionConfig(depth=3, dim=16, hidden=24, heads=2, out_dim=32, patch=4, table=4, deepstack=(0, 2)),
        vocab_size=96,
        tied=tied,
        rope=RopeConfig(theta=5e6, sections=(2, 1, 1)),
        max_positions=128,
        image_id=90,
        video_id=91,
        vision_start_id=92,
        vision_end_id=93,
    )


class TestQwen3VL(ModelConformance):
    """Dense, the head tied to the embedding."""

    entry = "intarsia-qwen3-vl:qwen3_vl"

    def config(self) -> Qwen3VLConfig:
        return small(SwiGLUConfig(hidden=48), True)

    def media(self) -> dict[str, Any]:
        return packed_media(LENGTHS, VALUES)


class TestQwen3VLMoe(ModelConformance):
    """With experts."""

    entry = "qwen3_vl"

    def config(self) -> Qwen3VLConfig:
        return small(softmax_experts(8, 3, 16), False)

    def media(self) -> dict[str, Any]:
        return packed_media(LENGTHS, VALUES)
