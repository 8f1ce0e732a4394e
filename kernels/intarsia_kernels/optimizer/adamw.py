"""AdamW of a flat run in one pass, in Triton, split masters and bfloat16 state included.

A split master is read as halves and written as halves, rounded as `intarsia.parameters.split_master` does: the bfloat16 half is what an ordinary cast of the new value gives, and the
next gather needs no cast. Numbers that change from step to step are read on the device or passed, so that a captured step stays right.

Every kernel that updates so (`quantised_adamw` too) gives the same bits for the same numbers, whether a gradient comes added or as contributions and whatever the block: what is
contracted to one rounding is written out, and the compiler contracts nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.optimizer.blocks import MOST, gradient, read, read_master, write, write_master
from intarsia_kernels.optimizer.launch import Launcher

BLOCK, WARPS, CONTIGUOUS, EVICT = 2048, 8, 4, ""
"""Elements of a program, its warps, neighbours of a thread, and what the cache is told: the fastest by `benchmarks/elementwise_gpu.py`."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Gradient: TypeAlias = "Tensor | tuple[Sequence[Tensor], float]"
"""A tensor, or contributions that are to be added and what their sum is multiplied by."""


@triton.jit
def corrected(step, log_beta):
    """1 - beta^t, to the last bits where beta^t is nearly 1."""
    x = step * log_beta
    tail = 1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7 * (1.0 + x / 8)))
    series = -x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * tail)))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def speeds(step, lr, log_mean, log_square, weight_decay, LOADED: tl.constexpr):
    """(rate, root, shrink) of a step: what the mean, the square's root and the old value are multiplied by."""
    t = tl.load(step).to(tl.float32)
    if LOADED:
        speed = tl.load(lr).to(tl.float32)
    else:
        speed = lr
    # One instruction for the root, which no compiler has two ways for.
    return speed / corrected(t, log_mean), tl.rsqrt(corrected(t, log_square)), 1.0 - speed * weight_decay


@triton.jit
def updated(w, g, m, v, rate, root, shrink, new_mean, new_square, keep_square, eps):
    """The new value, mean and square. What is multiplied and added in one is written so: which of two products a compiler takes would else depend on what surrounds it."""
    m = tl.fma(new_mean, g - m, m)
    v = tl.fma(v, keep_square, new_square * (g * g))
    return tl.fma(w, shrink, -(rate * m / tl.fma(tl.sqrt(v), root, eps))), m, v


@triton.jit
def _block(
    value, low, mean, square, p0, p1, p2, p3, p4, p5, p6, p7, left, step, lr, share, log_mean, log_square, new_mean, new_square, keep_square, eps, weight_decay,
    SPLIT: tl.constexpr, LOADED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr, EVICT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # What a thread reads of the widest is what it writes of all, and nothing moves between threads.
    offsets = tl.max_contiguous(tl.arange(0, BLOCK), CONTIGUOUS)
    w = read_master(value, low, offsets, left, SPLIT, WHOLE, EVICT)
    g = gradient(p0, p1, p2, p3, p4, p5, p6, p7, offsets, left, share, PARTS, WHOLE, EVICT)
    m = read(mean, offsets, left, WHOLE, EVICT).to(tl.float32)
    v = read(square, offsets, left, WHOLE, EVICT).to(tl.float32)
    # After the elements are asked for: a thread would else wait for the number of the step first.
    rate, root, shrink = speeds(step, lr, log_mean, log_square, weight_decay, LOADED)
    w, m, v = updated(w, g, m, v, rate, root, shrink, new_mean, new_square, keep_square, eps)
    write(mean, offsets, left, m.to(mean.dtype.element_ty), WHOLE, EVICT)
    write(square, offsets, left, v.to(square.dtype.element_ty), WHOLE, EVICT)
    write_master(value, low, offsets, left, w, SPLIT, WHOLE, EVICT)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["step", "lr"])
def _adamw(
    value, low, mean, square, p0, p1, p2, p3, p4, p5, p6, p7, step, lr, n, share, log_mean, log_square, new_mean, new_square, keep_square, eps, weight_decay,
    SPLIT: tl.constexpr, LOADED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    # A scalar of 64 bits and offsets of 32: wide offsets would take registers.
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = tl.minimum(n - base, BLOCK).to(tl.int32)
    if left == BLOCK:  # Without a mask, so that accesses are wide whatever n is.
        _block(
            value + base, low + base, mean + base, square + base, p0 + base, p1 + base, p2 + base, p3 + base, p4 + base, p5 + base, p6 + base, p7 + base, left, step, lr, share,
            log_mean, log_square, new_mean, new_square, keep_square, eps, weight_decay, SPLIT, LOADED, PARTS, BLOCK, CONTIGUOUS, EVICT, True,
        )  # fmt: skip
    else:
        _block(
            value + base, low + base, mean + base, square + base, p0 + base, p1 + base, p2 + base, p3 + base, p4 + base, p5 + base, p6 + base, p7 + base, left, step, lr, share,
            log_mean, log_square, new_mean, new_square, keep_square, eps, weight_decay, SPLIT, LOADED, PARTS, BLOCK, CONTIGUOUS, EVICT, False,
        )  # fmt: skip


_launch = Launcher(_adamw, WARPS, contracts=False)


@torch.no_grad()
def fused_adamw(
    value: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Gradient,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """As `intarsia_optimizers.updates.adamw_update`, in float32: one launch, each tensor read and written once. Contributions are added in rank order."""
    size = value.numel()
    if not size:
        return
    loaded = isinstance(lr, Tensor)
    parts, count, share = contributions(gradient)
    tensors = (value, value if low is None else low, mean, square, *parts)
    scalars = (step, lr if loaded else float(lr), size, share, *numbers(*betas, eps, weight_decay))
    _launch(-(-size // BLOCK), tensors, scalars, (low is not None, loaded, count, BLOCK, CONTIGUOUS, EVICT), size)


def contributions(gradient: Gradient) -> tuple[list[Tensor], int, float]:
    """What the kernels read of a gradient: as many tensors as they have pointers for, how many of them count, and what their sum is multiplied by."""
    parts, scale = ([gradient], 1.0) if isinstance(gradient, Tensor) else gradient
    return [*parts, *[parts[0]] * (MOST - len(parts))], len(parts), float(scale)


@functools.lru_cache(maxsize=256)
def numbers(beta1: float, beta2: float, eps: float, weight_decay: float) -> tuple[float, ...]:
    """The kernel's numbers that follow from the settings."""
    logs = [math.log(beta) if beta else -1e30 for beta in (beta1, beta2)]
    return (*logs, 1.0 - beta1, 1.0 - beta2, float(beta2), float(eps), float(weight_decay))


def supports(
    value: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Gradient,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> str | None:
    """Why a call cannot be taken."""
    parts = [gradient] if isinstance(gradient, Tensor) else gradient[0]
    if len(parts) > MOST:
        return f"a gradient is the sum of {len(parts)} contributions"
    tensors = (value, mean, square, *parts)
    wide = next((tensor.dtype for tensor in tensors if tensor.dtype not in FLOATS), None)
    if wide is not None:
        return f"it computes in float32 and takes no {wide}"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "a tensor is not contiguous"
    if any(tensor.device != value.device for tensor in (*tensors, step, *([lr] if isinstance(lr, Tensor) else []))):
        return "the tensors are on several devices"
    return None


fused_adamw.supports = supports  # type: ignore[attr-defined]
fused_adamw.takes_sums = True  # type: ignore[attr-defined]
