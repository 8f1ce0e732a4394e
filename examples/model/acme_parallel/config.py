"""The family's settings. Torch-free."""

from __future__ import annotations

import chz
from intarsia_models_common.config import AttentionConfig, BlockConfig, FeedForwardConfig, LanguageModelConfig, RMSNormConfig


@chz.chz(typecheck=True)
class SquaredReLUConfig(FeedForwardConfig):
    """A feed-forward layer without a gate (arXiv 2109.08668)."""

    hidden: int = chz.field(doc="Width between the projections.")


@chz.chz(typecheck=True)
class ParallelBlockConfig(BlockConfig):
    """Attention and feed-forward layer side by side. `feed_forward_norm` is not used: both read `attention_norm`."""

    gate_start: float = chz.field(default=1.0, doc="Value of every gate at the start.")


@chz.chz(typecheck=True)
class ParallelConfig(LanguageModelConfig):
    """A decoder of parallel blocks."""


def parallel(
    *, dim: int, layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, vocab_size: int, max_positions: int
) -> ParallelConfig:
    """A config whose blocks are all alike."""
    block = ParallelBlockConfig(
        attention=AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=RMSNormConfig()),
        feed_forward=SquaredReLUConfig(hidden=hidden),
    )
    return ParallelConfig(vocab_size=vocab_size, dim=dim, max_positions=max_positions, layers=(block,) * layers)
