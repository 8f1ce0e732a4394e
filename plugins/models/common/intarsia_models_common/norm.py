"""Root-mean-square norms (arXiv 1910.07467). N tokens of any arrangement, D model width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from intarsia import ops
from intarsia.contracts import Init
from torch import Tensor, nn

from intarsia_models_common.build import Scope, parameter
from intarsia_models_common.config import OffsetRMSNormConfig, RMSNormConfig


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


def offset_reference(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`cast((1 + weight) * x / sqrt(mean(x^2) + eps))` over the last dimension, any leading ones.

    All of it is in float32 (float64 for float64 input), the sum 1 + weight included, and the result is cast to the input's dtype once.
    """
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    return F.rms_norm(x_ND.to(dtype), x_ND.shape[-1:], 1 + weight_D.to(dtype), eps).to(x_ND.dtype)


offset_rms_norm = ops.Operator("offset_rms_norm", offset_reference, "norm", invariant=True)


class OffsetRMSNorm(nn.Module):
    """y = (1 + weight) * x / sqrt(mean(x^2) + eps) over the last dimension, in float32, cast once."""

    def __init__(self, config: OffsetRMSNormConfig, scope: Scope) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = parameter(scope.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Same shape and dtype."""
        return offset_rms_norm(x_BSD, self.weight, self.eps)

    def inits(self) -> dict[str, Init]:
        """Zeros: the factor is 1."""
        return {"weight": Init("zeros")}
