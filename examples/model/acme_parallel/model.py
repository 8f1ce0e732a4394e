"""The family, on one device. B rows, S tokens, D model width, F hidden width.

x = Embedding[tokens]
for each layer:  n = RMSNorm(x);  x = x + g_a * Attention(n) + g_f * FeedForward(n)
hidden = RMSNorm(x);  logits = hidden W^T
"""

from __future__ import annotations

from intarsia.contracts import Init, SequenceContext
from intarsia_models_common.base import LanguageModel
from intarsia_models_common.build import Linear, Scope, build, parameter
from intarsia_models_common.rope import RopeTables
from torch import Tensor, nn
from torch.nn import functional as F

from acme_parallel.config import ParallelBlockConfig, SquaredReLUConfig


class SquaredReLU(nn.Module):
    """y = W2 relu(W1 x)^2."""

    def __init__(self, config: SquaredReLUConfig, scope: Scope) -> None:
        super().__init__()
        self.w1 = Linear(scope.dim, config.hidden, scope.std)
        self.w2 = Linear(config.hidden, scope.dim, scope.output_std)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Same shape and dtype."""
        return self.w2(F.relu(self.w1(x_BSD)).square())


class ParallelBlock(nn.Module):
    """y = x + g_a * Attention(Norm(x)) + g_f * FeedForward(Norm(x)), with a gate for each channel."""

    def __init__(self, config: ParallelBlockConfig, scope: Scope) -> None:
        super().__init__()
        self.gate_start = config.gate_start
        self.attention_norm = build(config.attention_norm, scope.inside("attention_norm"))
        self.attention = build(config.attention, scope.inside("attention"))
        self.feed_forward = build(config.feed_forward, scope.inside("feed_forward"))
        self.attention_gate = parameter(scope.dim)
        self.feed_forward_gate = parameter(scope.dim)

    def forward(self, x_BSD: Tensor, rope: RopeTables, context: SequenceContext) -> Tensor:
        """Same shape and dtype."""
        n_BSD = self.attention_norm(x_BSD)
        mixed_BSD = self.attention(n_BSD, rope, context) * self.attention_gate
        return x_BSD + mixed_BSD + self.feed_forward(n_BSD) * self.feed_forward_gate

    def inits(self) -> dict[str, Init]:
        """Gates are constants; the other parameters are the components' own."""
        gate = Init("constant", value=self.gate_start)
        return {"attention_gate": gate, "feed_forward_gate": gate}


class Parallel(LanguageModel):
    """A decoder of parallel gated blocks: the common base builds it from its config, block by block."""
