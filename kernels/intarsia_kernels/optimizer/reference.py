"""What the optimizer kernels compute, as plain torch: the definitions that they are held to.

Shape suffixes: B matrices of a batch, M rows and columns of a symmetric result, K summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def symmetric_product(
    x: Tensor,
    y: Tensor,
    out_BMM: Tensor,
    *,
    transposed: bool = False,
    alpha: float = 1.0,
    addend_BMM: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> None:
    """`out = alpha X Y^T + beta S + gamma I` of every matrix of a batch, summed in float32 or better and rounded once.

    `x` and `y` are [B, M, K]; [B, K, M] if `transposed`, which makes it `X^T Y`. The caller promises that the result is symmetric up to rounding, so that one
    triangle may be computed and mirrored.
    """
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    left, right = (x.mT, y) if transposed else (x, y.mT)
    sums_BMM = torch.bmm(left.to(exact), right.to(exact)).mul_(alpha)
    if addend_BMM is not None:
        sums_BMM.add_(addend_BMM.to(exact), alpha=beta)
    if gamma:
        sums_BMM.diagonal(dim1=-2, dim2=-1).add_(gamma)
    out_BMM.copy_(sums_BMM.tril() + sums_BMM.tril(-1).mT)


def add_parts(parts: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
    """`out = scale (p0 + p1 + ...)`, added in rank order in float32 (float64 for a float64 `out`) and rounded once."""
    exact = torch.float64 if out.dtype == torch.float64 else torch.float32
    total = parts[0].to(exact, copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total.mul_(scale) if scale != 1.0 else total)
