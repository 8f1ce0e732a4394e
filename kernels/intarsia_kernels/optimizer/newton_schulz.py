"""Newton-Schulz for batches of matrices in float16, by symmetric products. B matrices, M rows, N columns; m the shorter side, n the longer.

    X <- G / max(norm(G), eps)       then `steps` times       A = X X^T,   X <- (a I + b A + c A A) X

(Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.) A, A A and the polynomials are symmetric, so half of their tiles are
computed. Two ways, by shape:

* near square: as above, with one symmetric product of depth n and one of depth m a step, and X <- (a I + Q) X.
* otherwise on the Gram matrix: with Q = b A + c A A, a step maps A to (a I + Q) A (a I + Q) and multiplies (a I + Q) to a polynomial J of those before. X is touched twice:
  to make A and to apply J. In m^3 products, five steps cost 3 n / m + 17, against 15 n / m + 5.

What float16 rounds off A would be lost for the small singular values, whose squares a step multiplies by a^2 = 12. So the first products that A goes through hand on what they lose
(`reference.LOST`), as an addend of the next: where A is small, a product by (a I + Q) is one by a. a I stays out of what is rounded, as what commutes exactly but for
rounding would else mix large and small directions. Where no kernel can say what is lost, A is made afresh from X after at most three steps instead.

float16 rounds eight times finer than bfloat16. Its range is made to suffice by powers of two: X is kept as X_SCALE X, A and Q as A_SCALE times them and J as J_SCALE J, so that neither
the entries of a large matrix of norm 1 nor those of its Gram matrix become subnormal, and none overflows. The norm is divided out in two parts: X by the power of two above it, which is
exact, and the first Gram matrix and polynomial by the rest (f). A tall matrix is worked on from the right (X <- X J), not transposed.

A chip at its limit of power runs the faster the fewer bits of its multipliers change. So X keeps the eight bits of a bfloat16 direction, and what need not be as exact as float16 is rounded
to fewer bits (`DROPPED`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from intarsia_kernels.optimizer.reference import LOST
from intarsia_kernels.optimizer.symmetric import can_say_what_is_lost, has_triton, symmetric_product

X_SCALE, A_SCALE, J_SCALE = 256.0, 256.0, 64.0

GROWTH = {True: 512.0, False: 64.0}
"""Most by which the steps between two Gram matrices may multiply small singular values, if what is lost is handed on and if not: five steps and three."""

HANDED_ON = 4
"""Products from the Gram matrix on whose losses are handed on: after them too few steps are left for losses to grow."""

GRAM_RATIO = 1.25
"""From which n / m on the Gram matrix is cheaper, with what more there is to read and write."""

COMPENSATED_FROM = 2048
"""The least m for which losses are handed on: small products take longer by the kernels that can than by the BLAS library."""

DROPPED = (0, 0)
"""Bits of float16 that are not used: by A and the polynomials of steps near square, and by everything but the last polynomial from a Gram matrix on."""

Product = Callable[..., None]
Coefficients = tuple[float, float, float]


def segments(steps: int, a: float, compensated: bool) -> list[int]:
    """Steps between Gram matrices, as even as they can be with the longer first: [3, 2] for 5, which is more accurate than [2, 3]."""
    most = max(1, int(math.log(GROWTH[compensated]) / math.log(max(abs(a), 1.1))))
    count = -(-steps // most)
    return [steps // count + (number < steps % count) for number in range(count)]


@torch.no_grad()
def newton_schulz(
    batch_BMN: Tensor,
    steps: int,
    coefficients: Coefficients,
    eps: float,
    dtype: torch.dtype,
    squares_B: Tensor | None = None,
    *,
    product: Product = symmetric_product,
    compensated: bool | None = None,
    dropped: tuple[int, int] = DROPPED,
) -> Tensor:
    """As `intarsia_optimizers.updates.newton_schulz`, in float16 whichever 16-bit `dtype` is asked for: float16 out, contiguous.

    `product`, `compensated` (hand on what is lost; None: where it pays) and `dropped` are for comparisons.
    """
    x_BMN, factors_B = _scaled(batch_BMN, eps, squares_B)
    tall = x_BMN.shape[1] > x_BMN.shape[2]
    short, long = sorted(x_BMN.shape[1:])
    if not steps:
        return x_BMN.mul_((factors_B / X_SCALE)[:, None, None])
    if long < GRAM_RATIO * short:
        return _step_by_step(x_BMN, factors_B, tall, steps, coefficients, functools.partial(product, dropped=dropped[0]))
    if compensated is None:
        compensated = short >= COMPENSATED_FROM and can_say_what_is_lost(x_BMN, short, long)
    lengths = segments(steps, coefficients[0], compensated)
    return _by_segments(x_BMN, factors_B, tall, lengths, coefficients, product, HANDED_ON if compensated else 0, dropped[1])


def supports(
    batch_BMN: Tensor, steps: int, coefficients: Coefficients, eps: float, dtype: torch.dtype, squares_B: Tensor | None = None
) -> str | None:
    """Why a call cannot be taken."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in float16, which is less exact than {dtype}"
    if batch_BMN.dtype == torch.float64:
        return "it takes norms in float32"
    if not batch_BMN.numel():
        return "there is nothing to compute"
    return None


newton_schulz.supports = supports  # type: ignore[attr-defined]


def _scaled(batch_BMN: Tensor, eps: float, squares_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """X_SCALE G / p in float16, contiguous, and f = p / max(norm(G), eps), with p the power of two above what it is divided by. `squares_B` are the norms' squares, where known."""
    out_BMN = torch.empty(batch_BMN.shape, dtype=torch.float16, device=batch_BMN.device)
    if batch_BMN.is_cuda and has_triton() and batch_BMN.is_contiguous():
        from intarsia_kernels.optimizer import scale

        factors_B = torch.empty(batch_BMN.shape[0], dtype=torch.float32, device=batch_BMN.device)
        scale.normalised(batch_BMN, out_BMN, factors_B, X_SCALE, eps, squares_B)
        return out_BMN, factors_B
    norm_B = torch.linalg.vector_norm(batch_BMN, dim=(-2, -1), dtype=torch.float32) if squares_B is None else squares_B.sqrt()
    norm_B = norm_B.clamp(min=eps)
    fraction_B, exponent_B = torch.frexp(norm_B)
    power_B = torch.ldexp(torch.full_like(norm_B, X_SCALE), -exponent_B)
    return torch.mul(batch_BMN, power_B[:, None, None], out=out_BMN), fraction_B.reciprocal()


def _applied(polynomial_Bmm: Tensor, x_BMN: Tensor, tall: bool, out_BMN: Tensor, alpha: float) -> Tensor:
    """alpha P X, or alpha X P^T. P is a product of rounded polynomials, and so not quite symmetric: P u is good for a strong direction u of X, as the factor that meets u first makes it small;
    u P has the error of the other factors, a hundred times as large."""
    left, right = (x_BMN, polynomial_Bmm.mT) if tall else (polynomial_Bmm, x_BMN)
    return torch.baddbmm(out_BMN, left, right, beta=0.0, alpha=alpha, out=out_BMN)


def _step_by_step(x_BMN: Tensor, factors_B: Tensor, tall: bool, steps: int, coefficients: Coefficients, product: Product) -> Tensor:
    a, b, c = coefficients
    side = min(x_BMN.shape[1:])
    gram_Bmm, polynomial_Bmm = (x_BMN.new_empty(x_BMN.shape[0], side, side) for _ in range(2))
    other_BMN = torch.empty_like(x_BMN)
    for step in range(steps):
        of_gram, of_polynomial = (factors_B.square(), factors_B) if not step else (None, None)
        product(x_BMN, x_BMN, gram_Bmm, transposed=tall, alpha=A_SCALE / X_SCALE**2, factors_B=of_gram)
        product(
            gram_Bmm, gram_Bmm, polynomial_Bmm, alpha=c / A_SCALE**2, addends=[(gram_Bmm, b / A_SCALE)], gamma=a, factors_B=of_polynomial
        )  # fmt: skip
        _applied(polynomial_Bmm, x_BMN, tall, other_BMN, 1.0 if step + 1 < steps else 1.0 / X_SCALE)
        x_BMN, other_BMN = other_BMN, x_BMN
    return x_BMN


def _by_segments(
    x_BMN: Tensor,
    factors_B: Tensor,
    tall: bool,
    lengths: list[int],
    coefficients: Coefficients,
    product: Product,
    handed_on: int,
    dropped: int,
) -> Tensor:
    side = min(x_BMN.shape[1:])
    space = [x_BMN.new_empty(x_BMN.shape[0], side, side) for _ in range(7 if handed_on else 5)]
    other_BMN = torch.empty_like(x_BMN)
    for number, length in enumerate(lengths):
        factors = None if number else factors_B
        joined_Bmm, scale = _polynomial(x_BMN, factors, tall, length, coefficients, product, handed_on, dropped, space)
        _applied(joined_Bmm, x_BMN, tall, other_BMN, 1.0 / scale if number + 1 < len(lengths) else 1.0 / (scale * X_SCALE))
        x_BMN, other_BMN = other_BMN, x_BMN
    return x_BMN


def _polynomial(
    x_BMN: Tensor,
    factors_B: Tensor | None,
    tall: bool,
    length: int,
    coefficients: Coefficients,
    product: Product,
    handed_on: int,
    dropped: int,
    space: list[Tensor],
) -> tuple[Tensor, float]:
    """J of `length` steps from f X (f 1 for None), times f and the number that is given back too; one of `space`, whose tensors are all overwritten."""
    last, product = product, functools.partial(product, dropped=dropped)
    a, b, c = coefficients
    gram_Bmm, half_Bmm, *free = space[:5]
    # Of the Gram matrix, of the half of the next one, and of the next one.
    lost_Bmm = [*space[5:], *space[5:6]] if handed_on else [None] * 3
    q_Bmm = free.pop()
    joined_Bmm, scale, grown = q_Bmm, A_SCALE, a
    squared_B = None if factors_B is None else factors_B.square()
    product(x_BMN, x_BMN, gram_Bmm, transposed=tall, alpha=A_SCALE / X_SCALE**2, lost_BMM=lost_Bmm[0], factors_B=squared_B)
    for step in range(length):
        is_last = step + 1 == length
        if step:
            q_Bmm = free.pop()
        if length == 1:  # Alone it is applied with its identity; else that comes with the last that are joined.
            last(gram_Bmm, gram_Bmm, q_Bmm, alpha=c / A_SCALE, addends=[(gram_Bmm, b)], gamma=a * A_SCALE, factors_B=factors_B)
        else:
            product(gram_Bmm, gram_Bmm, q_Bmm, alpha=c / A_SCALE, addends=[(gram_Bmm, b)])
        if not is_last:
            # A <- (a I + Q) A (a I + Q), by way of the half of it.
            of_gram, of_half, of_next = (lost if handed_on > 2 * step + number else None for number, lost in enumerate(lost_Bmm))
            product(gram_Bmm, q_Bmm, half_Bmm, alpha=1.0 / A_SCALE, addends=_times(a, gram_Bmm, of_gram), lost_BMM=of_half)
            product(q_Bmm, half_Bmm, gram_Bmm, alpha=1.0 / A_SCALE, addends=_times(a, half_Bmm, of_half), lost_BMM=of_next)
        if step:
            # (a I + Q) (grown I + J) less its identity; the scale of J is smaller than that of its first factor, as J grows.
            next_Bmm = free.pop()
            (last if is_last else product)(
                q_Bmm,
                joined_Bmm,
                next_Bmm,
                alpha=J_SCALE / (A_SCALE * scale),
                addends=[(joined_Bmm, a * J_SCALE / scale), (q_Bmm, grown * J_SCALE / A_SCALE)],
                gamma=a * grown * J_SCALE if is_last else 0.0,
                factors_B=factors_B if is_last else None,
            )
            free += [q_Bmm, joined_Bmm]
            joined_Bmm, scale, grown = next_Bmm, J_SCALE, a * grown
    return joined_Bmm, scale


def _times(a: float, matrix_Bmm: Tensor, lost_Bmm: Tensor | None) -> list[tuple[Tensor, float]]:
    """Addends that make `a` times a matrix, with what it has lost."""
    return [(matrix_Bmm, a)] if lost_Bmm is None else [(matrix_Bmm, a), (lost_Bmm, a / LOST)]
