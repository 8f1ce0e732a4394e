"""Save at one world, load at another: every placement, awkward sizes, worlds 1 to 8, mesh axes of two kinds."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.checkpoint.manifest import TensorRecord
from intarsia.checkpoint.planning import READ_BYTES, SKIP_BYTES, plan_reads
from intarsia.contracts import Box, Member, Piece, StateItem
from intarsia.errors import UsageError
from intarsia.layout import Layout, region_numel
from intarsia.mesh import coordinates, full_sizes
from intarsia.plugins import current
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_placements.config import Block, Column, Flat, Mixed, MixedRule, Owned, Replicate, Row
from intarsia_placements.layouts import build_layouts
from intarsia_testing.communicator import run_ranks
from intarsia_testing.doubles import MemoryStorage
from intarsia_testing.layout import pack
from intarsia_testing.stateful import Holder, OverStorage, tensor_item

SHAPES = {"m1": (1,), "m5": (5,), "m7": (7, 3), "m0": (0, 4), "scalar": (), "m57": (5, 7), "m751": (7, 5, 1)}
WHOLE = {
    name: torch.arange(1, 1 + max(1, torch.Size(shape).numel())).float()[: torch.Size(shape).numel()].view(shape)
    for name, shape in SHAPES.items()
}

Steps = list[tuple[str, int, Any]]


def layouts_of(steps: Steps) -> dict[str, Layout]:
    """Layouts of the test tensors; those that a placement refuses alone are replicated."""
    found = {}
    for name, shape in SHAPES.items():
        member = Member(name, shape)
        try:
            found |= build_layouts([member], steps)
        except UsageError:
            found |= build_layouts([member], [(axis, size, "replicate") for axis, size, _ in steps])
    return found


def holder(layouts: dict[str, Layout], rank: int, filled: bool) -> Holder:
    """A rank's shards, right or of -1."""
    items = []
    for name, layout in layouts.items():
        region = layout.local(rank)
        local = torch.full((region_numel(region),), -1.0)
        if filled:
            pack(WHOLE[name], region, local)
        items.append(tensor_item(name, local, layout))
    return Holder(*items, StateItem("a", "n", "replicated", 3))


def mesh_of(steps: Steps) -> dict[str, int]:
    """The mesh whose ranks the steps' axes are."""
    sizes = {axis: size for axis, size, _ in steps}
    return sizes if "ep" not in sizes else {"dp_shard": sizes["ep"] * sizes["ep_shard"], "ep": sizes["ep"]}


def place(steps: Steps, rank: int) -> int:
    """A process's rank in the layouts, which cut in the order of the steps, whatever the order of the mesh's axes."""
    index, places = 0, coordinates(full_sizes(mesh_of(steps)), rank)
    for axis, size, _ in steps:
        index = index * size + places[axis]
    return index


def save(storage: MemoryStorage, steps: Steps) -> None:
    """One save by as many ranks as the steps say."""
    layouts = layouts_of(steps)

    def work(comm: Any) -> None:
        manager = OverStorage(storage, comm, {"mesh": mesh_of(steps)})
        manager.save(1, [holder(layouts, place(steps, comm.rank), True)])
        manager.wait()
        manager.close()

    run_ranks(next(iter(layouts.values())).ranks, work)


def check_load(storage: MemoryStorage, steps: Steps) -> None:
    """Load by as many ranks as the steps say, and compare every shard."""
    layouts = layouts_of(steps)

    def work(comm: Any) -> None:
        manager = OverStorage(storage, comm, {"mesh": mesh_of(steps)})
        ref = manager.latest(verify=False)
        assert ref is not None
        own, want = holder(layouts, place(steps, comm.rank), False), holder(layouts, place(steps, comm.rank), True)
        manager.load(ref, [own], verify=False)
        for item, expected in zip(own.items[:-1], want.items[:-1], strict=True):
            assert torch.equal(item.value, expected.value), (item.name, comm.rank, steps)

    run_ranks(next(iter(layouts.values())).ranks, work)


def placements() -> list[Any]:
    """One of each first-party placement."""
    mixed = Mixed(rules=(MixedRule(match="*t*", placement=Owned()),), default=Flat(unit=1))
    return [current().build(config) for config in (Row(), Column(), Flat(unit=1), Owned(), Block(tile=(2, 2)), Replicate(), mixed)]


@pytest.mark.parametrize("name", ["row", "column", "flat", "owned", "block", "replicate", "mixed"])
def test_any_world_loads_what_any_other_saved(name: str) -> None:
    placement = dict(zip(("row", "column", "flat", "owned", "block", "replicate", "mixed"), placements(), strict=True))[name]
    choice = random.Random(name)
    for world in range(1, 9):
        storage = MemoryStorage()
        save(storage, [("dp_shard", world, placement)])
        opened = open_checkpoint("", storage)
        for key, whole in WHOLE.items():
            assert torch.equal(opened.read(f"model/{key}"), whole)
        check_load(storage, [("dp_shard", choice.randint(1, 8), placement)])
        check_load(storage, [("dp_shard", choice.randint(1, 8), choice.choice(placements()))])


def test_composed_axes_and_replicas() -> None:
    row, column, flat, owned, *_ = placements()
    meshes: list[Steps] = [
        [("tp", 2, row), ("dp_shard", 3, flat)],
        [("dp_replicate", 2, "replicate"), ("dp_shard", 2, row), ("tp", 2, column)],
        [("dp_shard", 4, owned)],
        [("ep", 2, row), ("ep_shard", 2, flat)],
        [("dp_shard", 1, row)],
    ]
    for source in meshes:
        storage = MemoryStorage()
        save(storage, source)
        for target in meshes:
            check_load(storage, target)


def test_a_layout_may_leave_out_axes_of_the_mesh() -> None:
    row = placements()[0]
    storage = MemoryStorage()
    layouts = layouts_of([("dp_shard", 2, row)])

    def work(comm: Any) -> int:
        manager = OverStorage(storage, comm, {"mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}})
        manager.save(1, [holder(layouts, comm.rank // 2 % 2, True)])
        manager.wait()
        return 0

    run_ranks(8, work)
    check_load(storage, [("dp_shard", 3, row)])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_reads_cover_exactly_and_lie_inside(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))

    def box() -> Box:
        starts = [data.draw(st.integers(0, n - 1)) for n in shape]
        return Box(tuple(starts), tuple(data.draw(st.integers(1, n - a)) for a, n in zip(starts, shape, strict=True)))

    stored, want = box(), box()
    record = TensorRecord("m", "w", "tensor", 1, shape, "float32", (Piece("m/w", stored.start, stored.size, "f", 100, stored.numel * 4),))
    elements = torch.arange(torch.Size(shape).numel()).view(shape)
    held = elements[tuple(slice(a, b) for a, b in zip(stored.start, stored.end, strict=True))].reshape(-1)
    got: list[int] = []
    for read in plan_reads(record, (want,)):
        piece = read.piece
        assert (
            piece.offset >= 100
            and piece.offset + piece.length <= 100 + stored.numel * 4
            and piece.length == 4 * Box(piece.box_start, piece.box_size).numel
        )
        first = (piece.offset - 100) // 4
        bytes_say = held[first : first + piece.length // 4].view(piece.box_size)
        assert torch.equal(bytes_say, elements[tuple(slice(a, a + n) for a, n in zip(piece.box_start, piece.box_size, strict=True))])
        got += elements[tuple(slice(a, b) for a, b in zip(read.want.start, read.want.end, strict=True))].reshape(-1).tolist()
    common = stored.intersect(want)
    expected = elements[tuple(slice(a, b) for a, b in zip(common.start, common.end, strict=True))].reshape(-1).tolist() if common else []
    assert sorted(got) == sorted(expected)


def test_large_reads_are_cut_and_wide_gaps_skipped() -> None:
    def reads(shape: tuple[int, int], want: Box) -> list[Piece]:
        whole = Piece("m/w", (0, 0), shape, "f", 0, shape[0] * shape[1])
        return [read.piece for read in plan_reads(TensorRecord("m", "w", "tensor", 1, shape, "uint8", (whole,)), (want,))]

    large = reads((1 << 10, 1 << 20), Box((0, 0), (1 << 10, 1 << 20)))
    assert sum(piece.length for piece in large) == 1 << 30 and max(piece.length for piece in large) <= READ_BYTES
    narrow = reads((5000, SKIP_BYTES * 2), Box((0, 0), (5000, 10)))
    assert len(narrow) == 5000 and {piece.length for piece in narrow} == {10}
    assert len(reads((64, 100), Box((0, 0), (64, 10)))) == 1


def test_the_fake_placements_are_all_tested() -> None:
    names = {entry.name for entry in current().registry("placement").entries() if entry.owner == "intarsia-placements"}
    assert names == {"row", "column", "flat", "owned", "block", "replicate", "mixed"}
    assert len(list(itertools.chain(placements()))) == len(names)
