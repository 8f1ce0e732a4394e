"""The properties of layouts: any bucket, any world, any legal composition of two; and refusals of the others.

Values are numpy arrays that are painted by index, so that the box arithmetic is checked by something else than itself.
"""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from intarsia.contracts import Member, Placement
from intarsia.errors import UsageError
from intarsia.layout import Layout
from intarsia_placements import block, column, flat, owned, replicate, row
from intarsia_placements.config import Block, Column, Flat, Owned, Replicate, Row
from intarsia_placements.layouts import build_layouts
from intarsia_testing.layout import layout_from_json, simulate
from intarsia_testing.placement import carry_out, check_conversion, check_primaries, compose, gather, scatter, values_of
from intarsia_testing.strategies import buckets, example_settings, shapes, worlds
from intarsia_transfer import transfer

PLACEMENTS: tuple[Placement, ...] = (
    row.build(Row()),
    row.build(Row(dim=-1)),
    column.build(Column(dim=-2)),
    flat.build(Flat(unit=1)),
    owned.build(Owned()),
    block.build(Block(tile=(4, 3))),
    block.build(Block(tile=(8,))),
    replicate.build(Replicate()),
)

Steps = list[tuple[str, int, Placement]]


def two_steps() -> st.SearchStrategy[Steps]:
    """Two placements over axes `outer` and `inner` of 1 to 9 ranks together."""
    sizes = st.tuples(worlds(), worlds()).filter(lambda pair: pair[0] * pair[1] <= 9)
    pairs = st.tuples(st.sampled_from(PLACEMENTS), st.sampled_from(PLACEMENTS))
    return st.tuples(sizes, pairs).map(lambda drawn: list(zip(("outer", "inner"), *drawn, strict=True)))


def legal(members: tuple[Member, ...], steps: Steps) -> dict[str, Layout]:
    """The layouts, or the example is skipped: `compose` has checked that the refusal names member and placements."""
    layouts = compose(members, steps)
    hypothesis.assume(layouts)
    return layouts


@example_settings(480)
@hypothesis.given(members=buckets(), steps=two_steps())
def test_primaries_are_disjoint_and_cover_and_no_tile_is_cut(members: tuple[Member, ...], steps: Steps) -> None:
    layouts = legal(members, steps)
    for member in members:
        check_primaries(member, layouts[member.name], str([placement.name for _, _, placement in steps]))


@example_settings(400)
@hypothesis.given(members=buckets(), steps=two_steps())
def test_reconstruct_of_a_partition_is_identity(members: tuple[Member, ...], steps: Steps) -> None:
    layouts = legal(members, steps)
    for member in members:
        layout, full = layouts[member.name], values_of(member)
        assert np.array_equal(gather(scatter(full, layout), layout), full)


@example_settings(240)
@hypothesis.given(members=buckets(max_members=2, max_size=16), steps=two_steps(), other=two_steps())
def test_transfer_is_partition_by_the_destination_also_after_json(members: tuple[Member, ...], steps: Steps, other: Steps) -> None:
    here, there = legal(members, steps), legal(members, other)
    for member in members:
        src, dst = here[member.name], there[member.name]
        check_conversion(member, src, dst, f"{steps} to {other}")
        read_src, read_dst = (layout_from_json(json.loads(json.dumps(layout.to_json()))) for layout in (src, dst))
        assert (read_src, read_dst) == (src, dst) and hash(read_src) == hash(src)
        check_conversion(member, read_src, read_dst, f"{steps} to {other} after JSON")


@example_settings(240)
@hypothesis.given(shape=shapes(4, 40), steps=two_steps(), other=two_steps())
def test_a_large_tensor_moves_whole(shape: tuple[int, ...], steps: Steps, other: Steps) -> None:
    member = Member("weight", shape)
    src, dst = legal((member,), steps)["weight"], legal((member,), other)["weight"]
    full = values_of(member)
    assert all(map(np.array_equal, carry_out(transfer(src, dst), scatter(full, src)), scatter(full, dst)))


@example_settings(240)
@hypothesis.given(members=buckets(max_members=2, max_size=12), steps=two_steps(), other=two_steps())
def test_no_rank_is_sent_what_it_holds_nor_anything_twice(members: tuple[Member, ...], steps: Steps, other: Steps) -> None:
    here, there = legal(members, steps), legal(members, other)
    for member in members:
        src, dst = here[member.name], there[member.name]
        plan = transfer(src, dst)
        for rank in range(dst.ranks):
            held, taken = np.zeros(member.shape, bool), np.zeros(member.shape, int)
            for box in src.local(rank) if rank < src.ranks else ():
                held[tuple(map(slice, box.start, box.end))] = True
            for move in plan.receives(rank):
                index = tuple(map(slice, move.box.start, move.box.end))
                taken[index] += 1
                assert held[index].all() if move.source == rank else not held[index].any()
            wanted = np.zeros(member.shape, int)
            for box in dst.local(rank):
                wanted[tuple(map(slice, box.start, box.end))] = 1
            assert np.array_equal(taken, wanted)
            assert sum(plan.counts(rank)[1]) == int(taken[~held].sum())
        sent, received = zip(*(plan.counts(rank) for rank in range(plan.ranks)), strict=True)
        assert np.array_equal(np.array(sent).T, received)


@example_settings(240)
@hypothesis.given(data=st.data(), member=buckets(max_members=1, max_size=6), steps=two_steps(), op=st.sampled_from(("sum", "max")))
def test_pending_reductions_are_reduced_on_the_way(data: Any, member: tuple[Member, ...], steps: Steps, op: str) -> None:
    """Over any further axes, some replicated and some pending, the destination gets the sum or maximum of one copy of each contribution."""
    (one,) = member
    inner = legal(member, steps[1:])[one.name]
    kinds = data.draw(st.lists(st.sampled_from(("replicate", op)), min_size=1, max_size=3))
    src = inner
    for number, kind in enumerate(kinds):
        size = data.draw(st.integers(1, 3))
        src = src.replicate(f"r{number}", size) if kind == "replicate" else src.partial(f"p{number}", size, op)  # type: ignore[arg-type]
    contributions = 1 + max(src.index_along(rank, op) for rank in range(src.ranks))
    values = np.random.default_rng(0).integers(-99, 99, (contributions, *one.shape))
    locals_ = [scatter(values[src.index_along(rank, op)], src)[rank] for rank in range(src.ranks)]
    total = values.sum(0) if op == "sum" else values.max(0)
    dst = legal(member, data.draw(two_steps()))[one.name]
    plan = transfer(src, dst)
    wanted = [local.tolist() for local in scatter(total, dst)]
    assert [local.tolist() for local in carry_out(plan, locals_)] == wanted
    assert simulate(plan, [local.tolist() for local in locals_]) == wanted
    # Into a pending layout and out again is the value too.
    pending = dst.partial("again", 2, op)  # type: ignore[arg-type]
    halfway = carry_out(transfer(src, pending), locals_)
    assert [local.tolist() for local in carry_out(transfer(pending, dst), halfway)] == wanted


@example_settings(320)
@hypothesis.given(
    shape=st.lists(st.integers(2, 8), min_size=2, max_size=3).map(tuple),
    sizes=st.tuples(st.integers(2, 5), st.integers(1, 4)),
    inner=st.sampled_from([placement for placement in PLACEMENTS if placement.accepts == "box"]),
)
def test_illegal_compositions_are_refused_by_name(shape: tuple[int, ...], sizes: tuple[int, int], inner: Placement) -> None:
    """A placement that cuts boxes, inside one that leaves several boxes on a rank."""
    outer = flat.build(Flat(unit=1))
    member = Member("layers.0.weight", shape)
    several = any(len(region) > 1 for region in outer.partition([member], sizes[0]).regions[0])
    steps = [("dp_shard", sizes[0], outer), ("tp", sizes[1], inner)]
    if not several:
        assert build_layouts([member], steps)
        return
    with pytest.raises(UsageError) as caught:
        build_layouts([member], steps)
    for part in ("'layers.0.weight'", "'flat(unit=1)'", repr(inner.name), "'dp_shard'", "'tp'"):
        assert part in str(caught.value)
