"""Feed-forward layers. B rows, S tokens, D model width, F hidden width."""

from __future__ import annotations

from intarsia import ops
from torch import Tensor, nn

from intarsia_models_common.build import Linear, Scope
from intarsia_models_common.config import SwiGLUConfig


class SwiGLU(nn.Module):
    """y = W2 (silu(W1 x) * W3 x) (arXiv 2002.05202)."""

    def __init__(self, config: SwiGLUConfig, scope: Scope) -> None:
        super().__init__()
        self.w1 = Linear(scope.dim, config.hidden, scope.std)
        self.w3 = Linear(scope.dim, config.hidden, scope.std)
        self.w2 = Linear(config.hidden, scope.dim, scope.output_std)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Same shape and dtype."""
        return self.w2(ops.swiglu(self.w1(x_BSD), self.w3(x_BSD)))
