"""Settings of the building blocks. Torch-free. Third parties replace any of them by an override or subclass them."""

from __future__ import annotations

import math

import chz
from intarsia.config import ComponentConfig, ModelConfig
from intarsia.errors import UsageError, did_you_mean

SCALINGS = ("none", "linear", "llama3", "yarn")


def check_between(field: str, value: float, least: float, below: float = math.inf) -> None:
    """UsageError unless least <= value < below, which a NaN is not."""
    if not least <= value < below:
        limits = f"at least {least:g} and below {below:g}" if below < math.inf else f"finite and at least {least:g}"
        raise UsageError(f"{field} = {value}: it must be {limits}.")


@chz.chz(typecheck=True)
class NormConfig(ComponentConfig):
    """What stands where a norm does: module(x) -> same shape."""


@chz.chz(typecheck=True)
class MixerConfig(ComponentConfig):
    """What mixes along the sequence: module(x_BSD, rope, context) -> [B, S, D]."""


@chz.chz(typecheck=True)
class FeedForwardConfig(ComponentConfig):
    """What mixes along the channels: module(x_BSD) -> [B, S, D]."""


@chz.chz(typecheck=True)
class RMSNormConfig(NormConfig):
    """Root-mean-square norm with a weight."""

    eps: float = chz.field(default=1e-5, doc="Added to the mean square.")

    @chz.validate
    def _eps_is_small(self) -> None:
        check_between("rms_norm.eps", self.eps, 0, 1)


@chz.chz(typecheck=True)
class OffsetRMSNormConfig(NormConfig):
    """Root-mean-square norm whose factor is 1 plus the weight, so that weight decay pulls it to 1; cast once, behind the factor."""

    eps: float = chz.field(default=1e-6, doc="Added to the mean square.")

    @chz.validate
    def _eps_is_small(self) -> None:
        check_between("offset_rms_norm.eps", self.eps, 0, 1)


@chz.chz(typecheck=True)
class RopeConfig(ComponentConfig):
    """Rotary position embedding: the angles, computed in float32."""

    theta: float = chz.field(default=10000.0, doc="Base of the frequencies theta^(-2i/d).")
    dim: int | None = chz.field(default=None, doc="Dimensions of a head that are rotated; none: all.")
    interleaved: bool = chz.field(default=False, doc="Rotate pairs (2i, 2i+1) instead of (i, i + d/2).")
    scaling: str = chz.field(default="none", doc="How frequencies are stretched for longer contexts: none, linear, llama3 or yarn.")
    factor: float = chz.field(default=1.0, doc="linear, llama3, yarn: how many times longer the context becomes.")
    original_positions: int = chz.field(default=8192, doc="llama3, yarn: the context length before scaling.")
    low_frequency_factor: float = chz.field(
        default=1.0, doc="llama3: wavelengths above original_positions over this are stretched in full."
    )
    high_frequency_factor: float = chz.field(default=4.0, doc="llama3: wavelengths below original_positions over this stay.")
    beta_fast: float = chz.field(default=32.0, doc="yarn: dimensions that turn more often than this in the original context stay.")
    beta_slow: float = chz.field(default=1.0, doc="yarn: dimensions that turn less often than this are stretched in full.")
    truncate: bool = chz.field(default=True, doc="yarn: round the bounds of the ramp to whole dimensions.")
    attention_factor: float | None = chz.field(
        default=None, doc="yarn: multiplier of cosine and sine; none: 0.1 ln(factor) + 1, or from mscale and mscale_all_dim."
    )
    mscale: float | None = chz.field(default=None, doc="yarn: DeepSeek's numerator of the attention factor.")
    mscale_all_dim: float | None = chz.field(default=None, doc="yarn: DeepSeek's denominator of the attention factor.")
    sections: tuple[int, int, int] | None = chz.field(
        default=None,
        doc="How many pairs turn by a token's place in time, height and width: the first pairs take turns (time, height, width, time ...), the rest turn by time. None: all "
        "turn by the place in the document.",
    )

    @chz.validate
    def _scaling_is_known(self) -> None:
        check_between("rope.theta", self.theta, 1)
        check_between("rope.original_positions", self.original_positions, 1)
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise UsageError(f"rope.dim = {self.dim}: rotary positions turn pairs, so it must be even and at least 2, or none.")
        if self.sections is not None:
            self._check_sections(self.sections)
        if self.scaling not in SCALINGS:
            raise UsageError(f"rope.scaling is {self.scaling!r}. {did_you_mean(self.scaling, SCALINGS)}")
        if self.scaling != "none" and self.factor < 1.0:
            raise UsageError(
                f"rope.factor is {self.factor}: a stretched context is at least as long as the original one, so it must be 1 or more."
            )

    def _check_sections(self, sections: tuple[int, int, int]) -> None:
        pairs = sum(sections)
        # Height has the pairs 1, 4, 7 ..., width the pairs 2, 5, 8 ..., and time what is left.
        if min(sections) < 0 or 3 * sections[1] - 2 >= pairs or 3 * sections[2] - 1 >= pairs:
            raise UsageError(
                f"rope.sections = {sections}: {pairs} pairs that take turns do not give height and width so many. Give time more."
            )
        if self.dim is not None and pairs != self.dim // 2:
            raise UsageError(f"rope.sections = {sections} are {pairs} pairs, and rope.dim = {self.dim} has {self.dim // 2}.")


@chz.chz(typecheck=True)
class AttentionConfig(MixerConfig):
    """Causal softmax attention with grouped key/value heads."""

    heads: int = chz.field(doc="Query heads.")
    kv_heads: int = chz.field(doc="Key/value heads; each serves heads / kv_heads query heads.")
    head_dim: int = chz.field(doc="Dimension of a head.")
    window: int | None = chz.field(default=None, doc="How many tokens back a token sees, itself included; none: all.")
    softcap: float | None = chz.field(default=None, doc="Scores become c tanh(scores / c); none: as they are.")
    sinks: bool = chz.field(default=False, doc="One learned logit for each head in the softmax's denominator.")
    qk_norm: NormConfig | None = chz.field(default=None, doc="A norm over each query and key head, before the rotation.")
    bias: bool = chz.field(default=False, doc="Biases on query, key and value projections.")
    scale: float | None = chz.field(default=None, doc="Multiplier of the scores; none: head_dim^-0.5.")
    rotate: bool = chz.field(default=True, doc="Apply rotary positions.")
    gate: bool = chz.field(default=False, doc="Multiply what each head gives by the sigmoid of a further projection of the input.")

    @chz.validate
    def _heads_divide(self) -> None:
        for field in ("heads", "kv_heads", "head_dim"):
            check_between(f"attention.{field}", getattr(self, field), 1)
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise UsageError(f"attention.softcap = {self.softcap}: it must be finite and greater than 0, or none.")
        if self.heads % self.kv_heads:
            raise UsageError(f"attention.heads = {self.heads} is not a multiple of attention.kv_heads = {self.kv_heads}.")
        if self.head_dim % 2 and self.rotate:
            raise UsageError(f"attention.head_dim = {self.head_dim} is odd: rotary positions turn pairs.")
        if self.window is not None and self.window < 1:
            raise UsageError(f"attention.window = {self.window}: a token sees at least itself, so it must be 1 or more, or none.")


@chz.chz(typecheck=True)
class MLAConfig(MixerConfig):
    """Multi-head latent attention: keys and values of all heads come from one latent for each token (arXiv 2405.04434)."""

    heads: int = chz.field(doc="Heads.")
    kv_rank: int = chz.field(doc="Width of the latent that keys and values come from.")
    q_rank: int | None = chz.field(default=None, doc="Width of the latent that queries come from; none: from the residual stream itself.")
    nope_dim: int = chz.field(doc="Dimensions of a query or key head that are not rotated.")
    rope_dim: int = chz.field(doc="Dimensions of a query head that are rotated, and of the one rotated key that all heads share.")
    value_dim: int = chz.field(doc="Dimension of a value head.")
    norm: NormConfig = chz.field(default_factory=lambda: RMSNormConfig(eps=1e-6), doc="The norm over each latent.")
    scale: float | None = chz.field(
        default=None, doc="Multiplier of the scores; none: (nope_dim + rope_dim)^-0.5, times what YaRN's mscale_all_dim asks for."
    )

    @chz.validate
    def _sizes_are_positive(self) -> None:
        for field in ("heads", "kv_rank", "nope_dim", "rope_dim", "value_dim"):
            check_between(f"mla.{field}", getattr(self, field), 1)
        if self.q_rank is not None:
            check_between("mla.q_rank", self.q_rank, 1)
        if self.rope_dim % 2:
            raise UsageError(f"mla.rope_dim = {self.rope_dim} is odd: rotary positions turn pairs.")


@chz.chz(typecheck=True)
class SwiGLUConfig(FeedForwardConfig):
    """The gated feed-forward layer down(silu(gate x) * up x)."""

    hidden: int = chz.field(doc="Width between the projections.")

    @chz.validate
    def _hidden_is_positive(self) -> None:
        check_between("swiglu.hidden", self.hidden, 1)


@chz.chz(typecheck=True)
class BlockConfig(ComponentConfig):
    """A pre-norm residual block: attention, then a feed-forward layer."""

    attention: MixerConfig = chz.field(doc="What mixes along the sequence.")
    feed_forward: FeedForwardConfig = chz.field(doc="What mixes along the channels.")
    attention_norm: NormConfig = chz.field(default_factory=RMSNormConfig, doc="Norm before attention.")
    feed_forward_norm: NormConfig = chz.field(default_factory=RMSNormConfig, doc="Norm before the feed-forward layer.")


def head_normed_block(*, heads: int, kv_heads: int, head_dim: int, feed_forward: FeedForwardConfig, norm: NormConfig) -> BlockConfig:
    """Attention with a norm over each query and key head, then `feed_forward`; all norms are alike (Qwen3)."""
    attention = AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=norm)
    return BlockConfig(attention=attention, feed_forward=feed_forward, attention_norm=norm, feed_forward_norm=norm)


@chz.chz(typecheck=True)
class LanguageModelConfig(ModelConfig):
    """A decoder-only language model. Families derive from it."""

    layers: tuple[BlockConfig, ...] = chz.field(doc="The blocks, first to last.")
    norm: NormConfig = chz.field(default_factory=RMSNormConfig, doc="The norm before the output projection.")
    rope: RopeConfig = chz.field(default_factory=RopeConfig, doc="Rotary positions, one table for all layers.")
    tied: bool = chz.field(default=False, doc="The output projection is the embedding.")
    initial_std: float = chz.field(
        default=0.02,
        doc="Standard deviation of projections at the start; outputs of blocks get this / sqrt(2 layers).",
        metadata={"computes": False},
    )
    embedding_std: float = chz.field(default=0.02, doc="Standard deviation of embeddings at the start.", metadata={"computes": False})

    @chz.validate
    def _has_layers(self) -> None:
        if not self.layers:
            raise UsageError("model.layers is empty: a model has at least one block.")

    @chz.validate
    def _stds_are_finite(self) -> None:
        check_between("model.initial_std", self.initial_std, 0)
        check_between("model.embedding_std", self.embedding_std, 0)
