"""Matrices are found by their boxes wherever they lie, and whatever cuts them each has one owner who gets all of it."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.layout import Box, Layout, region_numel, whole_region
from intarsia_optimizers.config import SplitConfig
from intarsia_optimizers.matrices import inside, matrices_of, stacks_in
from intarsia_optimizers.muon_update import matrix_view
from intarsia_optimizers.ownership import cut_axes, find_ownership, merged
from intarsia_testing.layout import pack, unpack
from torch import Tensor

SIZES = st.integers(1, 6)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A parameter's shape, and its matrices under a random declaration."""
    lengths = draw(st.lists(SIZES, min_size=1, max_size=4))
    even = draw(st.booleans())
    total = lengths[0] * len(lengths) if even else sum(lengths)
    columns, other, stack = draw(st.booleans()), draw(SIZES), draw(st.sampled_from([(), (1,), (3,), (5,)]))
    shape = (*stack, other, total) if columns else (*stack, total, other)
    kinds = [
        SplitConfig(match=("*",), blocks=len(lengths), columns=columns),
        SplitConfig(match=("*",), head_dim=lengths[0], columns=columns),
    ]
    split = draw(st.sampled_from([None, *kinds])) if even else SplitConfig(match=("*",), sizes=tuple(lengths), columns=columns)
    return shape, matrices_of("w", shape, split)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Box, ...]]:
    """A disjoint cover of a tensor by 1 to 4 ranks: boxes cut again and again at random, dealt out."""
    boxes = [*whole_region(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.size[dimension]))
        for begin, length in ((0, at), (at, box.size[dimension] - at)):
            if length:
                start, size = list(box.start), list(box.size)
                start[dimension] += begin
                size[dimension] = length
                boxes.append(Box(tuple(start), tuple(size)))
    ranks = draw(st.integers(1, 4))
    regions: list[list[Box]] = [[] for _ in range(ranks)]
    for box in sorted(boxes):
        regions[draw(st.integers(0, ranks - 1))].append(box)
    return [tuple(region) for region in regions]


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def of(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))].reshape(box.size[-2:])


@given(matrices())
def test_the_matrices_of_a_parameter_are_all_of_it(made: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = made
    counted = torch.zeros(shape)
    for box in boxes:
        counted[tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))] += 1
    assert counted.eq(1).all() and boxes == sorted(boxes)


@given(st.data())
def test_stacks_show_every_matrix_that_is_whole_and_no_other(data: st.DataObject) -> None:
    shape, boxes = data.draw(matrices())
    whole = numbered(shape)
    for region in data.draw(cuts(shape)):
        local = torch.zeros(region_numel(region))
        pack(whole, region, local)
        shown = [matrix for stack in stacks_in(region, boxes) for matrix in matrix_view(local, stack)]
        expected = [of(whole, boxes[number]) for number, _, _ in inside(region, boxes)]
        assert len(shown) == len(expected) and all(torch.equal(a, b) for a, b in zip(shown, expected, strict=True))
        held = [box for box in boxes if any(holder.intersect(box) == box for holder in region)]
        assert [boxes[number] for number in sorted(number for number, _, _ in inside(region, boxes))] == held


@settings(max_examples=60)
@given(st.data())
def test_cut_matrices_come_whole_to_one_owner_and_go_back(data: st.DataObject) -> None:
    shape, boxes = data.draw(matrices())
    regions = data.draw(cuts(shape))
    layout = Layout(shape, "float32", (), (), whole_region(shape) and (whole_region(shape),)).with_axis(
        "dp_shard", len(regions), "cut", tuple(regions)
    )
    found = find_ownership({"w": layout}, {"w": boxes}, 5)
    split = [box for box in boxes if not any(holder.intersect(box) == box for region in regions for holder in region)]
    assert (not found.journeys) == (not split)
    assert sum(found.loads[(("dp_shard", len(regions)),)]) > 0
    if not split:
        return
    journey, whole = found.journeys["w"], numbered(shape)
    parts = [torch.zeros(region_numel(region)) for region in regions]
    for part, region in zip(parts, regions, strict=True):
        pack(whole, region, part)
    owned = [torch.full((journey.owned.numel(rank),), -1.0) for rank in range(len(regions))]
    moved(journey.there, parts, owned)
    seen = []
    for rank, buffer in enumerate(owned):
        for stack in stacks_in(journey.owned.local(rank), boxes):
            seen += [matrix.clone() for matrix in matrix_view(buffer, stack)]
            matrix_view(buffer, stack).neg_()
    expected = sorted(of(whole, box).flatten().tolist() for box in boxes)
    assert sorted(matrix.flatten().tolist() for matrix in seen) == expected
    moved(journey.back, owned, parts)
    back = torch.zeros(shape)
    for part, region in zip(parts, regions, strict=True):
        unpack(part, region, back)
    assert torch.equal(back, -whole)
    # What was whole on a rank stays there: only cut matrices are on the wire.
    wire = sum(journey.wire_bytes(rank, (4, 2)) for rank in range(len(regions)))
    assert wire <= 6 * sum(box.numel for box in split)


def moved(plan: object, sources: list[Tensor], destinations: list[Tensor]) -> None:
    for rank, destination in enumerate(destinations):
        for move in plan.receives(rank):  # type: ignore[attr-defined]
            move.destination_view(destination).copy_(move.source_view(sources[move.source]))


@given(st.data())
def test_axes_in_the_meshs_order_hold_the_same(data: st.DataObject) -> None:
    layout = Layout.whole((4, 6))
    names = data.draw(st.permutations(["dp_shard", "tp", "cp"]))
    sizes = {"dp_shard": 2, "tp": 3, "cp": 1}
    for name in names:
        dimension, size = (0, 2) if name == "dp_shard" else (1, 3)
        if sizes[name] == 1:
            layout = layout.replicate(name, 1)
            continue
        regions = [tuple(_part(box, dimension, size, index) for box in region) for region in layout.regions for index in range(size)]
        layout = layout.cut(name, regions)
    ordered = cut_axes("w", layout)
    assert [name for name, _ in ordered.axes] == ["dp_shard", "tp"]
    for rank in range(layout.ranks):
        coordinates = dict(zip((name for name, _ in layout.axes), layout.coordinates(rank), strict=True))
        assert ordered.local(coordinates["dp_shard"] * 3 + coordinates["tp"]) == layout.local(rank)


def _part(box: Box, dimension: int, size: int, index: int) -> Box:
    length = box.size[dimension] // size
    start, shape = list(box.start), list(box.size)
    start[dimension] += index * length
    shape[dimension] = length
    return Box(tuple(start), tuple(shape))


@given(matrices())
def test_merged_boxes_are_the_same_storage(made: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = made
    whole = numbered(shape)
    apart, joined = torch.zeros(whole.numel()), torch.zeros(whole.numel())
    pack(whole, tuple(boxes), apart)
    pack(whole, merged(boxes), joined)
    assert torch.equal(apart, joined)
