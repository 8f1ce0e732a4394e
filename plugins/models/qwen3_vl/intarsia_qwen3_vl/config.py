"""Qwen3-VL's settings and published sizes. Torch-free."""

from __future__ import annotations

import chz
from intarsia_models_common.config import FeedForwardConfig, RMSNormConfig, RopeConfig, SwiGLUConfig, head_normed_block
from intarsia_models_common.moe.config import softmax_experts
from intarsia_models_common.vision.config import VisionConfig, VisionLanguageModelConfig


@chz.chz(typecheck=True)
class Qwen3VLConfig(VisionLanguageModelConfig):
    """Qwen3-VL (arXiv 2511.21631): Qwen3 with a vision tower whose features enter at the embedding and behind the first blocks (DeepStack)."""


def qwen3_vl(
    *,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    feed_forward: FeedForwardConfig,
    vision: VisionConfig,
    head_dim: int = 128,
    vocab_size: int = 151936,
    tied: bool = False,
    rope: RopeConfig | None = None,
    max_positions: int = 262144,
    eps: float = 1e-6,
    image_id: int = 151655,
    video_id: int = 151656,
    vision_start_id: int = 151652,
    vision_end_id: int = 151653,
    initial_std: float = 0.02,
    embedding_std: float = 0.02,
) -> Qwen3VLConfig:
    """A config whose blocks are all alike. Positions turn in three axes, time, height and width, in turns (interleaved M-RoPE)."""
    norm = RMSNormConfig(eps=eps)
    block = head_normed_block(heads=heads, kv_heads=kv_heads, head_dim=head_dim, feed_forward=feed_forward, norm=norm)
    return Qwen3VLConfig(
        vocab_size=vocab_size,
        dim=dim,
        max_positions=max_positions,
        layers=(block,) * layers,
        norm=norm,
        rope=rope or RopeConfig(theta=5e6, sections=(24, 20, 20)),
        tied=tied,
        initial_std=initial_std,
        embedding_std=embedding_std,
        vision=vision,
        image_id=image_id,
        video_id=video_id,
        vision_start_id=vision_start_id,
        vision_end_id=vision_end_id,
    )


def small_tower(out_dim: int) -> VisionConfig:
    """The vision tower of 2B and 4B: 24 blocks of width 1024, features of three of them for DeepStack."""
    return VisionConfig(depth=24, dim=1024, hidden=4096, heads=16, out_dim=out_dim, deepstack=(5, 11, 17))


def large_tower(out_dim: int) -> VisionConfig:
    """The vision tower of the others: 27 blocks of width 1152."""
    return VisionConfig(depth=27, dim=1152, hidden=4304, heads=16, out_dim=out_dim, deepstack=(8, 16, 24))


def debug() -> Qwen3VLConfig:
    """Every part of the dense models in 2.0 million parameters, for the byte tokenizer with four further special tokens: trains on a laptop."""
    return _debug(SwiGLUConfig(hidden=256))


def moe_debug() -> Qwen3VLConfig:
    """The same with experts."""
    return _debug(softmax_experts(8, 2, 96))


def _debug(feed_forward: FeedForwardConfig) -> Qwen3VLConfig:
    # Small towers learn where things are sooner from a wider table of positions.
    vision = VisionConfig(depth=4, dim=128, hidden=256, heads=4, out_dim=96, patch=8, table=4, deepstack=(0, 1), position_std=0.5)
    return qwen3_vl(
        dim=96,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=32,
        feed_forward=feed_forward,
        vision=vision,
        vocab_size=320,
        rope=RopeConfig(theta=1e4, sections=(6, 5, 5)),
        max_positions=4096,
        image_id=266,
        video_id=267,
        vision_start_id=264,
        vision_end_id=265,
        initial_std=0.06,
        embedding_std=0.1,
    )


def qwen3_vl_2b() -> Qwen3VLConfig:
    """Qwen3-VL 2B: 2,127,532,032 parameters."""
    return qwen3_vl(dim=2048, layers=28, heads=16, kv_heads=8, feed_forward=SwiGLUConfig(hidden=6144), tied=True, vision=small_tower(2048))


def qwen3_vl_4b() -> Qwen3VLConfig:
    """Qwen3-VL 4B: 4,437,815,808 parameters."""
    return qwen3_vl(dim=2560, layers=36, heads=32, kv_heads=8, feed_forward=SwiGLUConfig(hidden=9728), tied=True, vision=small_tower(2560))


def qwen3_vl_8b() -> Qwen3VLConfig:
    """Qwen3-VL 8B: 8,767,123,696 parameters."""
    return qwen3_vl(dim=4096, layers=36, heads=32, kv_heads=8, feed_forward=SwiGLUConfig(hidden=12288), vision=large_tower(4096))


def qwen3_vl_32b() -> Qwen3VLConfig:
    """Qwen3-VL 32B: 33,357,390,064 parameters."""
    return qwen3_vl(dim=5120, layers=64, heads=64, kv_heads=8, feed_forward=SwiGLUConfig(hidden=25600), vision=large_tower(5120))


def qwen3_vl_30b_a3b() -> Qwen3VLConfig:
    """Qwen3-VL 30B-A3B: 31,070,754,032 parameters, 3.9 billion of them for each token."""
    return qwen3_vl(dim=2048, layers=48, heads=32, kv_heads=4, feed_forward=softmax_experts(128, 8, 768), vision=large_tower(2048))


def qwen3_vl_235b_a22b() -> Qwen3VLConfig:
    """Qwen3-VL 235B-A22B: 235,670,022,896 parameters, 22.8 billion of them for each token."""
    return qwen3_vl(dim=4096, layers=94, heads=64, kv_heads=4, feed_forward=softmax_experts(128, 8, 1536), vision=large_tower(4096))
