"""Qwen3's settings and published sizes. Torch-free."""

from __future__ import annotations

from collections.abc import Collection

import chz
from intarsia.errors import UsageError
from intarsia_models_common.config import (
    FeedForwardConfig,
    LanguageModelConfig,
    RMSNormConfig,
    RopeConfig,
    SwiGLUConfig,
    head_normed_block,
)
from intarsia_models_common.moe.config import softmax_experts

TRAINED_POSITIONS = 32768
"""Tokens of the context that YaRN stretches."""


@chz.chz(typecheck=True)
class Qwen3Config(LanguageModelConfig):
    """Qwen3, dense and with experts (arXiv 2505.09388)."""


def qwen3(
    *,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    feed_forward: FeedForwardConfig,
    dense: FeedForwardConfig | None = None,
    dense_layers: Collection[int] = (),
    head_dim: int = 128,
    vocab_size: int = 151936,
    tied: bool = False,
    rope: RopeConfig | None = None,
    max_positions: int = 40960,
    eps: float = 1e-6,
    initial_std: float = 0.02,
    embedding_std: float = 0.02,
) -> Qwen3Config:
    """A config whose blocks are all alike, but for the numbers in `dense_layers`, which have `dense` in their feed-forward layer's place."""
    norm = RMSNormConfig(eps=eps)
    usual = head_normed_block(heads=heads, kv_heads=kv_heads, head_dim=head_dim, feed_forward=feed_forward, norm=norm)
    other = usual if dense is None else chz.replace(usual, feed_forward=dense)
    return Qwen3Config(
        vocab_size=vocab_size,
        dim=dim,
        max_positions=max_positions,
        layers=tuple(other if number in dense_layers else usual for number in range(layers)),
        norm=norm,
        rope=rope or RopeConfig(theta=1e6),
        tied=tied,
        initial_std=initial_std,
        embedding_std=embedding_std,
    )


def stretched(model: Qwen3Config, factor: float = 4.0) -> Qwen3Config:
    """The model for a context that is `factor` times as long as the trained one, by YaRN. UsageError where the model has as many positions without (those of July 2025)."""
    if model.max_positions > factor * TRAINED_POSITIONS:
        raise UsageError(
            f"The model has {model.max_positions} positions, and YaRN by the factor {factor:g} would leave it {round(factor * TRAINED_POSITIONS)} ({TRAINED_POSITIONS} of them trained). Leave "
            "it as it is, or take a larger factor."
        )
    rope = chz.replace(model.rope, scaling="yarn", factor=factor, original_positions=TRAINED_POSITIONS)
    return chz.replace(model, rope=rope, max_positions=round(factor * TRAINED_POSITIONS))


def debug() -> Qwen3Config:
    """1.8 million parameters for the byte tokenizer's 264 ids: trains on a laptop. As in most sizes, heads are wider together than the residual stream."""
    return qwen3(
        dim=192,
        layers=4,
        heads=8,
        kv_heads=2,
        head_dim=32,
        feed_forward=SwiGLUConfig(hidden=512),
        vocab_size=320,
        max_positions=4096,
        embedding_std=0.5,
    )


def moe_debug() -> Qwen3Config:
    """2.0 million parameters, 0.8 million of them for each token, for the byte tokenizer's 264 ids: trains on a laptop."""
    return qwen3(
        dim=128,
        layers=4,
        heads=8,
        kv_heads=2,
        head_dim=32,
        feed_forward=softmax_experts(8, 2, 128),
        vocab_size=320,
        max_positions=4096,
        embedding_std=0.5,
    )


def qwen3_0_6b() -> Qwen3Config:
    """Qwen3 0.6B: 596,049,920 parameters."""
    return qwen3(dim=1024, layers=28, heads=16, kv_heads=8, feed_forward=SwiGLUConfig(hidden=3072), tied=True)


def qwen3_1_7b() -> Qwen3Config:
    """Qwen3 1.7B: 1,720,574,976 parameters."""
    return qwen3(dim=2048, layers=28, heads=16, kv_heads=8, feed_forward=SwiGLUConfig(hidden=6144), tied=True)


def qwen3_4b() -> Qwen3Config:
    """Qwen3 4B: 4,022,468,096 parameters."""
    return qwen3(dim=2560, layers=36, heads=32, kv_heads=8, feed_forward=SwiGLUConfig(hidden=9728), tied=True)


def qwen3_8b() -> Qwen3Config:
    """Qwen3 8B: 8,190,735,360 parameters."""
    return qwen3(dim=4096, layers=36, heads=32, kv_heads=8, feed_forward=SwiGLUConfig(hidden=12288))


def qwen3_14b() -> Qwen3Config:
    """Qwen3 14B: 14,768,307,200 parameters."""
    return qwen3(dim=5120, layers=40, heads=40, kv_heads=8, feed_forward=SwiGLUConfig(hidden=17408))


def qwen3_32b() -> Qwen3Config:
    """Qwen3 32B: 32,762,123,264 parameters."""
    return qwen3(dim=5120, layers=64, heads=64, kv_heads=8, feed_forward=SwiGLUConfig(hidden=25600))


def qwen3_30b_a3b() -> Qwen3Config:
    """Qwen3 30B-A3B: 30,532,122,624 parameters, 3,353,032,704 of them for each token."""
    return qwen3(dim=2048, layers=48, heads=32, kv_heads=4, feed_forward=softmax_experts(128, 8, 768))


def qwen3_235b_a22b() -> Qwen3Config:
    """Qwen3 235B-A22B: 235,093,634,560 parameters, 22,190,763,520 of them for each token."""
    return qwen3(dim=4096, layers=94, heads=64, kv_heads=4, feed_forward=softmax_experts(128, 8, 1536))
