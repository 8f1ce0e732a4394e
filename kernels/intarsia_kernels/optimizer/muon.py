"""Muon's elementwise halves in one pass each, in Triton: momentum and direction before Newton-Schulz, decay and update after it.

A launch takes up to eight flat tensors of equal size, so that a batch of matrices that lie apart costs few launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.optimizer.blocks import read, read_master, write, write_master
from intarsia_kernels.optimizer.launch import Launcher

MOST = 8
BLOCK, WARPS = 2048, 8

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _pick(which, p0, p1, p2, p3, p4, p5, p6, p7, COUNT: tl.constexpr):
    """The pointer of number `which`."""
    p = p0
    if COUNT > 1:
        p = tl.where(which == 1, p1, p)
    if COUNT > 2:
        p = tl.where(which == 2, p2, p)
    if COUNT > 3:
        p = tl.where(which == 3, p3, p)
    if COUNT > 4:
        p = tl.where(which == 4, p4, p)
    if COUNT > 5:
        p = tl.where(which == 5, p5, p)
    if COUNT > 6:
        p = tl.where(which == 6, p6, p)
    if COUNT > 7:
        p = tl.where(which == 7, p7, p)
    return p


@triton.jit
def _direction(momentum, gradient, out, square, left, fresh, NESTEROV: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    # Four at a time: what a thread reads of the widest is what it writes of all, and nothing moves between threads.
    offsets = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    g = read(gradient, offsets, left, WHOLE).to(tl.float32)
    m = read(momentum, offsets, left, WHOLE).to(tl.float32)
    m += fresh * (g - m)
    write(momentum, offsets, left, m.to(momentum.dtype.element_ty), WHOLE)
    if NESTEROV:
        m += fresh * (g - m)
    direction = m.to(out.dtype.element_ty)
    write(out, offsets, left, direction, WHOLE)
    rounded = direction.to(tl.float32)
    tl.store(square, tl.sum(rounded * rounded, axis=0))


@triton.jit(do_not_specialize=["n", "blocks"])
def _directions(
    m0, m1, m2, m3, m4, m5, m6, m7, g0, g1, g2, g3, g4, g5, g6, g7, o0, o1, o2, o3, o4, o5, o6, o7, squares,
    n, blocks, fresh, COUNT: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0) // blocks
    base = (tl.program_id(0) - which * blocks).to(tl.int64) * BLOCK
    left = tl.minimum(n - base, BLOCK).to(tl.int32)
    momentum = _pick(which, m0, m1, m2, m3, m4, m5, m6, m7, COUNT) + base
    gradient = _pick(which, g0, g1, g2, g3, g4, g5, g6, g7, COUNT) + base
    out = _pick(which, o0, o1, o2, o3, o4, o5, o6, o7, COUNT) + base
    if left == BLOCK:  # Without a mask, so that accesses are wide whatever n is.
        _direction(momentum, gradient, out, squares + tl.program_id(0), left, fresh, NESTEROV, BLOCK, True)
    else:
        _direction(momentum, gradient, out, squares + tl.program_id(0), left, fresh, NESTEROV, BLOCK, False)


@triton.jit
def _applied(value, low, update, left, shrink, rate, SPLIT: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    offsets = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    w = read_master(value, low, offsets, left, SPLIT, WHOLE)
    u = read(update, offsets, left, WHOLE).to(tl.float32)
    write_master(value, low, offsets, left, w * shrink - rate * u, SPLIT, WHOLE)


@triton.jit(do_not_specialize=["n", "blocks"], do_not_specialize_on_alignment=["lr"])
def _apply(
    v0, v1, v2, v3, v4, v5, v6, v7, l0, l1, l2, l3, l4, l5, l6, l7, u0, u1, u2, u3, u4, u5, u6, u7,
    n, blocks, lr, scale, weight_decay, COUNT: tl.constexpr, SPLIT: tl.constexpr, LOADED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0) // blocks
    base = (tl.program_id(0) - which * blocks).to(tl.int64) * BLOCK
    left = tl.minimum(n - base, BLOCK).to(tl.int32)
    value = _pick(which, v0, v1, v2, v3, v4, v5, v6, v7, COUNT) + base
    low = _pick(which, l0, l1, l2, l3, l4, l5, l6, l7, COUNT) + base
    update = _pick(which, u0, u1, u2, u3, u4, u5, u6, u7, COUNT) + base
    if LOADED:
        speed = tl.load(lr).to(tl.float32)
    else:
        speed = lr
    shrink, rate = 1.0 - speed * weight_decay, speed * scale
    if left == BLOCK:
        _applied(value, low, update, left, shrink, rate, SPLIT, BLOCK, True)
    else:
        _applied(value, low, update, left, shrink, rate, SPLIT, BLOCK, False)


_launch_directions, _launch_apply = Launcher(_directions, WARPS), Launcher(_apply, WARPS)


def _launches(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], slice, int]]:
    """Neighbours of equal size, at most eight: eight tensors of each list (the first one again where there are fewer), which they are, and their size."""
    begin = 0
    while begin < len(lists[0]):
        size, end = lists[0][begin].numel(), begin + 1
        while end < len(lists[0]) and end - begin < MOST and lists[0][end].numel() == size:
            end += 1
        if size:
            yield (
                [tensor for tensors in lists for tensor in (*tensors[begin:end], *[tensors[begin]] * (MOST - end + begin))],
                slice(begin, end),
                size,
            )
        begin = end


@torch.no_grad()
def directions(momenta: Sequence[Tensor], gradients: Sequence[Tensor], out: Sequence[Tensor], momentum: float, nesterov: bool) -> Tensor:
    """As `intarsia_optimizers.updates.muon_directions`, in float32. Sums of squares are those of blocks, then of them, each in one order."""
    squares = torch.zeros(len(out), dtype=torch.float32, device=out[0].device)
    for tensors, which, size in _launches(momenta, gradients, out):
        blocks, count = -(-size // BLOCK), which.stop - which.start
        of_blocks = torch.empty(count, blocks, dtype=torch.float32, device=squares.device)
        _launch_directions(
            blocks * count, [*tensors, of_blocks], (size, blocks, 1.0 - momentum), (count, nesterov, BLOCK), size
        )  # fmt: skip
        torch.sum(of_blocks, 1, out=squares[which])
    return squares


@torch.no_grad()
def apply(
    values: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    updates: Sequence[Tensor],
    lr: float | Tensor,
    scale: float,
    weight_decay: float,
) -> None:
    """As `intarsia_optimizers.updates.muon_apply`, in float32."""
    loaded = isinstance(lr, Tensor)
    for tensors, which, size in _launches(values, values if lows is None else lows, updates):
        blocks, count = -(-size // BLOCK), which.stop - which.start
        scalars = (size, blocks, lr if loaded else float(lr), float(scale), float(weight_decay))
        _launch_apply(blocks * count, tensors, scalars, (count, lows is not None, loaded, BLOCK), size)


def directions_supports(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], out: Sequence[Tensor], momentum: float, nesterov: bool
) -> str | None:
    """Why a call cannot be taken."""
    return _obstacle((*momenta, *gradients, *out))


def apply_supports(
    values: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    updates: Sequence[Tensor],
    lr: float | Tensor,
    scale: float,
    weight_decay: float,
) -> str | None:
    """Why a call cannot be taken."""
    if isinstance(lr, Tensor) and lr.device != values[0].device:
        return "the learning rate is on another device"
    return _obstacle((*values, *updates))


def _obstacle(tensors: Sequence[Tensor]) -> str | None:
    wide = next((tensor.dtype for tensor in tensors if tensor.dtype not in FLOATS), None)
    if wide is not None:
        return f"it computes in float32 and takes no {wide}"
    return None if all(tensor.is_contiguous() for tensor in tensors) else "a tensor is not contiguous"


directions.supports = directions_supports  # type: ignore[attr-defined]
apply.supports = apply_supports  # type: ignore[attr-defined]
