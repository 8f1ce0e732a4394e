"""Digests of tensors' bytes that parts of a tensor add up to, whoever holds them and on whatever device.

The flat tensor (row-major, zero-padded to a multiple of 8 bytes) is read as little-endian 64-bit words w[i]. Its digest is made of two sums modulo 2^64,

    A = sum of w[i] * key_a(i)        B = sum of (w[i] >> 32) * key_b(i)        (the shift keeps the sign)

with fixed pseudo-random odd keys. Both are linear in the elements, each of which has its own bits of one word: a rank sums over the elements that it holds
(`partial`), and the sums over all ranks, added, are the whole tensor's, however it is cut. A single wrong element always changes A; wrong elements that
cancel in both sums are as likely as 2^-48 or less. That finds torn, mixed and misplaced weights; it is no protection against somebody who wants equal digests.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Sequence

import torch
from intarsia.contracts import Box
from torch import Tensor

# Words that share a factor of their keys. Part of what a digest means.
BLOCK_BITS = 15
BLOCK = 2**BLOCK_BITS

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(value: int) -> int:
    """A number modulo 2^64 as an int64."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift(values: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros, which torch has not for int64."""
    return (values >> bits) & (2 ** (64 - bits) - 1)


def _odd_keys(first: int, count: int, stream: int, device: torch.device) -> Tensor:
    """`count` odd pseudo-random int64, the `first`-th and following of a stream (splitmix64)."""
    x = torch.arange(first + 1, first + count + 1, device=device) * signed(_GOLDEN) + signed(stream * _MIX_1 + 0x1234567)
    x = (x ^ _shift(x, 30)) * signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * signed(_MIX_2)
    return (x ^ _shift(x, 31)) | 1


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The keys within a block, for A and for B."""
    return _odd_keys(0, BLOCK, 1, device), _odd_keys(0, BLOCK, 2, device)


@functools.cache
def _first_factors(device: torch.device) -> Tensor:
    return _odd_keys(0, 2**12, 3, device)


def _factors(first: int, count: int, device: torch.device) -> Tensor:
    """The factors that blocks `first` and following have."""
    known = _first_factors(device)
    return known[first : first + count] if first + count <= len(known) else _odd_keys(first, count, 3, device)


# ---------------------------------------------------------------- sums over what is held


def zero(device: torch.device | str = "cpu") -> Tensor:
    """The sums over nothing: int64 [2]."""
    return torch.zeros(2, dtype=torch.int64, device=device)


@torch.no_grad()
def partial(values: Tensor, shape: Sequence[int], box: Box | None = None) -> Tensor:
    """(A, B) summed over `box` (None: all) of a tensor of `shape`; `values` are its elements, of the box's shape or flat. int64 [2] on their device.

    Sums of disjoint boxes that cover the tensor, added, are those of the whole tensor.
    """
    box = Box.whole(shape) if box is None else box
    flat = values.detach().reshape(-1)
    if not flat.numel():
        return zero(flat.device)
    if flat.dtype.itemsize > 8:
        return _whole_elements(flat, shape, box)
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    run, outer = _runs(shape, box)
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    if run == flat.numel():
        return _sum_run(flat, first)
    begins = torch.tensor([first])
    is_grid = flat.device.type == "cpu" and not strides[outer - 1] % (8 // flat.dtype.itemsize)
    for dimension in range(outer - is_grid):
        begins = (begins[:, None] + torch.arange(box.size[dimension]) * strides[dimension]).reshape(-1)
    if is_grid:
        grids = zip(flat.view(len(begins), -1, run), begins.tolist(), strict=True)
        return torch.stack([_sum_grid(rows, begin, strides[outer - 1]) for rows, begin in grids]).sum(0)
    return _sum_rows(flat.view(-1, run), begins.to(flat.device))


def _runs(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """How many elements of the box follow each other in the flat tensor, and the number of dimensions over which that repeats."""
    dimension, run = len(shape), 1
    while dimension and (dimension == len(shape) or box.size[dimension] == shape[dimension]):
        dimension -= 1
        run *= box.size[dimension]
    return run, dimension


def _whole_elements(flat: Tensor, shape: Sequence[int], box: Box) -> Tensor:
    """Elements of several words, as a further dimension of words."""
    words = flat.contiguous().view(torch.int64)
    each = flat.dtype.itemsize // 8
    return partial(words, (*shape, each), Box((*box.start, 0), (*box.size, each)))


def _sum_run(flat: Tensor, first: int) -> Tensor:
    """Elements that follow each other, the `first`-th of the tensor and following."""
    lanes = 8 // flat.dtype.itemsize
    keys_a, keys_b = _tables(flat.device)
    totals: list[Tensor] = []
    end = first + flat.numel()
    scratch = torch.empty(0, dtype=torch.int64, device=flat.device)
    for low, high in _slabs(first // lanes, -(-end // lanes), flat.device):
        begin, stop = max(low * lanes, first), min(high * lanes, end)
        piece = flat[begin - first : stop - first]
        if stop - begin < (high - low) * lanes or piece.storage_offset() % lanes or piece.data_ptr() % 8:
            padded = flat.new_zeros((high - low) * lanes)
            padded[begin - low * lanes : stop - low * lanes] = piece
            piece = padded
        inside = slice(low % BLOCK, low % BLOCK + high - low) if high - low < BLOCK else slice(None)
        words = piece.view(torch.int64).view(-1, min(BLOCK, high - low))
        if scratch.shape != words.shape:
            scratch = torch.empty_like(words)
        sums_a = torch.mul(words, keys_a[inside], out=scratch).sum(1)
        torch.bitwise_right_shift(words, 32, out=scratch)
        sums_b = scratch.mul_(keys_b[inside]).sum(1)
        totals.append((torch.stack([sums_a, sums_b]) * _factors(low // BLOCK, len(words), flat.device)).sum(1))
    return torch.stack(totals).sum(0)


def _slab_blocks(device: torch.device) -> int:
    """How many whole blocks are summed at once."""
    return 1 if device.type == "cpu" else 256


def _slabs(low: int, high: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """The words from `low` to `high` in pieces that are parts of one block, or whole blocks: few, which stay in a CPU's cache, or many, where launches cost time."""
    most = BLOCK * _slab_blocks(device)
    while low < high:
        inside = BLOCK - low % BLOCK
        length = min(inside, high - low) if inside < BLOCK or high - low < BLOCK else min((high - low) // BLOCK * BLOCK, most)
        yield low, low + length
        low += length


def _sum_grid(rows: Tensor, first: int, stride: int) -> Tensor:
    """Rows that begin at `first` and every `stride` elements from there, at the same place of a word: keys are views of their table, with steps. On a CPU."""
    lanes = 8 // rows.dtype.itemsize
    lane, step, count = first % lanes, stride // lanes, len(rows)
    width = -(-(lane + rows.shape[1]) // lanes)
    keys_a, keys_b = _tables(rows.device)
    totals, row = [], 0
    while row < count:
        inside = (first + row * stride) // lanes % BLOCK
        fitting = min((BLOCK - inside - width) // step + 1, count - row)
        if fitting < 1 or width >= BLOCK // 8:  # A long row, or one that goes on in the next block.
            totals.append(_sum_run(rows[row], first + row * stride))
            row += 1
            continue
        some = rows[row : row + fitting]
        if lane or rows.shape[1] % lanes or some.storage_offset() % lanes:
            padded = rows.new_zeros(fitting, width * lanes)
            padded[:, lane : lane + rows.shape[1]] = some
            some = padded
        words = some.view(torch.int64)
        steps = ((fitting, width), (step, 1), inside)
        sums = torch.stack([(words * keys_a.as_strided(*steps)).sum(), ((words >> 32) * keys_b.as_strided(*steps)).sum()])
        totals.append(sums * _factors((first + row * stride) // lanes // BLOCK, 1, rows.device))
        row += fitting
    return torch.stack(totals).sum(0)


def _sum_rows(rows: Tensor, begins: Tensor) -> Tensor:
    """Rows of elements, each beginning at an element of the tensor of its own. Rows that begin at the same place of a word are taken together."""
    lanes = 8 // rows.dtype.itemsize
    total = zero(rows.device)
    for lane in range(lanes):
        chosen = (begins % lanes == lane).nonzero().view(-1) if lanes > 1 else torch.arange(len(begins), device=begins.device)
        width = -(-(lane + rows.shape[1]) // lanes)
        for part in chosen.split(max(1, BLOCK // width if rows.device.type == "cpu" else 2**24 // width)):
            if not len(part):
                continue
            padded = rows.new_zeros(len(part), width * lanes)
            padded[:, lane : lane + rows.shape[1]] = rows[part]
            words = padded.view(torch.int64)
            index = (begins[part] // lanes)[:, None] + torch.arange(width, device=rows.device)
            total += _sum_words(words, index)
    return total


def _sum_words(words: Tensor, index: Tensor) -> Tensor:
    """Words at any places."""
    keys_a, keys_b = _tables(words.device)
    blocks, inside = index >> BLOCK_BITS, index & (BLOCK - 1)
    low, high = int(blocks.min()), int(blocks.max())
    factors = _factors(low, high - low + 1, words.device)
    scaled = words * (factors if low == high else factors[blocks - low])
    # The shift of the words themselves: that of their products would be another sum.
    upper = (words >> 32) * (factors if low == high else factors[blocks - low])
    return torch.stack([(scaled * keys_a[inside]).sum(), (upper * keys_b[inside]).sum()])


# ---------------------------------------------------------------- the text


def text(sums: Sequence[int], dtype: str, shape: Sequence[int]) -> str:
    """The digest of a tensor: 32 hexadecimal digits of its sums, dtype and shape."""
    facts = json.dumps([[value % 2**64 for value in sums], dtype, list(shape)])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def of_tensor(tensor: Tensor) -> str:
    """The digest of a whole tensor. Stability: provisional."""
    return text(partial(tensor, tensor.shape).tolist(), str(tensor.dtype).removeprefix("torch."), tensor.shape)
