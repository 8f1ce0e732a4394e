"""What the optimizer kernels compute, as plain torch: the definitions that they are held to.

Shape suffixes: B matrices of a batch, M rows and columns of a symmetric result, K summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOST = 2048.0
"""What rounding takes off a float16 is kept times this, which makes it as large as the number itself."""


def symmetric_product(
    x: Tensor,
    y: Tensor,
    out_BMM: Tensor,
    *,
    transposed: bool = False,
    alpha: float = 1.0,
    addends: Sequence[tuple[Tensor, float]] = (),
    gamma: float = 0.0,
    lost_BMM: Tensor | None = None,
    factors_B: Tensor | None = None,
    dropped: int = 0,
) -> None:
    """`out = f (alpha X Y^T + sum of beta S + gamma I)` of every matrix of a batch, summed in float32 or better and rounded once. `addends` are the (S, beta), `factors_B` each
    matrix's f.

    `x` and `y` are [B, M, K]; [B, K, M] if `transposed`, which makes it `X^T Y`. The caller promises that the result is symmetric up to rounding, so that one
    triangle may be computed and mirrored. `lost_BMM` gets `LOST` times what rounding took off `out`. `dropped` lowest bits of a float16 result may be left zero (rounded to nearest):
    multipliers take less power for them, and a chip at its power limit runs faster.
    """
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    left, right = (x.mT, y) if transposed else (x, y.mT)
    sums_BMM = torch.bmm(left.to(exact), right.to(exact)).mul_(alpha)
    for addend_BMM, beta in addends:
        sums_BMM.add_(addend_BMM.to(exact), alpha=beta)
    if gamma:
        sums_BMM.diagonal(dim1=-2, dim2=-1).add_(gamma)
    sums_BMM = sums_BMM.tril() + sums_BMM.tril(-1).mT
    if factors_B is not None:
        sums_BMM.mul_(factors_B[:, None, None])
    out_BMM.copy_(rounded(sums_BMM, dropped) if dropped and sums_BMM.dtype == torch.float32 else sums_BMM)
    if lost_BMM is not None:
        lost_BMM.copy_(sums_BMM.sub_(out_BMM).mul_(LOST))


def rounded(values: Tensor, dropped: int) -> Tensor:
    """float32 values to nearest even with `dropped` bits fewer than float16's eleven."""
    bits, low = values.view(torch.int32), 13 + dropped
    fewer = ((bits + (1 << (low - 1)) - 1 + ((bits >> low) & 1)) >> low << low).view(torch.float32)
    return torch.where(values == values, fewer, values)


def add_parts(parts: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
    """`out = scale (p0 + p1 + ...)`, added in rank order in float32 (float64 for a float64 `out`) and rounded once."""
    exact = torch.float64 if out.dtype == torch.float64 else torch.float32
    total = parts[0].to(exact, copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total.mul_(scale) if scale != 1.0 else total)
