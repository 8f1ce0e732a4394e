"""Sums of several ranks' contributions in one pass, in Triton: what a reduction does with what it received.

Contributions are read once in their own dtype, added in rank order in float32 and written once: the same bits as adding them one after the other. More than `MOST` are
added to the sum of the first eight, seven at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.optimizer import reference
from intarsia_kernels.optimizer.blocks import MOST, gradient, write
from intarsia_kernels.optimizer.launch import ALIGNED, Launch, Launcher

BLOCK, WARPS, CONTIGUOUS, EVICT = 1024, 4, 4, ""
"""Elements of a program, its warps, neighbours of a thread, and what the cache is told: the fastest by `benchmarks/elementwise_gpu.py`."""

NARROW = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _block(
    p0, p1, p2, p3, p4, p5, p6, p7, out, base, left, scale,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr, EVICT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # What a thread reads of each is what it writes, and nothing moves between threads.
    offsets = tl.max_contiguous(tl.arange(0, BLOCK), CONTIGUOUS)
    total = gradient(
        p0 + base, p1 + base, p2 + base, p3 + base, p4 + base, p5 + base, p6 + base, p7 + base, offsets, left, scale, PARTS, WHOLE, EVICT
    )  # fmt: skip
    write(out + base, offsets, left, total.to(out.dtype.element_ty), WHOLE)


@triton.jit(do_not_specialize=["n"])
def _add(
    p0, p1, p2, p3, p4, p5, p6, p7, out, n, scale,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    # A scalar of 64 bits and offsets of 32: wide offsets would take registers.
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = tl.minimum(n - base, BLOCK).to(tl.int32)
    if left == BLOCK:  # Without a mask, so that accesses are wide whatever n is.
        _block(p0, p1, p2, p3, p4, p5, p6, p7, out, base, left, scale, PARTS, BLOCK, CONTIGUOUS, EVICT, True)
    else:
        _block(p0, p1, p2, p3, p4, p5, p6, p7, out, base, left, scale, PARTS, BLOCK, CONTIGUOUS, EVICT, False)


_launch = Launcher(_add, WARPS, contracts=False)


def add_parts(parts: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
    """As `reference.add_parts`, bit for bit: flat tensors of 16 or 32 bits in one launch for each eight of them, others by the reference."""
    _added(parts, out, scale)


def _added(parts: Sequence[Tensor], out: Tensor, scale: float) -> Launch | None:
    """Adds; what repeats the last launch, if it can be."""
    if out.dtype not in NARROW or not out.is_contiguous() or any(part.dtype not in NARROW or not part.is_contiguous() for part in parts):
        reference.add_parts(parts, out, scale)
        return None
    size = out.numel()
    if not size:
        return None
    blocks = -(-size // BLOCK)
    if len(parts) > MOST:
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        _run(parts[:MOST], total, size, blocks, 1.0)
        rest = parts[MOST:]
        while len(rest) >= MOST:
            _run([total, *rest[: MOST - 1]], total, size, blocks, 1.0)
            rest = rest[MOST - 1 :]
        parts = [total, *rest]
    return _run(parts, out, size, blocks, scale)


def prepare_add(parts: Sequence[Tensor], scale: float = 1.0) -> Callable[[Tensor], None]:
    """`add_parts` of always the same contributions and scale: a call with `out`, all outs being alike. Costs the host a pointer and a launch from the third call on."""
    if len(parts) > MOST or not parts[0].numel():
        return lambda out: add_parts(parts, out, scale)
    launch: Launch | None = None
    of_out: torch.dtype | None = None
    size = parts[0].numel()
    blocks, scale = -(-size // BLOCK), float(scale)
    addresses = [part.data_ptr() for part in (*parts, *[parts[0]] * (MOST - len(parts)))]
    rest = (size, scale, len(parts), BLOCK, CONTIGUOUS, EVICT)

    def add(out: Tensor) -> None:
        nonlocal launch, of_out
        if launch is not None and (address := out.data_ptr()) % ALIGNED == 0 and out.dtype == of_out and out.is_contiguous():
            launch(blocks, *addresses, address, *rest)
            return
        launch, of_out = _added(parts, out, scale), out.dtype

    return add


def _run(parts: Sequence[Tensor], out: Tensor, size: int, blocks: int, scale: float) -> Launch | None:
    count = len(parts)
    tensors = [*parts, *[parts[0]] * (MOST - count), out]
    return _launch(blocks, tensors, (size, float(scale)), (count, BLOCK, CONTIGUOUS, EVICT), size)
