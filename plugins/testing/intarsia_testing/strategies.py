"""Hypothesis strategies and settings that the kit's modules share."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
from hypothesis import strategies as st
from intarsia.contracts import Member

THOROUGH = os.environ.get("INTARSIA_HYPOTHESIS", "") == "thorough"
"""INTARSIA_HYPOTHESIS=thorough draws twenty times as many examples, other ones at every run."""


def example_settings(max_examples: int) -> Any:
    """Settings for a test of `max_examples` examples: the same ones at every run, unless the thorough profile is asked for."""
    return hypothesis.settings(
        max_examples=max_examples * 20 if THOROUGH else max_examples,
        derandomize=not THOROUGH,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )


def shapes(max_rank: int = 4, max_size: int = 40) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of rank 0 to `max_rank` with sizes 0 to `max_size`."""
    return st.lists(st.integers(0, max_size), min_size=0, max_size=max_rank).map(tuple)


@st.composite
def members(draw: Any, name: str = "weight", max_rank: int = 4, max_size: int = 40) -> Member:
    """A member of any shape, with and without a tile (which may be larger than the member) and a cost."""
    shape = draw(shapes(max_rank, max_size))
    tile = draw(st.none() | st.tuples(*(st.integers(1, max(2, size + 1)) for size in shape)))
    cost = draw(st.just(0.0) | st.floats(0.125, 1000.0, allow_nan=False))
    return Member(name, shape, draw(st.sampled_from(("float32", "bfloat16"))), tile, cost)


@st.composite
def buckets(draw: Any, max_members: int = 5, max_rank: int = 4, max_size: int = 40) -> tuple[Member, ...]:
    """One to `max_members` members with names of their own."""
    count = draw(st.integers(1, max_members))
    return tuple(draw(members(f"block.{index}.weight", max_rank, max_size)) for index in range(count))


def worlds(largest: int = 9) -> st.SearchStrategy[int]:
    """Numbers of ranks from 1."""
    return st.integers(1, largest)
