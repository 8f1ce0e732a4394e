"""Digests of tensors: what they are by definition, whatever the tensor is cut into; and what they tell apart."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from intarsia.contracts import Box
from intarsia.layout import slices
from intarsia_rl.weights import digest
from intarsia_testing.strategies import example_settings, shapes
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64, torch.complex128)
MASK = 2**64 - 1


def made(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits (0 and 1 of booleans)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(tuple(shape), generator=generator) > 0.5
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(tuple(shape))


def mixed(value: int) -> int:
    """splitmix64's output for a state."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def key(index: int, stream: int) -> int:
    """The definition of the keys, in Python's integers."""
    return mixed((index + 1) * 0x9E3779B97F4A7C15 + stream * 0xBF58476D1CE4E5B9 + 0x1234567 & MASK) | 1


def defined(tensor: Tensor) -> list[int]:
    """The two sums by their definition."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
    data += bytes(-len(data) % 8)
    sums = [0, 0]
    for index in range(len(data) // 8):
        word = int.from_bytes(data[8 * index : 8 * index + 8], "little", signed=True)
        block, inside = divmod(index, digest.BLOCK)
        sums[0] += word * key(inside, 1) * key(block, 3)
        sums[1] += (word >> 32) * key(inside, 2) * key(block, 3)
    return [value & MASK for value in sums]


def pieces(shape: Sequence[int], cuts: int, draw: random.Random) -> list[Box]:
    """Disjoint boxes that cover the tensor, cut at any place again and again."""
    boxes = [Box.whole(shape)]
    for _ in range(cuts):
        box = draw.choice(boxes)
        wide = [dimension for dimension, size in enumerate(box.size) if size > 1]
        if not wide:
            continue
        dimension = draw.choice(wide)
        first = draw.randrange(1, box.size[dimension])
        boxes.remove(box)
        for start, size in ((0, first), (first, box.size[dimension] - first)):
            begin, length = list(box.start), list(box.size)
            begin[dimension] += start
            length[dimension] = size
            boxes.append(Box(tuple(begin), tuple(length)))
    return boxes


def total(tensor: Tensor, boxes: Sequence[Box]) -> list[int]:
    """The sums over the boxes, added."""
    sums = digest.zero()
    for box in boxes:
        sums += digest.partial(tensor[slices(box)], tensor.shape, box)
    return [value & MASK for value in sums.tolist()]


@example_settings(120)
@given(shapes(4, 12), st.sampled_from(DTYPES), st.integers(0, 12), st.integers(0, 10**6))
def test_any_cut_gives_the_defined_sums(shape: tuple[int, ...], dtype: torch.dtype, cuts: int, seed: int) -> None:
    tensor = made(shape, dtype, seed)
    assert total(tensor, pieces(shape, cuts, random.Random(seed))) == defined(tensor)


@pytest.mark.parametrize("shape", [(3, digest.BLOCK + 5), (700, 600), (513, 129), (70001,), (40, 3, 700)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_blocks_of_keys(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = made(shape, dtype, 1)
    whole = total(tensor, [Box.whole(shape)])
    for seed in range(4):
        assert total(tensor, pieces(shape, 6, random.Random(seed))) == whole
    halves = [
        Box((0,) * len(shape), (*shape[:-1], shape[-1] // 2)),
        Box((*(0,) * (len(shape) - 1), shape[-1] // 2), (*shape[:-1], -(-shape[-1] // 2))),
    ]
    assert total(tensor, halves) == whole
    small = tensor[tuple(slice(0, 90) for _ in shape)]
    assert total(small, [Box.whole(small.shape)]) == defined(small)


@pytest.mark.parametrize("blocks", [2, 3, 256])
def test_slabs_of_several_blocks(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """As GPUs have them."""
    tensor = made((4 * 5 * digest.BLOCK + 77,), torch.bfloat16, 2)
    expected = digest.partial(tensor, tensor.shape)
    monkeypatch.setattr(digest, "_slab_blocks", lambda device: blocks)
    assert torch.equal(digest.partial(tensor, tensor.shape), expected)
    assert total(tensor, pieces(tensor.shape, 3, random.Random(0))) == [value & MASK for value in expected.tolist()]


@example_settings(60)
@given(shapes(3, 9), st.sampled_from(DTYPES[:5]), st.integers(0, 10**6))
def test_every_single_element_counts(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    tensor = made(shape, dtype, seed)
    if not tensor.numel():
        return
    raw = tensor.clone().view(-1).view(torch.uint8)
    at = seed % len(raw)
    raw[at] ^= 1 << seed % 8
    assert digest.of_tensor(raw.view(dtype).view(shape)) != digest.of_tensor(tensor)


def test_order_shape_and_dtype_count() -> None:
    tensor = made((6, 4), torch.float32, 0)
    others = [tensor.t(), tensor.view(4, 6), tensor.view(torch.int32), tensor.flip(0), torch.cat([tensor, torch.zeros(1, 4)])]
    assert len({digest.of_tensor(each) for each in (tensor, *others)}) == 1 + len(others)
    assert digest.of_tensor(torch.zeros(3)) != digest.of_tensor(torch.zeros(4))


def test_a_digest_is_the_same_on_every_device_and_in_every_release() -> None:
    """It travels between processes that may run different devices: the value is part of the format."""
    assert digest.of_tensor(torch.arange(10.0)) == "b627e29c948e0224acc3f41d45c3de5a"
    assert digest.of_tensor(torch.arange(100000).to(torch.bfloat16)) == "d1327b43095c718d398f3f1540d47a03"
