"""The shared expert of Qwen's mixtures. B rows, S tokens, D model width, F hidden width."""

from __future__ import annotations

from torch import Tensor

from intarsia_models_common.attention import sigmoid_gate
from intarsia_models_common.build import Linear, Scope
from intarsia_models_common.feed_forward import SwiGLU
from intarsia_models_common.moe.config import GatedSwiGLUConfig


class GatedSwiGLU(SwiGLU):
    """y = sigmoid(g x) W2 (silu(W1 x) * W3 x): each token says by one number how much of it it takes."""

    def __init__(self, config: GatedSwiGLUConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        self.gate = Linear(scope.dim, 1, scope.std)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Same shape and dtype."""
        y_BSD = super().forward(x_BSD)
        return sigmoid_gate(y_BSD, self.gate(x_BSD).expand_as(y_BSD))
