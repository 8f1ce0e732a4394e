"""What elementwise kernels share: blocks of a flat tensor with and without a mask, and masters that are split in two halves."""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr("")

MOST = 8
"""Contributions to a sum that one launch takes."""


@triton.jit
def read(pointer, offsets, left, WHOLE: tl.constexpr, EVICT: tl.constexpr = PLAIN):
    """Elements as they are stored; zeros from `left` on unless the block is whole. `EVICT`: what the cache is told (`eviction_policy`)."""
    if WHOLE:
        value = tl.load(pointer + offsets, eviction_policy=EVICT)
    else:
        value = tl.load(pointer + offsets, mask=offsets < left, other=0.0)
    return value


@triton.jit
def added(p0, p1, p2, p3, p4, p5, p6, p7, offsets, left, PARTS: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr = PLAIN):
    """The first `PARTS` of eight contributions, in float32, added in this order."""
    total = read(p0, offsets, left, WHOLE, EVICT).to(tl.float32)
    if PARTS > 1:
        total += read(p1, offsets, left, WHOLE, EVICT).to(tl.float32)
    if PARTS > 2:
        total += read(p2, offsets, left, WHOLE, EVICT).to(tl.float32)
    if PARTS > 3:
        total += read(p3, offsets, left, WHOLE, EVICT).to(tl.float32)
    if PARTS > 4:
        total += read(p4, offsets, left, WHOLE, EVICT).to(tl.float32)
    if PARTS > 5:
        total += read(p5, offsets, left, WHOLE, EVICT).to(tl.float32)
    if PARTS > 6:
        total += read(p6, offsets, left, WHOLE, EVICT).to(tl.float32)
    if PARTS > 7:
        total += read(p7, offsets, left, WHOLE, EVICT).to(tl.float32)
    return total


@triton.jit
def gradient(p0, p1, p2, p3, p4, p5, p6, p7, offsets, left, scale, PARTS: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr = PLAIN):
    """A sum of contributions, scaled: one function for whoever stores it and whoever uses it at once. The product is rounded only in a kernel that contracts nothing (`Launcher`)."""
    return added(p0, p1, p2, p3, p4, p5, p6, p7, offsets, left, PARTS, WHOLE, EVICT) * scale


@triton.jit
def write(pointer, offsets, left, value, WHOLE: tl.constexpr, EVICT: tl.constexpr = PLAIN):
    """Elements that are of the pointer's dtype."""
    if WHOLE:
        tl.store(pointer + offsets, value, eviction_policy=EVICT)
    else:
        tl.store(pointer + offsets, value, mask=offsets < left)


@triton.jit
def read_master(value, low, offsets, left, SPLIT: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr = PLAIN):
    """A master in float32, joined from its halves if it is split (`intarsia.parameters.join_master`)."""
    stored = read(value, offsets, left, WHOLE, EVICT)
    if SPLIT:
        high = stored.to(tl.int16, bitcast=True).to(tl.int32)
        w = ((high << 16) + read(low, offsets, left, WHOLE, EVICT).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        w = stored.to(tl.float32)
    return w


@triton.jit
def write_master(value, low, offsets, left, w, SPLIT: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr = PLAIN):
    """A master from float32, split as by `intarsia.parameters.split_master` if it is."""
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        # To nearest even, on the bits: the low half is what this leaves, so it must be this rounding.
        high = tl.where(w == w, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FFF)
        missing = tl.where(w == w, tl.minimum(bits - (high << 16), 0x7FFF), 0)
        write(value, offsets, left, high.to(tl.int16).to(value.dtype.element_ty, bitcast=True), WHOLE, EVICT)
        write(low, offsets, left, missing.to(tl.int16), WHOLE, EVICT)
    else:
        write(value, offsets, left, w.to(value.dtype.element_ty), WHOLE, EVICT)
