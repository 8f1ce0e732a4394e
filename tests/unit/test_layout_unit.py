"""Golden examples of boxes, layouts, transfers and buffer plans, and every refusal in words."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from intarsia.errors import PluginError, UsageError
from intarsia.layout import Box, Layout, Member, Partition, Region, box_text, range_boxes, region_parts, slices, whole_region
from intarsia_flexshard.plan import make_geometry
from intarsia_placements import block, column, flat, mixed, owned, replicate, row
from intarsia_placements.config import Block, Column, Flat, Mixed, MixedRule, Owned, Replicate, Row
from intarsia_placements.layouts import build_layouts, check_partition
from intarsia_testing.layout import box_runs, layout_from_json, pack, simulate, unpack
from intarsia_transfer import transfer

ROW, COLUMN, FLAT, OWNED = row.build(Row()), column.build(Column()), flat.build(Flat(unit=1)), owned.build(Owned())
BLOCK, REPLICATE = block.build(Block(tile=(2, 2))), replicate.build(Replicate())


def one(shape: Sequence[int], *steps: Any, **facts: Any) -> Layout:
    return build_layouts([Member("w", tuple(shape), **facts)], steps)["w"]


def sizes(layout: Layout) -> list[int]:
    return [layout.numel(rank) for rank in range(layout.ranks)]


# ---------------------------------------------------------------- boxes


def test_ranges_become_few_boxes_in_storage_order() -> None:
    assert range_boxes(Box((0, 0), (3, 4)), 0, 12) == (Box((0, 0), (3, 4)),)
    assert range_boxes(Box((10, 20), (3, 4)), 2, 7) == (Box((10, 22), (1, 2)), Box((11, 20), (1, 4)), Box((12, 20), (1, 1)))
    assert range_boxes(Box((0, 0), (3, 4)), 5, 2) == (Box((1, 1), (1, 2)),)
    assert range_boxes(Box((0, 0), (3, 4)), 4, 8) == (Box((1, 0), (2, 4)),)
    assert range_boxes(Box((), ()), 0, 1) == (Box((), ()),)
    assert range_boxes(Box((0,), (5,)), 3, 0) == ()


def test_ranges_agree_with_numpy_for_every_start_and_end() -> None:
    full = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    for start in range(25):
        for end in range(start, 25):
            boxes = range_boxes(Box.whole(full.shape), start, end - start)
            assert len(boxes) <= 5
            found = [value for box in boxes for value in full[slices(box)].ravel()]
            assert found == list(range(start, end))


def test_runs_are_contiguous_in_both_buffers_and_as_long_as_can_be() -> None:
    box, source, destination = Box((1, 2), (2, 3)), Box((0, 0), (4, 8)), Box((1, 0), (3, 5))
    assert list(box_runs(box, source, 100, destination, 0)) == [(110, 2, 3), (118, 7, 3)]
    rows = Box((1, 0), (2, 8))
    assert list(box_runs(rows, source, 0, rows, 0)) == [(8, 0, 16)]
    # Whole in the source only, then whole in the destination only.
    assert list(box_runs(box, box, 0, destination, 0)) == [(0, 2, 3), (3, 7, 3)]
    assert list(box_runs(box, source, 0, box, 0)) == [(10, 0, 3), (18, 3, 3)]
    scalar = Box((), ())
    assert list(box_runs(scalar, scalar, 3, scalar, 9)) == [(3, 9, 1)]
    planes = Box((0, 1, 0), (2, 1, 4))
    assert list(box_runs(planes, Box((0, 0, 0), (2, 3, 4)), 0, planes, 0)) == [(4, 0, 4), (16, 4, 4)]


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_pack_and_unpack_share_memory_with_the_buffer(library: Any) -> None:
    full = library.arange(12).reshape(3, 4)
    region = range_boxes(Box((0, 0), (3, 4)), 3, 6)
    local = library.zeros(6, dtype=full.dtype)
    pack(full, region, local)
    assert local.tolist() == [3, 4, 5, 6, 7, 8]
    again = library.zeros((3, 4), dtype=full.dtype)
    unpack(local, region, again)
    assert again.tolist() == [[0, 0, 0, 3], [4, 5, 6, 7], [8, 0, 0, 0]]
    for box, view in region_parts(local, region, Box((1, 1), (2, 2))):
        view[...] = -box.numel
    assert local.tolist() == [3, 4, -2, -2, 7, 8]
    scalar, held = library.ones((), dtype=full.dtype) * 7, library.zeros(1, dtype=full.dtype)
    pack(scalar, whole_region(()), held)
    assert held.tolist() == [7]


# ---------------------------------------------------------------- placements, golden


def test_row_is_even_within_one_and_names_what_it_cannot_cut() -> None:
    assert sizes(one((5,), ("dp", 4, ROW))) == [2, 1, 1, 1]
    assert sizes(one((5, 3), ("dp", 2, ROW))) == [9, 6]
    assert one((5, 3), ("dp", 2, ROW)).local(1) == (Box((3, 0), (2, 3)),)
    assert one((2, 5), ("tp", 2, COLUMN)).local(1) == (Box((0, 3), (2, 2)),)
    assert sizes(one((7,), ("tp", 2, COLUMN))) == [4, 3], "a vector is cut along its only dimension"
    # 10 rows in tiles of 4: three units, the last one short.
    assert [box.size[0] for box in sum((one((10, 2), ("dp", 2, ROW), tile=(4, 1)).local(r) for r in range(2)), ())] == [8, 2]
    assert sizes(one((0, 5), ("dp", 3, ROW))) == [0, 0, 0]
    with pytest.raises(UsageError, match=r"'row\(dim=2\)' cannot cut member 'w' of shape \(3, 4\).*no dimension 2.*between -2 and 1"):
        one((3, 4), ("dp", 2, row.build(Row(dim=2))))


def test_rank_0_members_go_to_the_rank_with_least() -> None:
    members = [Member("w", (3, 2)), Member("a", ()), Member("b", ()), Member("c", ())]
    layouts = build_layouts(members, [("dp", 2, ROW)])
    assert [sizes(layouts[name]) for name in "wabc"] == [[4, 2], [0, 1], [0, 1], [1, 0]]


def test_flat_cuts_the_bucket_and_snaps_to_rows_of_tiles() -> None:
    members = [Member("a", (3, 3)), Member("b", (5,)), Member("c", ())]
    layouts = build_layouts(members, [("dp", 4, FLAT)])
    assert [sizes(layouts[name]) for name in "abc"] == [[4, 4, 1, 0], [0, 0, 3, 2], [0, 0, 0, 1]], "15 over 4: the last has one less"
    assert layouts["a"].local(1) == (Box((1, 1), (1, 2)), Box((2, 0), (1, 2)))
    assert sizes(one((9, 2), ("dp", 2, FLAT), tile=(4, 2))) == [8, 10], "border 9 goes to 8"
    assert sizes(one((9, 2), ("dp", 2, FLAT), tile=(8, 2))) == [16, 2], "border 9 is nearer to 16 than to 0"


def test_flat_cuts_in_whole_units_from_each_members_beginning() -> None:
    members = [Member("a", (10, 13)), Member("b", (70,)), Member("c", (200,))]
    layouts = build_layouts(members, [("dp", 3, flat.build(Flat()))])
    # 3, 2 and 4 units of 64, of which a's and b's last are short: 3 for each rank.
    assert [sizes(layouts[name]) for name in "abc"] == [[130, 0, 0], [0, 70, 0], [0, 64, 136]]
    assert sizes(one((5,), ("dp", 4, flat.build(Flat(unit=1))))) == [2, 2, 1, 0], "ceil(5 / 4) until none is left"
    with pytest.raises(UsageError, match="flat: unit is 0"):
        flat.build(Flat(unit=0))


def test_owned_balances_by_cost_longest_first_ties_by_name() -> None:
    members = [Member("d", (1,), cost=7.0), Member("b", (8,)), Member("a", (8,)), Member("c", (3,))]
    layouts = build_layouts(members, [("dp", 2, OWNED)])
    assert {name: [rank for rank in range(2) if layouts[name].numel(rank)] for name in "abcd"} == {"a": [0], "b": [1], "d": [0], "c": [1]}


def test_block_shares_out_whole_tiles_in_few_boxes() -> None:
    layout = one((4, 6), ("dp", 2, BLOCK))
    assert layout.local(0) == (Box((0, 0), (2, 6)),)
    layout = one((4, 6), ("dp", 3, BLOCK))
    assert layout.regions == (
        (Box((0, 0), (2, 4)),),
        (Box((0, 4), (2, 2)), Box((2, 0), (2, 2))),
        (Box((2, 2), (2, 4)),),
    )
    assert one((3, 4, 6), ("dp", 3, BLOCK)).local(1) == (Box((1, 0, 0), (1, 4, 6)),)
    assert one((3, 5), ("dp", 2, BLOCK)).regions == ((Box((0, 0), (2, 4)),), (Box((0, 4), (2, 1)), Box((2, 0), (1, 5)))), (
        "edge tiles are short"
    )
    assert sizes(one((4, 6), ("dp", 2, BLOCK), tile=(4, 3))) == [24, 0], "least common multiple of (2, 2) and (4, 3): one tile"
    for wrong in ((), (0, 2), (1, 1, 1, 1), (-2,)):
        with pytest.raises(UsageError, match="one, two or three sizes of at least 1"):
            block.build(Block(tile=wrong))


def test_block_takes_whole_dimensions_for_minus_one() -> None:
    rows, matrices = block.build(Block(tile=(2, -1))), block.build(Block(tile=(-1, -1)))
    assert one((6, 5), ("dp", 2, rows)).regions == ((Box((0, 0), (4, 5)),), (Box((4, 0), (2, 5)),)), "whole rows of tiles only"
    assert sizes(one((4, 3, 5), ("dp", 3, matrices))) == [15, 30, 15], "experts are whole"
    assert sizes(one((40, 3), ("dp", 3, matrices))) == [0, 120, 0], "and so is a matrix of many rows"


def test_owned_and_mixed_make_up_for_what_ranks_have_already() -> None:
    members = [Member("a", (8, 4)), Member("b", (4, 4)), Member("c", (4,))]
    owners = {
        member.name: [bool(region) for region in regions]
        for member, regions in zip(members, OWNED.partition_balanced(members, 3, [0.0, 20.0, 40.0]).regions, strict=True)
    }
    assert owners == {"a": [True, False, False], "b": [False, True, False], "c": [True, False, False]}
    assert OWNED.partition(members, 3) == OWNED.partition_balanced(members, 3, [0.0] * 3)
    for wrong in ([0.0], [0.0, math.nan, 0.0], [-1.0, 0.0, 0.0]):
        with pytest.raises(UsageError, match=r"'owned' cannot cut members 'a', 'b', 'c'.*one finite load"):
            OWNED.partition_balanced(members, 3, wrong)
    rules = (MixedRule(match="b", placement=Owned()), MixedRule(match="*", placement=Row(dim=0)))
    placement = mixed.build(Mixed(rules=rules))
    layouts = build_layouts(members, [("dp", 3, placement)])
    # The rows of a and c go first (3, 3, 2 of 4 and 2, 1, 1), b to who then has the least.
    assert [sizes(layouts[name]) for name in "abc"] == [[12, 12, 8], [0, 0, 16], [2, 1, 1]]
    assert placement.name == "mixed(b: owned, *: row(dim=0), row(dim=0))" and placement.accepts == "box"
    moved = placement.partition_balanced(members, 3, [0.0, 0.0, 99.0]).regions[1]
    assert moved == ((), whole_region((4, 4)), ())


def test_mixed_names_what_cannot_share_a_bucket() -> None:
    rules = (MixedRule(match="norm*", placement=Replicate()),)
    with pytest.raises(UsageError, match=r"'replicate' keeps members whole on every rank while 'row\(dim=0\)' cuts others"):
        mixed.build(Mixed(rules=rules))
    whole = build_layouts([Member("a", (4,))], [("dp", 2, mixed.build(Mixed(rules=rules, default=Replicate())))])["a"]
    assert whole.kinds == ("replicate",)
    assert mixed.build(Mixed(default=Flat())).accepts == "region"
    with pytest.raises(UsageError, match=r"'row\(dim=2\)' cannot cut member 'a' of shape \(4, 4\)"):
        build_layouts([Member("a", (4, 4))], [("dp", 2, mixed.build(Mixed(default=Row(dim=2))))])


# ---------------------------------------------------------------- layouts


def test_a_layout_composes_cut_replication_and_pending() -> None:
    layout = Layout.whole((4, 4)).replicate("dp_replicate", 2).cut("dp_shard", [(Box((0, 0), (3, 4)),), (Box((3, 0), (1, 4)),)])
    layout = layout.partial("cp", 2, "sum")
    assert layout.ranks == 8 and layout.axes == (("dp_replicate", 2), ("dp_shard", 2), ("cp", 2))
    assert layout.coordinates(6) == (1, 1, 0)
    assert layout.local(6) == layout.local(3) == (Box((3, 0), (1, 4)),)
    assert [bool(layout.primary(rank)) for rank in range(8)] == [True, False, True, False, False, False, False, False]
    assert layout.pending == (("cp", "sum"),)
    assert layout == layout_from_json(layout.to_json()) and layout != dataclasses.replace(layout, dtype="bfloat16")
    with pytest.raises(UsageError, match="Rank 8 is not in a mesh of 8"):
        layout.local(8)


def test_tensor_parallel_then_data_parallel_with_sizes_that_do_not_divide() -> None:
    for size in (1, 5, 7):
        for world in range(1, 9):
            layout = one((size, 3), ("tp", 2, COLUMN), ("dp_shard", world, ROW))
            assert sum(sizes(layout)) == size * 3
            assert all(box.end[0] <= size for rank in range(layout.ranks) for box in layout.local(rank))
    layout = one((5, 3), ("tp", 2, ROW), ("dp_shard", 2, ROW))
    assert [layout.local(rank)[0].start[0] for rank in range(4)] == [0, 2, 3, 4]


def test_several_boxes_are_one_dimensional_inside() -> None:
    layout = one((3, 4), ("a", 2, FLAT), ("b", 2, FLAT))
    assert sizes(layout) == [3, 3, 3, 3]
    assert layout.local(1) == (Box((0, 3), (1, 1)), Box((1, 0), (1, 2)))
    # Elements 19 to 25 of 25, which lie in one box of the outer piece, in storage order.
    assert one((5, 5), ("a", 2, FLAT), ("b", 2, FLAT)).local(3) == (Box((3, 4), (1, 1)), Box((4, 0), (1, 5)))
    owner = one((3, 4), ("a", 2, FLAT), ("b", 2, OWNED))
    assert sizes(owner) == [6, 0, 6, 0]


def test_tiles_in_several_boxes_stay_whole_inside() -> None:
    # Half a row of tiles and half of the next: a cut between the two boxes cuts no tile.
    members = [Member("a", (2, 4), tile=(2, 2)), Member("b", (4, 8), tile=(2, 2)), Member("c", (2, 4), tile=(2, 2))]
    layout = build_layouts(members, [("outer", 3, BLOCK), ("inner", 2, FLAT)])["b"]
    assert sizes(layout) == [0, 8, 8, 8, 8, 0]
    assert layout.regions[2:4] == ((Box((0, 4), (2, 4)),), (Box((2, 0), (2, 4)),))
    # A row of tiles and half of the next: rows of different lengths have no common border in storage order, so that they stay together.
    layout = one((6, 8), ("outer", 2, BLOCK), ("inner", 2, FLAT), tile=(2, 2))
    assert sizes(layout) == [24, 0, 24, 0]


def test_illegal_composition_names_both_placements_axes_and_member() -> None:
    with pytest.raises(UsageError) as caught:
        one((3, 4), ("dp_shard", 2, FLAT), ("tp", 2, ROW))
    assert str(caught.value) == (
        "Placement 'row(dim=0)' on axis 'tp' cannot cut what 'flat(unit=1)' on axis 'dp_shard' left of 'w': that is 2 boxes, and 'row(dim=0)' cuts "
        "one box only. Choose an inner placement that accepts any region (flat, owned), or an outer one that leaves boxes (row, column, owned)."
    )
    with pytest.raises(UsageError, match=r"no dimension 2.*placement 'row\(dim=2\)' on axis 'b' of size 2 inside 'owned' on axis 'a'"):
        one((3, 4), ("a", 2, OWNED), ("b", 2, row.build(Row(dim=2))))


def test_replicate_by_word_and_by_placement_are_the_same() -> None:
    assert one((3, 4), ("a", 2, "replicate"), ("b", 2, ROW)) == one((3, 4), ("a", 2, REPLICATE), ("b", 2, ROW))
    assert Layout.whole((3, 4), axes=[("a", 2)]) == one((3, 4), ("a", 2, REPLICATE))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout.whole((2,)).replicate("a", 0), "size 0; it must be at least 1"),
        (lambda: Layout.whole((2,)).replicate("a", 2).replicate("a", 2), "'a' is in the layout already"),
        (lambda: Layout.whole((2,)).partial("a", 2, "mean"), "'sum' or 'max', not 'mean'"),  # type: ignore[arg-type]
        (lambda: Layout.whole((2,)).partial("a", 2, "sum").partial("b", 2, "max"), "sum and max cannot be pending at once"),
        (
            lambda: Layout.whole((4,)).cut("a", [(Box((0,), (3,)),), (Box((2,), (2,)),)]),
            r"\[0:3\] of rank 0 and box \[2:4\] of rank 1 overlap",
        ),
        (lambda: Layout.whole((4,)).cut("a", [(Box((0,), (3,)),)]), "cover 3 of 4 elements"),
        (lambda: Layout.whole((4,)).cut("a", []), "0 regions cannot be shared out evenly over 1 pieces"),
        (
            lambda: (
                Layout.whole((4,)).cut("a", [(Box((0,), (2,)),), (Box((2,), (2,)),)]).cut("b", [(Box((2,), (2,)),), (Box((0,), (2,)),)])
            ),
            "region 0 of piece 0 leaves that piece",
        ),
        (lambda: build_layouts([Member("x", (2,)), Member("x", (3,))], []), "several members of the name 'x'"),
        (lambda: build_layouts([Member("x", (2,), tile=(1, 1))], []), r"'x' has tile \(1, 1\) for shape \(2,\)"),
        (lambda: build_layouts([Member("x", (-2,))], []), "must not be negative"),
        (lambda: build_layouts([Member("x", (2,))], [("a", 0, ROW)]), "size 0; it must be at least 1"),
        (lambda: transfer(Layout.whole((2,)), Layout.whole((3,))), r"shape \(2,\) cannot be moved into a layout of shape \(3,\)"),
        (lambda: simulate(transfer(Layout.whole((2,)), Layout.whole((2,))), [[1]]), "stores 2 elements, the buffer has 1"),
    ],
)
def test_refusals_say_what_is_wrong(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


GOOD = Layout.whole((4,)).cut("a", [(Box((0,), (3,)),), (Box((3,), (1,)),)]).to_json()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "object with shape, dtype, axes and regions"),
        ({"extra": 1}, "object with shape, dtype, axes and regions"),
        ({"shape": "4"}, "shape must be a list"),
        ({"shape": [-4]}, "integers that are not negative"),
        ({"shape": [4.0]}, "integers that are not negative"),
        ({"shape": [True]}, "integers that are not negative"),
        ({"dtype": 3}, "dtype is a string"),
        ({"axes": [["a", 2]]}, "An axis of a layout is"),
        ({"axes": [["a", 2, "mean"]]}, "An axis of a layout is"),
        ({"axes": [["a", 2, ["cut"]]]}, "An axis of a layout is"),
        ({"axes": [["a", "2", "cut"]]}, "An axis of a layout is"),
        ({"axes": [["a", 0, "cut"]]}, "size 0"),
        ({"axes": [["a", 2, "cut"], ["a", 2, "replicate"]]}, "already"),
        ({"axes": [["a", 3, "cut"]]}, "2 regions for 3 pieces"),
        ({"regions": [[[[0], [3]]], [[[2], [2]]]]}, "overlap"),
        ({"regions": [[[[0], [3]]], []]}, "cover 3 of 4"),
        ({"regions": [[[[0], [3]]], [[[3], [2]]]]}, "outside the shape"),
        ({"regions": [[[[0], [4]]], [[[3], [0]]]]}, "is empty"),
        ({"regions": [[[[0, 0], [4, 1]]], []]}, "2 dimensions, the tensor has 1"),
        ({"regions": [[[[0], [4, 1]]], []]}, "start of 1 dimensions and a size of 2"),
        ({"regions": [[[[0]]], []]}, "must be .start, size."),
        ({"regions": [[5], []]}, "box must be a list"),
        ({"regions": 5}, "regions must be a list"),
    ],
)
def test_json_that_is_no_layout_is_refused(change: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        layout_from_json(None if change is None else {**GOOD, **change})


# ---------------------------------------------------------------- contracts of placements


class Wrong:
    """A placement that answers what it was made with."""

    name = "wrong"
    accepts: Literal["box", "region"] = "region"

    def __init__(self, *regions: Region, replicated: bool = False) -> None:
        self.regions, self.replicated = regions, replicated

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        return Partition(tuple(members), ranks, (tuple(self.regions),) * len(members), self.replicated)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Wrong((Box((0, 0), (4, 4)),)), "1 regions for 2 ranks"),
        (Wrong((Box((0, 0), (2, 4)),), (Box((1, 0), (3, 4)),)), "overlap"),
        (Wrong((Box((0, 0), (2, 4)),), (Box((3, 0), (1, 4)),)), "cover 12 of 16"),
        (Wrong((Box((0, 0), (3, 4)),), (Box((3, 0), (1, 4)),)), r"box \[0:3, 0:4\] cuts a tile of \(2, 2\)"),
        (Wrong((Box((0, 0), (4, 4)),), (Box((0, 0), (4, 0)),)), "is empty; an empty region is an empty tuple"),
        (Wrong((Box((0, 0), (4, 4)),), (), replicated=True), "not every rank stores the member whole"),
    ],
)
def test_a_placement_that_breaks_its_contract_is_named(placement: Wrong, words: str) -> None:
    with pytest.raises(PluginError, match=f"placement 'wrong' broke its contract for member 'w' of shape .4, 4.: .*{words}"):
        one((4, 4), ("a", 2, placement), tile=(2, 2))


def test_a_tile_may_lie_in_several_boxes_of_one_rank() -> None:
    member = Member("w", (4, 4), tile=(2, 2))
    scattered = (Box((0, 0), (1, 4)), Box((1, 0), (1, 4)))
    check_partition(Partition((member,), 2, ((scattered, (Box((2, 0), (2, 4)),)),)))


def test_partitions_of_other_members_and_mixed_replication_are_refused() -> None:
    class Other(Wrong):
        def partition(self, members: Sequence[Member], ranks: int) -> Partition:
            return dataclasses.replace(ROW.partition(members, ranks), ranks=ranks + 1)

    with pytest.raises(PluginError, match="other members or ranks"):
        one((4, 4), ("a", 2, Other()))

    class Mixed(Wrong):
        def partition(self, members: Sequence[Member], ranks: int) -> Partition:
            return (REPLICATE if members[0].shape[0] == 2 else ROW).partition(members, ranks)

    with pytest.raises(PluginError, match="replicates some pieces of a bucket and cuts others"):
        one((3, 4), ("a", 2, ROW), ("b", 2, Mixed()))
    with pytest.raises(PluginError, match="0 rows of regions for 1 members"):
        check_partition(Partition((Member("w", (1,)),), 1, ()))


# ---------------------------------------------------------------- transfers


def test_row_to_column_moves_what_is_elsewhere_only() -> None:
    plan = transfer(one((2, 4), ("dp", 2, ROW)), one((2, 4), ("dp", 2, COLUMN)))
    assert [(m.source, m.destination, m.op, box_text(m.box)) for m in plan.receives(0)] == [
        (0, 0, "copy", "[0:1, 0:2]"),
        (1, 0, "copy", "[1:2, 0:2]"),
    ]
    assert plan.counts(0) == ([0, 2], [0, 2])
    assert simulate(plan, [[0, 1, 2, 3], [4, 5, 6, 7]]) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_what_one_sends_is_what_the_other_takes_in_the_same_order() -> None:
    members = [Member("a", (5, 3)), Member("b", (6, 7, 2)), Member("c", (2, 9))]
    src = build_layouts(members, [("r", 2, "replicate"), ("x", 2, FLAT), ("y", 2, FLAT)])["b"].partial("p", 2, "sum")
    dst = build_layouts(members, [("x", 3, BLOCK), ("y", 2, "replicate")])["b"]
    plan = transfer(src, dst)
    pairs = 0
    for source in range(plan.ranks):
        for destination in range(plan.ranks):
            given = [move for move in plan.sends(source) if move.destination == destination]
            assert given == [move for move in plan.receives(destination) if move.source == source]
            pairs += len(given) > 1
    assert pairs > 3, "several boxes go from one rank to another, so that the order matters"


def test_boxes_in_any_storage_order_and_of_any_reach() -> None:
    whole = Layout.whole((4,)).replicate("a", 1)
    backwards = Layout.whole((4,)).cut("a", [(Box((2,), (2,)), Box((0,), (2,)))])
    forwards = Layout.whole((4,)).cut("a", [(Box((0,), (2,)), Box((2,), (2,)))])
    for src, dst in ((backwards, whole), (whole, backwards), (backwards, forwards), (forwards, backwards)):
        plan = transfer(src, dst)
        assert plan.sends(0) == plan.receives(0)
    assert simulate(transfer(backwards, whole), [[2, 3, 0, 1]]) == [[0, 1, 2, 3]]
    assert simulate(transfer(forwards, backwards), [[0, 1, 2, 3]]) == [[2, 3, 0, 1]]
    # The first box along the sorted dimension reaches further than those after it.
    long = Layout.whole((4, 2)).cut("a", [(Box((0, 0), (4, 1)),), *((Box((row, 1), (1, 1)),) for row in range(4))])
    rows = one((4, 2), ("a", 4, ROW))
    assert simulate(transfer(long, rows), [[0, 2, 4, 6], [1], [3], [5], [7]]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_replicas_share_the_load_and_meshes_may_differ() -> None:
    src, dst = Layout.whole((8,), axes=[("r", 2)]), one((8,), ("dp", 4, ROW))
    plan = transfer(src, dst)
    assert [[move.source for move in plan.receives(rank)] for rank in range(4)] == [[0], [1], [0], [1]]
    assert plan.sends(3) == [] and plan.ranks == 4
    smaller = transfer(dst, Layout.whole((8,)))
    assert simulate(smaller, [[0, 1], [2, 3], [4, 5], [6, 7]]) == [list(range(8))]
    assert smaller.receives(2) == [] and len(smaller.sends(2)) == 1


def test_hybrid_sharding_stays_inside_its_replica_group() -> None:
    src = one((8, 8), ("dp_replicate", 2, "replicate"), ("dp_shard", 2, ROW))
    plan = transfer(src, Layout.whole((8, 8), axes=[("dp", 4)]))
    assert [sorted({move.source for move in plan.receives(rank)}) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_pending_sum_is_reduced_in_order_of_source() -> None:
    gradient = Layout.whole((4,)).partial("dp", 3, "sum")
    plan = transfer(gradient, one((4,), ("dp", 3, ROW)))
    assert [(move.source, move.op) for move in plan.receives(1)] == [(0, "copy"), (1, "sum"), (2, "sum")]
    assert simulate(plan, [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400]]) == [[111, 222], [333], [444]]
    largest = Layout.whole((2,)).partial("dp", 2, "max")
    assert simulate(transfer(largest, Layout.whole((2,), axes=[("dp", 2)])), [[1, 5], [4, 2]]) == [[4, 5], [4, 5]]


def test_into_a_pending_sum_the_first_gets_the_value_and_the_others_zeros() -> None:
    plan = transfer(Layout.whole((2,)), Layout.whole((2,)).partial("dp", 2, "sum"))
    assert simulate(plan, [[7, 8]]) == [[7, 8], [0, 0]]
    assert plan.counts(0) == plan.counts(1) == ([0, 0], [0, 0])


def test_the_norm_of_a_pending_tensor_is_taken_after_the_reduction() -> None:
    src = Layout.whole((2,)).partial("dp", 2, "sum")
    dst = one((2,), ("dp", 2, ROW))
    reduced = simulate(transfer(src, dst), [[1.0, 3.0], [2.0, 1.0]])
    assert sum(value**2 for rank in range(2) if dst.primary(rank) for value in reduced[rank]) ** 0.5 == 5.0


# ---------------------------------------------------------------- buffers, size, imports


def test_members_begin_at_multiples_of_the_alignment() -> None:
    members = [Member("a", (33,)), Member("b", (0,)), Member("c", (3,)), Member("d", (64,))]
    regions = [whole_region(member.shape) for member in members]
    plan = make_geometry([member.shape for member in members], [regions, [()] * 4], alignment=32)
    assert plan.counts == (160, 0) and plan.starts == (0, 0, 64, 96)
    assert [(piece.member, piece.offset) for member in range(4) for piece in plan.pieces(member)] == [(0, 0), (2, 64), (3, 96)]


def test_every_dtype_size_is_torchs() -> None:
    from intarsia.layout import DTYPE_BYTES

    known = {name: getattr(torch, name).itemsize for name in DTYPE_BYTES if hasattr(torch, name)}
    assert known == {name: DTYPE_BYTES[name] for name in known} and len(known) > 12


@pytest.mark.timeout(240)  # about a second: what grows with the square of members or ranks would take minutes
def test_a_405b_model_is_laid_out() -> None:
    members = []
    for layer in range(126):
        for name, shape in (("q", (16384, 16384)), ("k", (1024, 16384)), ("v", (1024, 16384)), ("o", (16384, 16384)), ("gate", (53248, 16384)),
                            ("up", (53248, 16384)), ("down", (16384, 53248)), ("norm1", (16384,)), ("norm2", (16384,))):  # fmt: skip
            members.append(Member(f"layers.{layer}.{name}.weight", shape, "bfloat16"))
    layouts = build_layouts(members, [("dp_replicate", 2, "replicate"), ("tp", 8, COLUMN), ("dp_shard", 4, ROW)])
    assert sum(layout.numel(0) for layout in layouts.values()) == sum(member.numel for member in members) // 32


def test_layouts_import_neither_torch_nor_numpy() -> None:
    code = "import sys, intarsia.layout, intarsia_transfer, intarsia_placements.plugin; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
