"""Layer norm (arXiv 1607.06450)."""

from __future__ import annotations

from intarsia.contracts import Init
from torch import Tensor, nn

from intarsia_models_common.build import Scope, parameter
from intarsia_models_common.vision.config import LayerNormConfig
from intarsia_models_common.vision.operators import LAYER_NORM


class LayerNorm(nn.Module):
    """y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last dimension, in float32, cast once."""

    def __init__(self, config: LayerNormConfig, scope: Scope) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = parameter(scope.dim)
        self.bias = parameter(scope.dim)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Same shape and dtype."""
        return LAYER_NORM(x_ND, self.weight, self.bias, self.eps)

    def inits(self) -> dict[str, Init]:
        """Ones, and zeros."""
        return {"weight": Init("ones"), "bias": Init("zeros")}
