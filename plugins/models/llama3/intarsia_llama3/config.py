"""Llama 3's settings and published sizes. Torch-free."""

from __future__ import annotations

import chz
from intarsia_models_common.config import AttentionConfig, BlockConfig, LanguageModelConfig, RMSNormConfig, RopeConfig, SwiGLUConfig


@chz.chz(typecheck=True)
class Llama3Config(LanguageModelConfig):
    """Llama 3, 3.1, 3.2 and 3.3 text models (arXiv 2407.21783)."""


def llama3(
    *,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    vocab_size: int = 128256,
    tied: bool = False,
    rope: RopeConfig | None = None,
    max_positions: int = 131072,
    eps: float = 1e-5,
    initial_std: float = 0.02,
    embedding_std: float = 0.02,
) -> Llama3Config:
    """A config whose blocks are all alike."""
    norm = RMSNormConfig(eps=eps)
    block = BlockConfig(
        attention=AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        feed_forward=SwiGLUConfig(hidden=hidden),
        attention_norm=norm,
        feed_forward_norm=norm,
    )
    return Llama3Config(
        vocab_size=vocab_size,
        dim=dim,
        max_positions=max_positions,
        layers=(block,) * layers,
        norm=norm,
        rope=rope or RopeConfig(theta=500000.0),
        tied=tied,
        initial_std=initial_std,
        embedding_std=embedding_std,
    )


def scaled_rope(factor: float, original_positions: int = 8192) -> RopeConfig:
    """Llama 3.1's stretched frequencies: factor 8, and 32 for the 3.2 models."""
    return RopeConfig(theta=500000.0, scaling="llama3", factor=factor, original_positions=original_positions)


def debug() -> Llama3Config:
    """1.8 million parameters for the byte tokenizer's 264 ids: trains on a laptop."""
    return llama3(dim=192, layers=4, heads=6, kv_heads=2, head_dim=32, hidden=576, vocab_size=320, max_positions=4096, embedding_std=0.5)


def llama3_1b() -> Llama3Config:
    """Llama 3.2 1B: 1,235,814,400 parameters."""
    return llama3(dim=2048, layers=16, heads=32, kv_heads=8, head_dim=64, hidden=8192, tied=True, rope=scaled_rope(32.0))


def llama3_3b() -> Llama3Config:
    """Llama 3.2 3B: 3,212,749,824 parameters."""
    return llama3(dim=3072, layers=28, heads=24, kv_heads=8, head_dim=128, hidden=8192, tied=True, rope=scaled_rope(32.0))


def llama3_8b() -> Llama3Config:
    """Llama 3.1 8B: 8,030,261,248 parameters. Llama 3.0 has the same without stretched frequencies."""
    return llama3(dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, hidden=14336, rope=scaled_rope(8.0))


def llama3_70b() -> Llama3Config:
    """Llama 3.1 and 3.3 70B: 70,553,706,496 parameters."""
    return llama3(dim=8192, layers=80, heads=64, kv_heads=8, head_dim=128, hidden=28672, rope=scaled_rope(8.0))


def llama3_405b() -> Llama3Config:
    """Llama 3.1 405B: 405,853,388,800 parameters."""
    return llama3(dim=16384, layers=126, heads=128, kv_heads=8, head_dim=128, hidden=53248, rope=scaled_rope(8.0))
