"""Root-mean-square norm (arXiv 1910.07467)."""

from __future__ import annotations

from intarsia import ops
from intarsia.contracts import Init
from torch import Tensor, nn

from intarsia_models_common.build import Scope, parameter
from intarsia_models_common.config import RMSNormConfig


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension; statistics in float32, the weight after the cast back."""

    def __init__(self, config: RMSNormConfig, scope: Scope) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = parameter(scope.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Same shape and dtype."""
        return ops.rms_norm(x_BSD, self.weight, self.eps)

    def inits(self) -> dict[str, Init]:
        """Ones."""
        return {"weight": Init("ones")}
