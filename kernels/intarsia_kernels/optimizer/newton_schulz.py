"""Newton-Schulz for batches of matrices in float16, by symmetric products. B matrices, M rows, N columns; m the shorter side, n the longer.

    X <- G / max(norm(G), eps)       then `steps` times       A = X X^T,   X <- (a I + b A + c A A) X

(Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.) A, A A and the polynomials are symmetric, so half of their tiles are
computed. Two ways, by shape:

* near square: as above, with one symmetric product of depth n and one of depth m a step, and X <- P X.
* otherwise on the Gram matrix: within a segment of two or three steps X is not touched. With A' = P A P a step maps m x m matrices only, and the segment's
  polynomials are multiplied up. X is touched twice a segment, to make A and to apply the product. A is made afresh from X between segments, and that is what
  keeps it accurate: what float16 rounds off A is lost for the small singular values, and grows as they do. One segment of five steps is faster and wrong.

float16 rounds eight times finer than bfloat16. Its range is made to suffice by powers of two: X is kept as X_SCALE X and A as A_SCALE A, so that neither the entries of
a large matrix of norm 1 nor those of its Gram matrix become subnormal. A tall matrix is worked on from the right (X <- X P), not transposed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from intarsia_kernels.optimizer.symmetric import symmetric_product

X_SCALE, A_SCALE = 256.0, 256.0
SEGMENT = 3
"""Most steps between two Gram matrices."""

GRAM_RATIO = 1.25
"""From which n / m on the Gram matrix is cheaper: 6 n / m + 14 products of m^3 for five steps, against 15 n / m + 5."""

Product = Callable[..., None]


def segments(steps: int) -> list[int]:
    """Steps of each segment, as even as they can be with the longer first: [3, 2] for 5, which is more accurate than [2, 3]."""
    count = -(-steps // SEGMENT)
    return [steps // count + (number < steps % count) for number in range(count)]


@torch.no_grad()
def newton_schulz(
    batch_BMN: Tensor,
    steps: int,
    coefficients: tuple[float, float, float],
    eps: float,
    dtype: torch.dtype,
    *,
    product: Product = symmetric_product,
) -> Tensor:
    """As `intarsia_optimizers.updates.newton_schulz`, in float16 whichever 16-bit `dtype` is asked for: float16 out, contiguous. `product` is for comparisons."""
    x_BMN = _scaled(batch_BMN, eps)
    tall = x_BMN.shape[1] > x_BMN.shape[2]
    short, long = sorted(x_BMN.shape[1:])
    if long < GRAM_RATIO * short:
        return _step_by_step(x_BMN, tall, steps, coefficients, product)
    return _by_segments(x_BMN, tall, segments(steps), coefficients, product)


def supports(batch_BMN: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float, dtype: torch.dtype) -> str | None:
    """Why a call cannot be taken."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in float16, which is less exact than {dtype}"
    if batch_BMN.dtype == torch.float64:
        return "it takes norms in float32"
    if not batch_BMN.numel():
        return "there is nothing to compute"
    return None


newton_schulz.supports = supports  # type: ignore[attr-defined]


def _scaled(batch_BMN: Tensor, eps: float) -> Tensor:
    """X_SCALE G / max(norm(G), eps) in float16, contiguous."""
    norm_B11 = torch.linalg.vector_norm(batch_BMN, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    factor_B11 = X_SCALE / norm_B11.clamp(min=eps)
    out_BMN = torch.empty(batch_BMN.shape, dtype=torch.float16, device=batch_BMN.device)
    return torch.mul(batch_BMN, factor_B11, out=out_BMN)


def _applied(polynomial_Bmm: Tensor, x_BMN: Tensor, tall: bool, out_BMN: Tensor, alpha: float) -> Tensor:
    """alpha P X, or alpha X P."""
    left, right = (x_BMN, polynomial_Bmm) if tall else (polynomial_Bmm, x_BMN)
    return torch.baddbmm(out_BMN, left, right, beta=0.0, alpha=alpha, out=out_BMN)


def _step_by_step(x_BMN: Tensor, tall: bool, steps: int, coefficients: tuple[float, float, float], product: Product) -> Tensor:
    a, b, c = coefficients
    side = min(x_BMN.shape[1:])
    gram_Bmm, polynomial_Bmm = (x_BMN.new_empty(x_BMN.shape[0], side, side) for _ in range(2))
    other_BMN = torch.empty_like(x_BMN)
    for step in range(steps):
        product(x_BMN, x_BMN, gram_Bmm, transposed=tall, alpha=A_SCALE / X_SCALE**2)
        product(gram_Bmm, gram_Bmm, polynomial_Bmm, alpha=c / A_SCALE**2, addend_BMM=gram_Bmm, beta=b / A_SCALE, gamma=a)
        _applied(polynomial_Bmm, x_BMN, tall, other_BMN, 1.0 if step + 1 < steps else 1.0 / X_SCALE)
        x_BMN, other_BMN = other_BMN, x_BMN
    return x_BMN if steps else x_BMN / X_SCALE


def _by_segments(x_BMN: Tensor, tall: bool, lengths: list[int], coefficients: tuple[float, float, float], product: Product) -> Tensor:
    a, b, c = coefficients
    side = min(x_BMN.shape[1:])
    gram_Bmm, spare_Bmm, other_Bmm, last_Bmm = (x_BMN.new_empty(x_BMN.shape[0], side, side) for _ in range(4))
    other_BMN = torch.empty_like(x_BMN)
    for number, length in enumerate(lengths):
        product(x_BMN, x_BMN, gram_Bmm, transposed=tall, alpha=A_SCALE / X_SCALE**2)
        so_far_Bmm: Tensor | None = None
        free = [spare_Bmm, other_Bmm, last_Bmm]
        for step in range(length):
            polynomial_Bmm = free.pop()
            product(gram_Bmm, gram_Bmm, polynomial_Bmm, alpha=c / A_SCALE**2, addend_BMM=gram_Bmm, beta=b / A_SCALE, gamma=a)
            if step + 1 < length:  # A <- P A P
                half_Bmm = free[-1]
                product(gram_Bmm, polynomial_Bmm, half_Bmm)
                product(polynomial_Bmm, half_Bmm, gram_Bmm)
            if so_far_Bmm is None:
                so_far_Bmm = polynomial_Bmm
            else:
                joined_Bmm = free.pop()
                product(polynomial_Bmm, so_far_Bmm, joined_Bmm)
                free += [polynomial_Bmm, so_far_Bmm]
                so_far_Bmm = joined_Bmm
        assert so_far_Bmm is not None
        _applied(so_far_Bmm, x_BMN, tall, other_BMN, 1.0 if number + 1 < len(lengths) else 1.0 / X_SCALE)
        x_BMN, other_BMN = other_BMN, x_BMN
    return x_BMN if lengths else x_BMN / X_SCALE
