"""The residual block. B rows, S tokens, D model width."""

from __future__ import annotations

from intarsia.contracts import SequenceContext
from torch import Tensor, nn

from intarsia_models_common.build import Scope, build
from intarsia_models_common.config import BlockConfig
from intarsia_models_common.rope import RopeTables


class Block(nn.Module):
    """a = x + Attention(Norm(x));  y = a + FeedForward(Norm(a))."""

    def __init__(self, config: BlockConfig, scope: Scope) -> None:
        super().__init__()
        self.attention_norm = build(config.attention_norm, scope.inside("attention_norm"))
        self.attention = build(config.attention, scope.inside("attention"))
        self.feed_forward_norm = build(config.feed_forward_norm, scope.inside("feed_forward_norm"))
        self.feed_forward = build(config.feed_forward, scope.inside("feed_forward"))

    def forward(self, x_BSD: Tensor, rope: RopeTables, context: SequenceContext) -> Tensor:
        """Same shape and dtype."""
        a_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope, context)
        x_BSD = self.feed_forward_norm(a_BSD)
        # Experts balance within documents, which the context knows.
        reads_context = getattr(self.feed_forward, "reads_context", False)
        return a_BSD + (self.feed_forward(x_BSD, context) if reads_context else self.feed_forward(x_BSD))
