"""The family's settings. Torch-free."""

from __future__ import annotations

import chz
from intarsia_models_common.config import AttentionConfig, BlockConfig, LanguageModelConfig, MixerConfig, SwiGLUConfig


@chz.chz(typecheck=True)
class GatedRecurrenceConfig(MixerConfig):
    """A gated linear recurrence, with a matrix of state for each head."""

    heads: int = chz.field(doc="Heads, each with a state and a gate of its own.")
    head_dim: int = chz.field(doc="Dimension of queries, keys and values.")


@chz.chz(typecheck=True)
class ToyRecurrenceConfig(LanguageModelConfig):
    """A decoder with recurrent blocks and blocks of attention."""


def toy(
    *, dim: int, layers: int, heads: int, head_dim: int, hidden: int, vocab_size: int, max_positions: int, attention_every: int = 2
) -> ToyRecurrenceConfig:
    """A config in which every `attention_every`-th block attends (0: none does) and the others are recurrent."""
    recurrent = BlockConfig(attention=GatedRecurrenceConfig(heads=heads, head_dim=head_dim), feed_forward=SwiGLUConfig(hidden=hidden))
    attending = BlockConfig(
        attention=AttentionConfig(heads=heads, kv_heads=max(1, heads // 2), head_dim=head_dim), feed_forward=SwiGLUConfig(hidden=hidden)
    )
    blocks = tuple(attending if attention_every and (i + 1) % attention_every == 0 else recurrent for i in range(layers))
    return ToyRecurrenceConfig(vocab_size=vocab_size, dim=dim, max_positions=max_positions, layers=blocks)
