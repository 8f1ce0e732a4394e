"""The update rules as plain torch, on flat tensors: what the optimizers run where no kernel does, and the references that kernels are held to.

    adamw_update    one AdamW step of one flat run, split masters and narrow state included
    adamw_quantised the same for the matrices of a run, which are also quantised for a sharder's next gather
    newton_schulz   the nearest orthogonal matrices of a batch, approximately
    muon_directions, muon_apply     what Muon does to each element before and after that

All may be replaced by kernels of the same signature (`intarsia_optimizers.hookspecs.offer_optimizer_kernels`). Every scalar that changes from step to step may be a
0-d tensor on the device, so that a step can be captured; nothing here waits for the device.

Shape suffixes: B matrices of a batch, M rows, N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from intarsia.comm import add_parts
from intarsia.parameters import join_master, split_master
from intarsia_float8.format import quantise
from torch import Tensor

Scalar: TypeAlias = "float | Tensor"
Tensors: TypeAlias = list[Tensor]
Box: TypeAlias = tuple[int, int, int, int, int]
# A tensor, or contributions that are still to be added, in this order, and what their sum is multiplied by.
Gradient: TypeAlias = "Tensor | tuple[Sequence[Tensor], float]"

# Elements that are widened to float32 at a time: bounds what an update of narrow or split state needs besides the state.
CHUNK = 2**24


# ---------------------------------------------------------------- what kernels may replace


@torch.no_grad()
def adamw_update(
    value: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Gradient,
    step: Tensor,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW update in place (Loshchilov and Hutter, arXiv:1711.05101).

        w <- (1 - lr weight_decay) w
        m <- m + (1 - b1) (g - m)        v <- b2 v + (1 - b2) g^2
        w <- w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

    Arguments: `value` is the master, flat and contiguous; or, with `low` (int16, as many elements), the bfloat16 high half of a split master
    (`intarsia.parameters.split_master`). `mean` and `square` have as many elements, in the master's dtype or bfloat16; `gradient` likewise, in any floating dtype, or contributions to it. `step` is the 0-d float32
    number t of this update, from 1; the caller counts. `lr` may be a 0-d tensor. Arithmetic is in float32 (float64 for float64 masters), stored values are rounded to nearest.
    """

    def rule(values: Tensors, gradients: Tensors, states: Sequence[Tensors]) -> None:
        means, squares = states
        adam_lists(values, gradients, means, squares, [step], lr, betas, eps, weight_decay)

    widened(rule, value, low, [mean, square], summed(gradient))


@torch.no_grad()
def adamw_quantised(
    value: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Gradient,
    step: Tensor,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    wire: Tensor,
    boxes: Sequence[Box],
    tile: tuple[int, int],
    power_of_two: bool,
    dtype: torch.dtype,
) -> bool:
    """`adamw_update` of the elements in `boxes`, which begin at elements of `value`, and their quantised values in `dtype` onto `wire`: see `intarsia_optimizers.wires`. Other
    elements stay as they are. Returns whether it was done."""
    gradient, scales_at = summed(gradient), wire[: wire.numel() // 4 * 4].view(torch.float32)
    for begin, payload_at, scale_at, rows, columns in boxes:
        part = slice(begin, begin + rows * columns)
        half = None if low is None else low[part]
        adamw_update(value[part], half, mean[part], square[part], gradient[part], step, lr, betas, eps, weight_decay)
        payload, scales = quantise(value[part].view(rows, columns).to(dtype), tile, power_of_two)
        wire[payload_at : payload_at + rows * columns].copy_(payload.view(torch.uint8).flatten())
        scales_at[scale_at : scale_at + scales.numel()].copy_(scales.flatten())
    return True


@torch.no_grad()
def newton_schulz(
    batch_BMN: Tensor,
    steps: int,
    coefficients: tuple[float, float, float],
    eps: float,
    dtype: torch.dtype,
    squares_B: Tensor | None = None,
) -> Tensor:
    """Approximately orthogonal matrices [B, M, N] with the singular vectors of those of `batch_BMN`, in `dtype`.

        X <- G / max(norm(G), eps)       then `steps` times       A = X X^T,   X <- a X + (b A + c A A) X

    (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; (a, b, c) are `coefficients`.) The Frobenius norm of each matrix is taken in float32
    (float64 for float64 input), products are in `dtype` with the device's accumulation. A tall matrix is worked on transposed. `batch_BMN` is not
    changed. A kernel may compute more exactly than `dtype` does. `squares_B` are the squares of the norms, where they are known.
    """
    a, b, c = coefficients
    tall = batch_BMN.size(-2) > batch_BMN.size(-1)
    x_BMN = batch_BMN.mT if tall else batch_BMN
    exact = torch.float64 if batch_BMN.dtype == torch.float64 else torch.float32
    if squares_B is None:
        norm_B11 = torch.linalg.vector_norm(x_BMN, dim=(-2, -1), keepdim=True, dtype=exact)
    else:
        norm_B11 = squares_B.sqrt()[:, None, None]
    x_BMN = (x_BMN / norm_B11.clamp(min=eps)).to(dtype)
    for _ in range(steps):
        gram_BMM = torch.bmm(x_BMN, x_BMN.mT)
        polynomial_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, polynomial_BMM, x_BMN, beta=a)
    return x_BMN.mT if tall else x_BMN


@torch.no_grad()
def muon_directions(momenta: Tensors, gradients: Tensors, out: Tensors, momentum: float, nesterov: bool) -> Tensor | None:
    """`m <- m + (1 - momentum) (g - m)` in place, and `m` (Nesterov: `g + momentum (m - g)`) into `out`, rounded to its dtype. Tensors of a place in the lists are of one
    shape. Narrow momentum is updated wide and rounded once. Gives back the sum of squares of each of `out`, in float32, or None where that would take another pass."""
    wide, given = momenta, gradients
    if momenta[0].dtype != gradients[0].dtype:
        exact = torch.promote_types(gradients[0].dtype, torch.float32)
        wide, given = [each.to(exact) for each in momenta], [gradient.to(exact) for gradient in gradients]
    torch._foreach_lerp_(wide, given, 1 - momentum)
    if wide is not momenta:
        torch._foreach_copy_(momenta, wide)
    torch._foreach_copy_(out, torch._foreach_lerp(given, wide, momentum) if nesterov else wide)
    return None


@torch.no_grad()
def muon_apply(values: Tensors, lows: Tensors | None, updates: Tensors, lr: Scalar, scale: float, weight_decay: float) -> None:
    """`w <- (1 - lr weight_decay) w - lr scale u` for the masters `values`, or, with `lows`, split masters of which they are the high halves. `updates` may be narrower than
    the masters, and may be changed."""
    if lows is not None:
        # Halves are joined and split for all at once: doing that takes several launches.
        high, low = (torch.cat([half.reshape(-1) for half in halves]) for halves in (values, lows))
        masters = [join_master(high, low)]
        updates = [torch.cat([each.reshape(-1) for each in updates])]
    else:
        masters = values
    updates = [update.to(masters[0].dtype) for update in updates]
    decay(masters, lr, weight_decay)
    if isinstance(lr, Tensor):
        torch._foreach_mul_(updates, lr * scale)
        torch._foreach_sub_(masters, updates)
    else:
        torch._foreach_add_(masters, updates, alpha=-lr * scale)
    if lows is not None:
        split_master(masters[0], high, low)
        sizes = [value.numel() for value in values]
        for targets, flat in ((values, high), (lows, low)):
            torch._foreach_copy_(targets, [part.view(t.shape) for part, t in zip(flat.split(sizes), targets, strict=True)])


# ---------------------------------------------------------------- rules on lists of tensors


def adam_lists(
    values: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    steps: Tensors,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    l2: float = 0.0,
) -> None:
    """`adamw_update` of each of several tensors of one dtype. `l2` > 0 adds `l2` times the value to the gradient first, as Adam without decoupling does."""
    decay(values, lr, weight_decay)
    if l2:
        gradients = list(torch._foreach_add(gradients, values, alpha=l2))
    torch._foreach_lerp_(means, gradients, 1 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - betas[1])
    # In float64: 1 - 0.999 of float32 would be off by 6e-5 of itself.
    counts = torch.stack(steps).double()
    rates, roots = lr / (1 - betas[0] ** counts), (1 - betas[1] ** counts).sqrt()
    moves, bottoms = [mean * rate for mean, rate in zip(means, rates.unbind(), strict=True)], torch._foreach_sqrt(squares)
    torch._foreach_div_(bottoms, list(roots.unbind()))
    torch._foreach_add_(bottoms, eps)
    torch._foreach_addcdiv_(values, moves, bottoms, -1.0)


def lion_lists(values: Tensors, gradients: Tensors, momenta: Tensors, lr: Scalar, betas: tuple[float, float], weight_decay: float) -> None:
    """Lion (Chen et al., arXiv:2302.06675): `w <- (1 - lr weight_decay) w - lr sign(b1 m + (1 - b1) g)`, then `m <- b2 m + (1 - b2) g`."""
    decay(values, lr, weight_decay)
    moves = torch._foreach_lerp(momenta, gradients, 1 - betas[0])
    torch._foreach_sign_(moves)
    torch._foreach_mul_(moves, lr)
    torch._foreach_sub_(values, moves)
    torch._foreach_lerp_(momenta, gradients, 1 - betas[1])


def sgd_lists(
    values: Tensors,
    gradients: Tensors,
    momenta: Tensors | None,
    lr: Scalar,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    l2: float,
) -> None:
    """Gradient descent with momentum as torch has it: `m <- mu m + g`, `w <- w - lr m` (Nesterov: `g + mu m`); `momenta` None: plain."""
    decay(values, lr, weight_decay)
    if l2:
        gradients = list(torch._foreach_add(gradients, values, alpha=l2))
    moves = gradients
    if momenta is not None:
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, gradients)
        moves = list(torch._foreach_add(gradients, momenta, alpha=momentum)) if nesterov else momenta
    torch._foreach_sub_(values, torch._foreach_mul(moves, lr))


def decay(values: Tensors, lr: Scalar, weight_decay: float) -> None:
    """Decoupled weight decay: `w <- (1 - lr weight_decay) w`."""
    if weight_decay:
        torch._foreach_mul_(values, 1 - lr * weight_decay)


def summed(gradient: Gradient) -> Tensor:
    """A gradient as one tensor: contributions are added in float32."""
    if isinstance(gradient, Tensor):
        return gradient
    parts, scale = gradient
    total = torch.empty_like(parts[0], dtype=torch.float32)
    add_parts(parts, total)
    return total if scale == 1.0 else total.mul_(scale)


# ---------------------------------------------------------------- narrow and split storage


def widened(
    rule: Callable[[Tensors, Tensors, Sequence[Tensors]], None],
    value: Tensor,
    low: Tensor | None,
    states: Sequence[Tensor],
    gradient: Tensor,
) -> None:
    """Run `rule(values, gradients, states)` in float32 (float64 for a float64 master) on flat tensors of any storage, a chunk at a time, and round back to nearest.

    Arguments as for `adamw_update`. An update of narrow state is that of the wide state, rounded once.
    """
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    for start in range(0, value.numel(), CHUNK):
        part = slice(start, min(start + CHUNK, value.numel()))
        high = value[part]
        master = join_master(high, low[part]) if low is not None else high.to(wide)
        kept = [state[part] for state in states]
        held = [state.to(wide) for state in kept]
        rule([master], [gradient[part].to(wide)], [[state] for state in held])
        if low is not None:
            split_master(master, high, low[part])
        elif master is not high:
            high.copy_(master)
        for narrow, state in zip(kept, held, strict=True):
            if state is not narrow:
                narrow.copy_(state)
