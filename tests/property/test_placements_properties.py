"""Placements, by property: what follows from their cuts alone, for any bucket, number of ranks and load."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from intarsia.layout import Member, region_numel, slices
from intarsia_flexshard.plan import Geometry, make_geometry
from intarsia_placements import block, flat, mixed, owned, replicate, row
from intarsia_placements.config import Block, Column, Flat, Mixed, MixedRule, Owned, Replicate, Row
from intarsia_placements.layouts import build_layouts
from intarsia_testing.strategies import buckets, example_settings, worlds

UNTILED = buckets(max_members=5, max_size=9).map(lambda members: tuple(Member(member.name, member.shape) for member in members))
LOADS = st.floats(0, 100, allow_nan=False)


def geometry_of(members: tuple[Member, ...], ranks: int, placement: Any, alignment: int) -> Geometry:
    layouts = build_layouts(members, [("ranks", ranks, placement)])
    regions = [[layouts[member.name].local(rank) for member in members] for rank in range(ranks)]
    return make_geometry([member.shape for member in members], regions, alignment)


def gathered(members: tuple[Member, ...], geometry: Geometry, values: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The rank-major buffer, filled box by box; -1 where there is padding."""
    buffer = np.full(geometry.total, -1, np.int64)
    for member, value in enumerate(values):
        for piece in geometry.pieces(member):
            buffer[piece.offset : piece.offset + piece.box.numel] = value[slices(piece.box)].ravel()
    return buffer


@example_settings(100)
@hypothesis.given(members=UNTILED, ranks=worlds(), unit=st.integers(1, 20))
def test_flat_shares_are_whole_units_and_only_the_last_is_short(members: tuple[Member, ...], ranks: int, unit: int) -> None:
    partition = flat.build(Flat(unit=unit)).partition(members, ranks)
    units = [sum(-(-region_numel(row[rank]) // unit) for row in partition.regions) for rank in range(ranks)]
    total = sum(-(-member.numel // unit) for member in members)
    share = -(-total // ranks)
    assert units == [min(share, max(total - rank * share, 0)) for rank in range(ranks)]
    for member, row_ in zip(members, partition.regions, strict=True):
        begins = [sum(region_numel(region) for region in row_[:rank]) for rank in range(ranks)]
        assert all(begin % unit == 0 for begin, region in zip(begins, row_, strict=True) if region), member


@example_settings(100)
@hypothesis.given(members=UNTILED, ranks=worlds(), unit=st.sampled_from((4, 8)), placement=st.sampled_from(("flat", "owned", "rows")))
def test_what_is_cut_end_to_end_is_a_view_of_the_gathered_buffer(
    members: tuple[Member, ...], ranks: int, unit: int, placement: str
) -> None:
    made: Any = {"flat": flat.build(Flat(unit=unit)), "owned": owned.build(Owned()), "rows": block.build(Block(tile=(1, -1)))}[placement]
    hypothesis.assume(placement != "rows" or all(len(member.shape) <= 2 for member in members))
    alignment = 1 if placement == "rows" else unit
    geometry = geometry_of(members, ranks, made, alignment)
    values = [np.arange(member.numel, dtype=np.int64).reshape(member.shape) + 1000 * index for index, member in enumerate(members)]
    buffer = gathered(members, geometry, values)
    assert geometry.copied == 0
    for member, value, start in zip(members, values, geometry.starts, strict=True):
        assert (start is not None and start % alignment == 0) or not member.numel
        assert np.array_equal(buffer[start : (start or 0) + member.numel].reshape(member.shape), value)


@example_settings(100)
@hypothesis.given(members=UNTILED, ranks=worlds(), data=st.data())
def test_owned_is_as_even_as_promised_from_any_loads(members: tuple[Member, ...], ranks: int, data: st.DataObject) -> None:
    loads = data.draw(st.lists(LOADS, min_size=ranks, max_size=ranks))
    partition = owned.build(Owned()).partition_balanced(members, ranks, loads)
    after = [load + sum(region_numel(row_[rank]) for row_ in partition.regions) for rank, load in enumerate(loads)]
    largest = max((member.numel for member in members), default=0)
    # No rank that was given something is above another by more than its last member.
    given = [rank for rank in range(ranks) if after[rank] > loads[rank]]
    assert all(after[rank] <= min(after) + largest + 1e-9 for rank in given)
    plain = owned.build(Owned()).partition(members, ranks)
    most = max(sum(region_numel(row_[rank]) for row_ in plain.regions) for rank in range(ranks))
    assert most <= 4 / 3 * max(sum(member.numel for member in members) / ranks, largest) + largest / 3 + 1e-9


@example_settings(80)
@hypothesis.given(members=buckets(max_members=5, max_size=9), ranks=worlds(), data=st.data())
def test_mixed_cuts_each_member_as_its_own_placement_would(members: tuple[Member, ...], ranks: int, data: st.DataObject) -> None:
    configs: list[Any] = [Row(), Column(dim=-1), Flat(unit=4), Block(tile=(2, 3)), Owned()]
    hypothesis.assume(members)
    first, second = data.draw(st.sampled_from(configs)), data.draw(st.sampled_from(configs))
    chosen = data.draw(st.sampled_from(members)).name
    placement = mixed.build(Mixed(rules=(MixedRule(match=chosen, placement=first),), default=second))
    loads = data.draw(st.lists(LOADS, min_size=ranks, max_size=ranks))
    for partition in (placement.partition(members, ranks), placement.partition_balanced(members, ranks, loads)):
        for group, config in (
            ([index for index, member in enumerate(members) if member.name == chosen], first),
            ([index for index, member in enumerate(members) if member.name != chosen], second),
        ):
            if isinstance(config, Owned):  # Who owns what depends on what the others gave.
                assert all(sum(bool(region) for region in partition.regions[index]) == (members[index].numel > 0) for index in group)
                continue
            alone = mixed.build(Mixed(default=config)).partition([members[index] for index in group], ranks)
            assert [partition.regions[index] for index in group] == list(alone.regions)


@example_settings(100)
@hypothesis.given(experts=st.integers(1, 9), shape=st.tuples(st.integers(1, 5), st.integers(1, 5)), ranks=worlds())
def test_stacks_of_experts_are_shared_out_whole(experts: int, shape: tuple[int, int], ranks: int) -> None:
    member = Member("experts", (experts, *shape))
    partition = block.build(Block(tile=(-1, -1))).partition([member], ranks)
    held = [region_numel(region) for region in partition.regions[0]]
    assert all(count % math.prod(shape) == 0 for count in held) and sum(held) == member.numel
    assert max(held) - min(held) <= math.prod(shape) * 1
    assert replicate.build(Replicate()).partition([member], ranks).replicated
    assert row.build(Row()).partition([member], 1).regions[0][0][0].size == member.shape
