"""Conformance of placements. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestDiagonal(PlacementConformance):
        entry = "my-distribution:diagonal"

The promises are those of `intarsia.contracts.Placement`. What is stored where is painted element by element into numpy arrays,
so that the kit does not rest on the box arithmetic that it checks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import hypothesis
import numpy as np
from hypothesis import strategies as st
from intarsia.contracts import Box, Member, Partition, Placement, Region
from intarsia.errors import UsageError
from intarsia.layout import Layout, range_boxes, slices
from intarsia.plugins import current
from intarsia_placements.layouts import build_layouts
from intarsia_transfer import Transfer, transfer

from intarsia_testing.base import Conformance
from intarsia_testing.layout import layout_from_json, pack, unpack
from intarsia_testing.promise import broken
from intarsia_testing.strategies import buckets, example_settings, worlds

AWKWARD = (
    Member("scalar", ()),
    Member("empty", (0,)),
    Member("empty.matrix", (3, 0)),
    Member("one", (1,)),
    Member("vector", (7,), cost=5.0),
    Member("matrix", (5, 3)),
    Member("tiled", (9, 6), tile=(4, 4)),
    Member("whole.tile", (3, 3), tile=(8, 8)),
    Member("experts", (2, 3, 4), tile=(1, 2, 2)),
    Member("kernel", (2, 1, 3, 3)),
)
"""A bucket of what placements get wrong: nothing to cut, less than there are ranks, sizes that do not divide, tiles larger than the member."""

BUCKETS = (AWKWARD, *((member,) for member in AWKWARD))
"""That bucket, and its members alone: a placement may refuse some of them, and cuts a lone member elsewhere."""


def values_of(member: Member) -> np.ndarray[Any, Any]:
    """A tensor of the member's shape in which every element differs."""
    return np.arange(1, member.numel + 1, dtype=np.int64).reshape(member.shape)


def scatter(full: np.ndarray[Any, Any], layout: Layout) -> list[np.ndarray[Any, Any]]:
    """Every rank's local 1-D buffer of `full` under `layout`, straight from the regions."""
    locals_ = [np.full(layout.numel(rank), -1, full.dtype) for rank in range(layout.ranks)]
    for rank, local in enumerate(locals_):
        pack(full, layout.local(rank), local)
    return locals_


def gather(locals_: Sequence[np.ndarray[Any, Any]], layout: Layout) -> np.ndarray[Any, Any]:
    """The whole tensor from the primaries; -1 where there is none."""
    full = np.full(layout.shape, -1, np.int64)
    for rank, local in enumerate(locals_):
        if layout.primary(rank):
            unpack(local, layout.primary(rank), full)
    return full


def carry_out(plan: Transfer, locals_: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """A transfer in one process on numpy arrays."""
    results = [np.full(plan.dst.numel(rank), -1, np.int64) for rank in range(plan.dst.ranks)]
    for rank, result in enumerate(results):
        for move in plan.receives(rank):
            target = move.destination_view(result)
            if move.op == "zero":
                target[...] = 0
                continue
            data = move.source_view(locals_[move.source])
            if move.op == "copy":
                target[...] = data
            elif move.op == "sum":
                target += data
            else:
                np.maximum(target, data, out=target)
    return results


def generator_states() -> tuple[Any, ...]:
    """The states of the global random generators."""
    _, key, *position = np.random.get_state()
    return random.getstate(), np.asarray(key).tobytes(), position


def paint(member: Member, regions: Sequence[Region]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """For every element how many ranks store it, and the last of them (-1: none)."""
    count, owner = np.zeros(member.shape, np.int64), np.full(member.shape, -1, np.int64)
    for rank, region in enumerate(regions):
        for box in region:
            count[slices(box)] += 1
            owner[slices(box)] = rank
    return count, owner


def cut_tile(member: Member, owner: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """The first index of the first tile whose elements have several owners, or None."""
    if member.tile is None or not member.numel:
        return None
    low = high = owner
    for axis, size in enumerate(member.tile):
        borders = np.arange(0, owner.shape[axis], size)
        low, high = np.minimum.reduceat(low, borders, axis=axis), np.maximum.reduceat(high, borders, axis=axis)
    where = np.argwhere(low != high)
    return tuple(int(index) * size for index, size in zip(where[0], member.tile, strict=True)) if len(where) else None


class RangesPlacement:
    """The kit's own: cuts every member into ranges of its elements in storage order, which leaves several boxes on a rank wherever it can."""

    name = "ranges"
    accepts: Literal["box", "region"] = "region"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """Borders at r * n / R, moved down to whole rows of tiles."""
        regions = []
        for member in members:
            unit = member.tile[0] * math.prod(member.shape[1:]) if member.tile else 1
            borders = [rank * member.numel // ranks // max(unit, 1) * unit for rank in range(ranks)] + [member.numel]
            regions.append(tuple(range_boxes(Box.whole(member.shape), begin, end - begin) for begin, end in itertools.pairwise(borders)))
        return Partition(tuple(members), ranks, tuple(regions))


class PlacementConformance(Conformance):
    """Every promise of `intarsia.contracts.Placement`, one test each.

    Set `entry`, and `config` or `configs` where the default settings are not all that should be tested; or set `placement` to an object that no
    entry offers. Set `bucket` to another strategy of member tuples where the placement refuses most shapes (a refusal is a UsageError that names the
    member). `max_examples` bounds the time.
    """

    kind: ClassVar[str] = "placement"
    placement: ClassVar[Placement | None] = None
    bucket: ClassVar[st.SearchStrategy[tuple[Member, ...]]] = buckets(max_members=4, max_size=9)
    max_examples: ClassVar[int] = 30

    # ------------------------------------------------------------ what is tested

    def placements(self) -> list[Placement]:
        """Freshly built placements under test."""
        if self.placement is not None:
            return [self.placement]
        return [current().build(config) for config in self.given_configs()]

    def installed(self) -> list[Placement]:
        """One of each installed placement whose settings all have defaults, those under test, and the kit's own."""
        found: list[Placement] = [*self.placements(), RangesPlacement()]
        for entry in current().registry("placement").entries():
            config_class = current().config_class(entry)
            try:
                config = config_class()
            except TypeError:  # a setting without a default: nobody but its own conformance test can choose one
                continue
            found.append(current().build(config))
        return found

    def cut(self, placement: Placement, members: Sequence[Member], ranks: int) -> Partition | None:
        """The placement's answer, checked to be one; None for a refusal, which is checked to name a member."""
        try:
            partition = placement.partition(members, ranks)
        except UsageError as error:
            if not any(member.name in str(error) for member in members):
                broken("refusals name the member", f"{placement.name} refuses a bucket without saying which member: {error}")
            return None
        except Exception as error:
            what = f"{placement.name} raises {type(error).__name__} ({error}) for {list(members)} over {ranks} ranks"
            broken("any bucket is cut, or refused by UsageError", f"{what}.")
        if not isinstance(partition, Partition):
            broken("answers what was asked", f"{placement.name} returns {partition!r}, which is no Partition.")
        if partition.members != tuple(members) or partition.ranks != ranks:
            broken("answers what was asked", f"the Partition of {placement.name} is about other members or ranks than it was asked for.")
        if len(partition.regions) != len(members) or any(len(row) != ranks for row in partition.regions):
            broken("answers what was asked", f"{placement.name} must give a row for each member, and in it a region for each rank.")
        return partition

    def for_each_cut(self, check: Callable[[Placement, Partition], None]) -> None:
        """Run `check` on the awkward bucket over 1 to 9 ranks and on drawn buckets, for each placement under test."""
        placements = self.placements()
        for placement, ranks in itertools.product(placements, range(1, 10)):
            for members in BUCKETS:
                partition = self.cut(placement, members, ranks)
                if partition is not None:
                    check(placement, partition)

        @example_settings(self.max_examples * len(placements))
        @hypothesis.given(members=self.bucket, ranks=worlds(), placement=st.sampled_from(placements))
        def drawn(members: tuple[Member, ...], ranks: int, placement: Placement) -> None:
            partition = self.cut(placement, members, ranks)
            hypothesis.assume(partition is not None)
            if partition is not None:
                check(placement, partition)

        drawn()

    def for_each_member(self, check: Callable[[Member, Partition, Sequence[Region], str], None]) -> None:
        """Run `check` on each member of such cuts, with its regions and with words that say what was cut how."""

        def check_members(placement: Placement, partition: Partition) -> None:
            for member, regions in zip(partition.members, partition.regions, strict=True):
                words = f"{placement.name} cuts member {member.name!r} of shape {member.shape} over {partition.ranks} ranks"
                check(member, partition, regions, words)

        self.for_each_cut(check_members)

    # ------------------------------------------------------------ promises about the object

    def test_it_says_what_it_is(self) -> None:
        """`name` is text for messages, `accepts` is "box" or "region", `partition` is there."""
        for placement in self.placements():
            if not isinstance(placement, Placement):
                broken("says what it is", f"{placement!r} lacks one of `name`, `accepts`, `partition`.")
            if not isinstance(placement.name, str) or not placement.name:
                broken("says what it is", f"the name of {placement!r} is {placement.name!r}; it must be text for messages.")
            if placement.accepts not in ("box", "region"):
                broken("says what it is", f"{placement.name} accepts {placement.accepts!r}; it must be 'box' or 'region'.")

    def test_it_is_deterministic_and_pure(self) -> None:
        """Equal questions get equal answers, from another object too; neither the question nor a random generator is touched."""
        others = {placement.name: placement for placement in self.placements()}

        def check(placement: Placement, partition: Partition) -> None:
            members, before = list(partition.members), generator_states()
            again = placement.partition(members, partition.ranks)
            if generator_states() != before:
                broken("pure", f"{placement.name} draws from a global random generator.")
            if members != list(partition.members):
                broken("pure", f"{placement.name} changes the list of members that it is given.")
            words = f"over {partition.ranks} ranks for {members}"
            if again != partition:
                broken("deterministic", f"{placement.name} gives two answers {words}.")
            if others[placement.name].partition(tuple(members), partition.ranks) != partition:
                broken("deterministic", f"two objects of {placement.name} with the same settings give two answers {words}.")

        self.for_each_cut(check)

    def test_names_change_nothing_where_it_says_so(self) -> None:
        """Where `by_shape` is true: members of other names, in another order of the alphabet, are cut alike."""

        def check(placement: Placement, partition: Partition) -> None:
            if not getattr(placement, "by_shape", False):
                return
            count = len(partition.members)
            members = [dataclasses.replace(member, name=f"z{count - number:04}") for number, member in enumerate(partition.members)]
            if placement.partition(members, partition.ranks).regions != partition.regions:
                words = f"over {partition.ranks} ranks for {list(partition.members)}"
                broken("names change nothing", f"{placement.name} says `by_shape`, and cuts members of other names otherwise {words}.")

        self.for_each_cut(check)

    def test_it_balances_without_breaking_a_promise(self) -> None:
        """Where there is a `partition_balanced`: without loads it is `partition`, with any loads a sound cut, the same each time."""

        def check(placement: Placement, partition: Partition) -> None:
            balanced = getattr(placement, "partition_balanced", None)
            if balanced is None:
                return
            members, ranks = partition.members, partition.ranks
            words = f"{placement.name} over {ranks} ranks for {list(members)}"
            if balanced(members, ranks, [0.0] * ranks) != partition:
                broken("balanced without loads is `partition`", f"{words} answers otherwise.")
            loads = [float(rank * 7 % 5) for rank in range(ranks)]
            given = list(loads)
            answer = balanced(members, ranks, given)
            if given != loads:
                broken("pure", f"{placement.name} changes the loads that it is given.")
            if answer != balanced(members, ranks, loads) or answer.members != members or answer.ranks != ranks:
                broken("deterministic", f"{words} with the loads {loads} answers twice, or about something else.")
            for member, regions in zip(answer.members, answer.regions, strict=True):
                count, owner = paint(member, regions)
                if (count != (ranks if answer.replicated else 1)).any() or cut_tile(member, owner) is not None:
                    broken(
                        "balanced cuts are sound",
                        f"{words} with the loads {loads}: {member.name!r} is not stored once, or a tile of it is cut.",
                    )

        self.for_each_cut(check)

    # ------------------------------------------------------------ promises about the regions

    def test_boxes_are_inside_and_not_empty(self) -> None:
        """Boxes have the member's rank, lie inside its shape, and have elements."""

        def check(member: Member, partition: Partition, regions: Sequence[Region], words: str) -> None:
            for rank, box in ((rank, box) for rank, region in enumerate(regions) for box in region):
                words = f"{words} and gives rank {rank} the box of start {box.start} and size {box.size}"
                if len(box.start) != len(member.shape) or len(box.size) != len(member.shape):
                    broken("boxes have the member's rank", f"{words}.")
                if any(size <= 0 for size in box.size):
                    broken("no box is empty", f"{words}; an empty region is an empty tuple.")
                if any(a < 0 or a + n > whole for a, n, whole in zip(box.start, box.size, member.shape, strict=True)):
                    broken("boxes lie inside the shape", f"{words}.")

        self.for_each_member(check)

    def test_regions_are_disjoint(self) -> None:
        """No two ranks store the same element, unless all store everything; no rank stores one twice."""

        def check(member: Member, partition: Partition, regions: Sequence[Region], words: str) -> None:
            for group in [[region] for region in regions] if partition.replicated else [regions]:
                twice = np.argwhere(paint(member, group)[0] > 1)
                if len(twice):
                    broken("disjoint", f"{words}, and element {tuple(map(int, twice[0]))} is stored more than once.")

        self.for_each_member(check)

    def test_regions_cover(self) -> None:
        """Every element is stored by some rank, and by all ranks where the partition is replicated."""

        def check(member: Member, partition: Partition, regions: Sequence[Region], words: str) -> None:
            for group in [[region] for region in regions] if partition.replicated else [regions]:
                missing = np.argwhere(paint(member, group)[0] == 0)
                if len(missing):
                    broken("covering", f"{words}, and element {tuple(map(int, missing[0]))} is missing.")

        self.for_each_member(check)

    def test_tiles_are_whole(self) -> None:
        """No tile of a member, counted from its origin, is shared by two ranks."""

        def check(member: Member, partition: Partition, regions: Sequence[Region], words: str) -> None:
            cut = cut_tile(member, paint(member, regions)[1])
            if cut is not None:
                broken("tiles stay whole", f"{words}, and the tile of {member.tile} at {cut} has elements on several ranks.")

        self.for_each_member(check)

    # ------------------------------------------------------------ what follows from the regions

    def for_each_layout(self, check: Callable[[Member, Layout, str], None]) -> None:
        """Run `check` on the layout of each member of such cuts."""

        def check_layouts(placement: Placement, partition: Partition) -> None:
            layouts = build_layouts(partition.members, [("ranks", partition.ranks, placement)])
            for member in partition.members:
                check(member, layouts[member.name], f"{placement.name} over {partition.ranks} ranks, {member}")

        self.for_each_cut(check_layouts)

    def test_reconstruct_is_identity(self) -> None:
        """Cutting a tensor into the ranks' local buffers and putting the primaries back gives the tensor."""

        def check(member: Member, layout: Layout, words: str) -> None:
            full = values_of(member)
            if not np.array_equal(gather(scatter(full, layout), layout), full):
                broken("reconstruct(partition(x)) = x", f"{words}: elements are lost or misplaced.")

        self.for_each_layout(check)

    def test_layouts_survive_json(self) -> None:
        """A layout written as JSON and read back is the same layout."""

        def check(member: Member, layout: Layout, words: str) -> None:
            if layout_from_json(json.loads(json.dumps(layout.to_json()))) != layout:
                broken("JSON round trip", f"{words}: the layout changes when written and read.")

        self.for_each_layout(check)

    def test_norms_count_each_element_once(self) -> None:
        """The sum of squares and the maximum over the primaries of all ranks are those of the tensor."""

        def check(member: Member, layout: Layout, words: str) -> None:
            full = values_of(member)
            locals_ = [local for rank, local in enumerate(scatter(full, layout)) if layout.primary(rank)]
            squares, largest = sum(int((local**2).sum()) for local in locals_), max((int(local.max()) for local in locals_), default=0)
            if (squares, largest) != (int((full**2).sum()), int(full.max(initial=0))):
                broken("norms count each element once", f"{words}: the norm over primaries differs from the tensor's.")

        self.for_each_layout(check)

    def test_converts_to_every_installed_placement(self) -> None:
        """Moving a tensor between this placement and any installed one, at any numbers of ranks, gives what cutting it there gives."""
        pairs = list(itertools.product(self.placements(), self.installed()))

        def check(members: Sequence[Member], sizes: tuple[int, int], pair: tuple[Placement, Placement]) -> bool:
            if None in [self.cut(placement, members, size) for placement, size in zip(pair, sizes, strict=True)]:
                return False
            here, there = (build_layouts(members, [("ranks", size, placement)]) for placement, size in zip(pair, sizes, strict=True))
            for member in members:
                for src, dst in ((here, there), (there, here)):
                    check_conversion(member, src[member.name], dst[member.name], f"between {pair[0].name} and {pair[1].name}")
            return True

        self.for_each_pair(pairs, check)

    def test_composes_with_every_installed_placement(self) -> None:
        """Outside and inside any installed placement it either gives a disjoint cover without a cut tile, or is refused with both names."""
        pairs = [pair for here, other in itertools.product(self.placements(), self.installed()) for pair in ((here, other), (other, here))]

        def check(members: Sequence[Member], sizes: tuple[int, int], pair: tuple[Placement, Placement]) -> bool:
            layouts = compose(members, list(zip(("outer", "inner"), sizes, pair, strict=True)))
            for member in members if layouts else ():
                check_primaries(member, layouts[member.name], f"{pair[1].name} inside {pair[0].name}")
            return bool(layouts)

        self.for_each_pair(pairs, check)

    def for_each_pair(self, pairs: Sequence[tuple[Placement, Placement]], check: Callable[..., bool]) -> None:
        """Run `check(members, sizes, pair)`, which is false for a refusal, on the awkward bucket and on drawn ones."""
        for pair, sizes in itertools.product(pairs, ((2, 3), (3, 2))):
            for members in BUCKETS:
                check(members, sizes, pair)

        @example_settings(self.max_examples * 2)
        @hypothesis.given(members=self.bucket, sizes=st.tuples(worlds(), worlds()), pair=st.sampled_from(pairs))
        def drawn(members: tuple[Member, ...], sizes: tuple[int, int], pair: tuple[Placement, Placement]) -> None:
            hypothesis.assume(check(members, sizes, pair))

        drawn()


def compose(members: Sequence[Member], steps: Sequence[tuple[str, int, Placement]]) -> dict[str, Layout]:
    """The layouts of a bucket, or {} where the composition is refused, which is checked to name the member and the placements."""
    try:
        return build_layouts(members, steps)
    except UsageError as error:
        refusal = str(error)
    except Exception as error:
        names = " inside ".join(placement.name for _, _, placement in reversed(steps))
        broken("compositions are cut, or refused by UsageError", f"{names} raises {type(error).__name__} ({error}) for {list(members)}.")
    axis, _, inner = steps[-1]
    what = f"{inner.name} on axis {axis!r} inside {[outer.name for _, _, outer in steps[:-1]]} is refused by: {refusal}"
    if not any(member.name in refusal for member in members):
        broken("refusals name the member", what)
    if not any(placement.name in refusal for _, _, placement in steps):
        broken("refusals name the placements", what)
    if "cuts one box only" in refusal:
        if inner.accepts != "box" and len(steps) == 2:
            broken("accepts what it claims", what)
        cutting = [outer for _, _, outer in steps[:-1] if outer.name in refusal]
        if len(steps) == 2 and (inner.name not in refusal or not cutting):
            broken("refusals name the placements", what)
    return {}


def check_primaries(member: Member, layout: Layout, words: str) -> None:
    """Primaries are disjoint and cover, and no tile is cut."""
    count, owner = paint(member, [layout.primary(rank) for rank in range(layout.ranks)])
    if (count != 1).any():
        broken(
            "primaries are disjoint and cover",
            f"{words}, {member}: element {tuple(map(int, np.argwhere(count != 1)[0]))} is not stored once.",
        )
    cut = cut_tile(member, owner)
    if cut is not None:
        broken("tiles stay whole", f"{words}, {member}: the tile at {cut} has elements on several ranks.")


def check_conversion(member: Member, src: Layout, dst: Layout, words: str) -> None:
    """Moving a tensor from `src` to `dst` gives what cutting it by `dst` gives, and what the ranks send is what the ranks take."""
    full = values_of(member)
    plan = transfer(src, dst)
    if not all(map(np.array_equal, carry_out(plan, scatter(full, src)), scatter(full, dst))):
        broken("converts to any other placement", f"{words}, {member}: elements are lost or misplaced on the way.")
    # Stable sorts: what matters is the order of the moves between each two ranks.
    taken = sorted((move for rank in range(plan.ranks) for move in plan.receives(rank)), key=lambda move: (move.source, move.destination))
    given = sorted((move for rank in range(plan.ranks) for move in plan.sends(rank)), key=lambda move: (move.source, move.destination))
    if [move for move in taken if move.op != "zero"] != given:
        broken("converts to any other placement", f"{words}, {member}: what the ranks send is not what the ranks take.")
