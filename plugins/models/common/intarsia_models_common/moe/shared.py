"""The shared expert of Qwen's mixtures. B rows, S tokens, D model width, F hidden width."""

from __future__ import annotations

from intarsia import ops
from torch import Tensor, nn

from intarsia_models_common.attention import sigmoid_gate
from intarsia_models_common.build import Linear, Scope
from intarsia_models_common.moe.config import GatedSwiGLUConfig


class GatedSwiGLU(nn.Module):
    """y = sigmoid(g x) W2 (silu(W1 x) * W3 x): each token says by one number how much of it it takes."""

    def __init__(self, config: GatedSwiGLUConfig, scope: Scope) -> None:
        super().__init__()
        self.w1 = Linear(scope.dim, config.hidden, scope.std)
        self.w3 = Linear(scope.dim, config.hidden, scope.std)
        self.w2 = Linear(config.hidden, scope.dim, scope.output_std)
        self.gate = Linear(scope.dim, 1, scope.std)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Same shape and dtype."""
        y_BSD = self.w2(ops.swiglu(self.w1(x_BSD), self.w3(x_BSD)))
        return sigmoid_gate(y_BSD, self.gate(x_BSD).expand_as(y_BSD))
