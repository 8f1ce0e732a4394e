"""Qwen3.5's settings and published sizes. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import chz
from intarsia_models_common.config import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    MixerConfig,
    OffsetRMSNormConfig,
    RopeConfig,
    SwiGLUConfig,
)
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.moe.config import JOINT_LOSS, GatedSwiGLUConfig, MoEConfig, softmax_experts
from intarsia_models_common.vision.config import VisionConfig, VisionLanguageModelConfig

FULL_EVERY = 4
"""Every fourth layer attends to all of the past, in the published sizes."""


@chz.chz(typecheck=True)
class Qwen35Config(VisionLanguageModelConfig):
    """Qwen3.5: three layers of gated DeltaNet (arXiv 2412.06464), then one of gated softmax attention, in turns; Qwen3-VL's vision tower without DeepStack."""

    ahead: tuple[BlockConfig, ...] = chz.field(
        default=(), doc="Blocks of multi-token prediction: the k-th predicts the token k places behind the next one."
    )


def qwen3_5(
    *,
    dim: int,
    mixers: Sequence[MixerConfig],
    feed_forward: FeedForwardConfig,
    vision: VisionConfig | None,
    ahead_mixer: MixerConfig | None = None,
    ahead: int = 0,
    vocab_size: int = 248320,
    tied: bool = False,
    rope: RopeConfig,
    max_positions: int = 262144,
    eps: float = 1e-6,
    image_id: int = 248056,
    video_id: int = 248057,
    vision_start_id: int = 248053,
    vision_end_id: int = 248054,
    initial_std: float = 0.02,
    embedding_std: float = 0.02,
) -> Qwen35Config:
    """A config of one block for each of `mixers`, and `ahead` further ones with `ahead_mixer` that predict further tokens. All norms store what is added to 1."""
    norm = OffsetRMSNormConfig(eps=eps)

    def block(mixer: MixerConfig) -> BlockConfig:
        return BlockConfig(attention=mixer, feed_forward=feed_forward, attention_norm=norm, feed_forward_norm=norm)

    return Qwen35Config(
        vocab_size=vocab_size,
        dim=dim,
        max_positions=max_positions,
        layers=tuple(map(block, mixers)),
        ahead=(block(ahead_mixer),) * ahead if ahead_mixer is not None else (),
        norm=norm,
        rope=rope,
        tied=tied,
        initial_std=initial_std,
        embedding_std=embedding_std,
        vision=vision,
        image_id=image_id,
        video_id=video_id,
        vision_start_id=vision_start_id,
        vision_end_id=vision_end_id,
    )


def hybrid(
    *,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    key_heads: int,
    value_heads: int,
    feed_forward: FeedForwardConfig,
    vision: VisionConfig | None,
    tied: bool = False,
    ahead: int = 1,
) -> Qwen35Config:
    """A published size: heads of 256 in softmax attention, a quarter of each rotated, and of 128 in gated DeltaNet."""
    full = AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=256, qk_norm=OffsetRMSNormConfig(eps=1e-6), gate=True)
    linear = GatedDeltaNetConfig(key_heads=key_heads, value_heads=value_heads, key_dim=128, value_dim=128)
    return qwen3_5(
        dim=dim,
        mixers=in_turns(linear, full, layers),
        feed_forward=feed_forward,
        vision=vision,
        ahead_mixer=full,
        ahead=ahead,
        tied=tied,
        rope=RopeConfig(theta=1e7, dim=64, sections=(11, 11, 10)),
    )


def in_turns(linear: MixerConfig, full: MixerConfig, layers: int) -> list[MixerConfig]:
    """`layers` mixers, of which every fourth is `full`."""
    return [linear if (layer + 1) % FULL_EVERY else full for layer in range(layers)]


def experts(count: int, top_k: int, hidden: int, shared: int, joint_loss: float = JOINT_LOSS) -> MoEConfig:
    """A softmax over all experts, the chosen ones' weights normalised, and a shared expert behind a gate of its own; balanced by a loss."""
    return softmax_experts(count, top_k, hidden, shared=GatedSwiGLUConfig(hidden=shared), joint_loss=joint_loss)


def medium_tower(out_dim: int) -> VisionConfig:
    """The vision tower of 2B and 4B: 24 blocks of width 1024."""
    return VisionConfig(depth=24, dim=1024, hidden=4096, heads=16, out_dim=out_dim)


def large_tower(out_dim: int) -> VisionConfig:
    """The vision tower of 9B and above: 27 blocks of width 1152."""
    return VisionConfig(depth=27, dim=1152, hidden=4304, heads=16, out_dim=out_dim)


def debug() -> Qwen35Config:
    """Every part of the dense models in 1.6 million parameters, for the byte tokenizer with four further special tokens: trains on a laptop."""
    return _debug(SwiGLUConfig(hidden=256), _debug_tower())


def moe_debug() -> Qwen35Config:
    """The same with experts."""
    return _debug(experts(8, 2, 96, 96), _debug_tower())


def text_debug() -> Qwen35Config:
    """The same without a vision tower."""
    return _debug(SwiGLUConfig(hidden=256), None)


def _debug_tower() -> VisionConfig:
    # Small towers learn where things are sooner from a wider table of positions.
    return VisionConfig(depth=4, dim=128, hidden=256, heads=4, out_dim=96, patch=8, table=4, position_std=0.5)


def _debug(feed_forward: FeedForwardConfig, vision: VisionConfig | None) -> Qwen35Config:
    full = AttentionConfig(heads=4, kv_heads=2, head_dim=32, qk_norm=OffsetRMSNormConfig(eps=1e-6), gate=True)
    linear = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=32, value_dim=32, chunk=32)
    return qwen3_5(
        dim=96,
        mixers=in_turns(linear, full, 4),
        feed_forward=feed_forward,
        vision=vision,
        ahead_mixer=full,
        ahead=1,
        vocab_size=320,
        rope=RopeConfig(theta=1e4, dim=16, sections=(3, 3, 2)),
        max_positions=4096,
        image_id=266,
        video_id=267,
        vision_start_id=264,
        vision_end_id=265,
        initial_std=0.06,
        embedding_std=0.1,
    )


def qwen3_5_0_8b(ahead: int = 1) -> Qwen35Config:
    """Qwen3.5 0.8B: 852,985,920 parameters, and those of its layer that predicts one token further ahead."""
    return hybrid(
        dim=1024,
        layers=24,
        heads=8,
        kv_heads=2,
        key_heads=16,
        value_heads=16,
        feed_forward=SwiGLUConfig(hidden=3584),
        vision=VisionConfig(depth=12, dim=768, hidden=3072, heads=12, out_dim=1024),
        tied=True,
        ahead=ahead,
    )


def qwen3_5_2b(ahead: int = 1) -> Qwen35Config:
    """Qwen3.5 2B: 2,213,241,664 parameters without the layer that predicts ahead."""
    return hybrid(
        dim=2048,
        layers=24,
        heads=8,
        kv_heads=2,
        key_heads=16,
        value_heads=16,
        feed_forward=SwiGLUConfig(hidden=6144),
        vision=medium_tower(2048),
        tied=True,
        ahead=ahead,
    )


def qwen3_5_4b(ahead: int = 1) -> Qwen35Config:
    """Qwen3.5 4B: 4,539,265,536 parameters without the layer that predicts ahead."""
    return hybrid(
        dim=2560,
        layers=32,
        heads=16,
        kv_heads=4,
        key_heads=16,
        value_heads=32,
        feed_forward=SwiGLUConfig(hidden=9216),
        vision=medium_tower(2560),
        tied=True,
        ahead=ahead,
    )


def qwen3_5_9b(ahead: int = 1) -> Qwen35Config:
    """Qwen3.5 9B: 9,409,813,744 parameters without the layer that predicts ahead."""
    return hybrid(
        dim=4096,
        layers=32,
        heads=16,
        kv_heads=4,
        key_heads=16,
        value_heads=32,
        feed_forward=SwiGLUConfig(hidden=12288),
        vision=large_tower(4096),
        ahead=ahead,
    )


def qwen3_5_27b(ahead: int = 1) -> Qwen35Config:
    """Qwen3.5 27B: 27,356,728,560 parameters without the layer that predicts ahead."""
    return hybrid(
        dim=5120,
        layers=64,
        heads=24,
        kv_heads=4,
        key_heads=16,
        value_heads=48,
        feed_forward=SwiGLUConfig(hidden=17408),
        vision=large_tower(5120),
        ahead=ahead,
    )


def qwen3_5_35b_a3b(ahead: int = 1) -> Qwen35Config:
    """Qwen3.5 35B-A3B: 35,107,181,936 parameters without the layer that predicts ahead, 3.9 billion of them for each token."""
    return hybrid(
        dim=2048,
        layers=40,
        heads=16,
        kv_heads=2,
        key_heads=16,
        value_heads=32,
        feed_forward=experts(256, 8, 512, 512),
        vision=large_tower(2048),
        ahead=ahead,
    )


def qwen3_5_122b_a10b(ahead: int = 1) -> Qwen35Config:
    """Qwen3.5 122B-A10B: 122,562,817,776 parameters without the layer that predicts ahead, 10.2 billion of them for each token."""
    return hybrid(
        dim=3072,
        layers=48,
        heads=32,
        kv_heads=2,
        key_heads=16,
        value_heads=64,
        feed_forward=experts(256, 8, 1024, 1024),
        vision=large_tower(3072),
        ahead=ahead,
    )


def qwen3_5_397b_a17b(ahead: int = 1) -> Qwen35Config:
    """Qwen3.5 397B-A17B: 396,802,360,816 parameters without the layer that predicts ahead, 17.8 billion of them for each token."""
    return hybrid(
        dim=4096,
        layers=60,
        heads=32,
        kv_heads=2,
        key_heads=16,
        value_heads=64,
        feed_forward=experts(512, 10, 1024, 1024),
        vision=large_tower(4096),
        ahead=ahead,
    )
