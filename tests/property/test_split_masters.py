"""Split masters: a bfloat16 high half that is an ordinary cast, and 16 low bits that give the float32 value back."""

from __future__ import annotations

import struct

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from intarsia.parameters import join_master, split_master


def floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor([each - 2**32 if each >= 2**31 else each for each in bits], dtype=torch.int32).view(torch.float32)


def bits_of(values: torch.Tensor) -> list[int]:
    return [each % 2**32 for each in values.view(torch.int32).tolist()]


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = torch.full_like(values, 7, dtype=torch.bfloat16), torch.full_like(values, 7, dtype=torch.int16)
    split_master(values, high, low)
    return high, low


def rounded(bits: int) -> int:
    """Round to nearest even in plain integers."""
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_bits_come_back(bits: list[int]) -> None:
    values = floats(bits)
    high, low = halves(values)
    back = join_master(high, low)
    assert torch.equal(high.view(torch.int16), values.bfloat16().view(torch.int16))
    for before, after in zip(bits, bits_of(back), strict=True):
        magnitude = before & 0x7FFFFFFF
        if magnitude > 0x7F800000:
            assert after & 0x7FFFFFFF > 0x7F800000
        elif before & 0x1FFFF == 0x8000:
            assert after == before - 1
        else:
            assert after == before
    # What was moved stays where it is, and the half that is gathered is the same.
    again = halves(back)
    assert bits_of(join_master(*again)) == bits_of(back)
    ordinary = ~values.isnan()
    assert torch.equal(again[0][ordinary], high[ordinary])


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.integers(0, 2**15 - 1), st.sampled_from((0, 2**31)))
def test_ties_go_to_the_even_side(upper: int, sign: int) -> None:
    """Every number of the form x.5 in units of bfloat16's last place, of both signs."""
    bits = sign | upper << 16 | 0x8000
    hypothesis.assume(bits & 0x7F800000 != 0x7F800000)
    value = floats([bits])
    high, low = halves(value)
    assert high.view(torch.int16).item() % 2**16 == rounded(bits) and rounded(bits) % 2 == 0
    assert bits_of(join_master(high, low)) == [bits if upper % 2 else bits - 1]


@pytest.mark.parametrize(
    "bits",
    [
        0x00000000,
        0x80000000,
        0x00000001,
        0x80000001,
        0x00007FFF,
        0x007FFFFF,
        0x00800000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x3F800000,
    ],
)
def test_zeros_subnormals_the_largest_and_infinities_are_exact(bits: int) -> None:
    assert bits_of(join_master(*halves(floats([bits])))) == [bits]


def test_the_largest_number_has_an_infinite_half_as_in_a_cast_and_comes_back_finite() -> None:
    largest = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]
    high, low = halves(torch.tensor([largest]))
    assert high.isinf().all() and join_master(high, low).tolist() == [largest]


def test_any_shape_views_and_nothing() -> None:
    storage = torch.zeros(3, 10, dtype=torch.bfloat16)
    values, low = torch.randn(3, 4).requires_grad_(), torch.zeros(3, 4, dtype=torch.int16)
    high = storage[:, 3:7]
    split_master(values, high, low)
    assert torch.equal(storage[:, 3:7], values.detach().bfloat16()) and not storage[:, :3].any() and not storage[:, 7:].any()
    assert torch.equal(join_master(high, low), values.detach())
    scalar = torch.tensor(0.1)
    assert torch.equal(join_master(*halves(scalar)), scalar)
    assert join_master(*halves(torch.empty(0, 3))).shape == (0, 3)
