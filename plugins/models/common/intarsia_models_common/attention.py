"""Softmax attention. B rows, S tokens, D model width, H query heads, K key/value heads, d head dim, E = H d, N tokens of any arrangement."""

from __future__ import annotations

import torch
from intarsia import ops
from intarsia.contracts import CacheSpec, Init, MixerSpec, SequenceContext
from torch import Tensor, nn

from intarsia_models_common.build import Linear, Scope, build, parameter
from intarsia_models_common.config import AttentionConfig
from intarsia_models_common.rope import RopeTables


def gate_reference(x_ND: Tensor, gate_ND: Tensor) -> Tensor:
    """`x * sigmoid(gate)`."""
    return x_ND * torch.sigmoid(gate_ND)


# On a CPU an element's sigmoid depends on how many elements there are, in its last bit.
sigmoid_gate = ops.Operator("sigmoid_gate", gate_reference, "pointwise", invariant=False)


class Attention(nn.Module):
    """y = Wo softmax(q k^T / sqrt(d)) v over the past, with grouped key/value heads (arXiv 2305.13245); with a gate Wo (softmax(..) v * sigmoid(Wg x)) (arXiv 2505.06708).

    Heads are counted from the projections' outputs by `head_dim`, never from the config, so that a slice of the heads is the same module.
    """

    def __init__(self, config: AttentionConfig, scope: Scope) -> None:
        super().__init__()
        self.name = scope.name
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5 if config.scale is None else config.scale
        self.window = config.window
        self.softcap = config.softcap
        self.rotate = config.rotate
        self.interleaved = scope.rope_interleaved
        self.wq = Linear(scope.dim, config.heads * config.head_dim, scope.std, config.bias)
        self.wk = Linear(scope.dim, config.kv_heads * config.head_dim, scope.std, config.bias)
        self.wv = Linear(scope.dim, config.kv_heads * config.head_dim, scope.std, config.bias)
        self.wo = Linear(config.heads * config.head_dim, scope.dim, scope.output_std)
        self.wg = Linear(scope.dim, config.heads * config.head_dim, scope.std, config.bias) if config.gate else None
        self.q_norm = None if config.qk_norm is None else build(config.qk_norm, scope.inside("q_norm", config.head_dim))
        self.k_norm = None if config.qk_norm is None else build(config.qk_norm, scope.inside("k_norm", config.head_dim))
        self.sinks = parameter(config.heads) if config.sinks else None

    def forward(self, x_BSD: Tensor, rope: RopeTables, context: SequenceContext) -> Tensor:
        """Same shape and dtype. The context decides what a token sees."""
        q_BSHd = self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKd = self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKd = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHd, k_BSKd = self.q_norm(q_BSHd), self.k_norm(k_BSKd)
        if self.rotate:
            q_BSHd = ops.rope(q_BSHd, *rope, self.interleaved)
            k_BSKd = ops.rope(k_BSKd, *rope, self.interleaved)
        y_BSHd = context.softmax(
            self.name, q_BSHd, k_BSKd, v_BSKd, scale=self.scale, window=self.window, softcap=self.softcap, sinks_H=self.sinks
        )
        y_BSE = y_BSHd.flatten(-2)
        return self.wo(y_BSE if self.wg is None else sigmoid_gate(y_BSE, self.wg(x_BSD)))

    def cache_spec(self) -> MixerSpec:
        """Rotated keys, and values, of every past token within the window."""
        shape = (self.wk.out_features // self.head_dim, self.head_dim)
        dtype = str(self.wk.weight.dtype).removeprefix("torch.")
        return MixerSpec("softmax", tuple(CacheSpec(name, "paged", shape, dtype, self.window) for name in ("key", "value")))

    def mixing_flops_per_token(self, sequence_tokens: int) -> float:
        """Forward FLOPs of scores and weighted values for one token, averaged over a causal sequence."""
        seen = min(self.window or sequence_tokens, sequence_tokens)
        average = seen * (1 - (seen - 1) / (2 * sequence_tokens))  # sum over t of min(t, seen), over the length
        return 4 * self.wq.out_features * average

    def inits(self) -> dict[str, Init]:
        """Sinks start at 0: an extra logit like any other."""
        return {} if self.sinks is None else {"sinks": Init("zeros")}
