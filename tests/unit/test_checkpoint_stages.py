"""Checkpoints of pipelines: state that some ranks have and others have not, copies of tied tensors, and what moves to other meshes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from intarsia.contracts import Box, StateItem
from intarsia.errors import CheckpointError
from intarsia.layout import Layout
from intarsia.mesh import coordinates, full_sizes
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_testing.communicator import run_ranks
from intarsia_testing.doubles import MemoryStorage
from intarsia_testing.stateful import Holder, OverStorage

PIPELINE = {"pp": 2, "dp_shard": 2, "tp": 2}
PLAIN = {"dp_shard": 2}
ONE: dict[str, int] = {}
VALUES = {name: torch.arange(8.0) + 100 * number for number, name in enumerate(("embedding", "first", "second", "moment"))}


def items_of(mesh: dict[str, int], rank: int, filled: bool = True) -> list[StateItem]:
    """A model of two blocks with an embedding that the last stage reads too: outermost cut over tp, then over dp_shard."""
    places = coordinates(full_sizes(mesh), rank)
    stages = mesh.get("pp", 1)
    axes = [(axis, mesh[axis]) for axis in ("tp", "dp_shard") if mesh.get(axis, 1) > 1]
    layout, piece, index, count = Layout.whole((8,)), 8, 0, 1
    for axis, size in axes:
        piece, index, count = piece // size, index * size + places[axis], count * size
        layout = layout.cut(axis, [(Box((piece * n,), (piece,)),) for n in range(count)])

    def tensor(owner: str, name: str, values: str, is_copy: bool = False) -> StateItem:
        local = VALUES[values][index * piece :][:piece].clone() if filled else torch.full((piece,), -1.0)
        return StateItem(owner, name, "tensor", local, layout, is_copy=is_copy)

    found = [StateItem("train", "progress", "replicated", {"step": 3}), StateItem("random", "seed", "rank", rank)]
    found += [StateItem("data", "table", "replicated", torch.ones(2))]
    for stage, name in enumerate(("first", "second")):
        if stages == 1 or places["pp"] == stage:
            found += [tensor("model", name, name), tensor("optimizer", f"{name}/moment", "moment")]
            found += [StateItem("optimizer", f"{name}/step", "replicated", torch.full((), 7.0) if filled else torch.zeros(()))]
            found += [
                StateItem("model", f"{name}.bias", "replicated", torch.full((3,), float(stage)) if filled else torch.full((3,), -1.0))
            ]
    return [*found, tensor("model", "embedding", "embedding", is_copy=stages > 1 and places["pp"] == 1)]


def save(mesh: dict[str, int], change: Any = lambda rank, items: items) -> MemoryStorage:
    storage = MemoryStorage()

    def work(comm: Any) -> None:
        manager = OverStorage(storage, comm, {"mesh": mesh})
        manager.save(1, [Holder(*change(comm.rank, items_of(mesh, comm.rank)))])
        manager.wait()
        manager.close()

    run_ranks(size_of(mesh), work)
    return storage


def size_of(mesh: dict[str, int]) -> int:
    return mesh.get("pp", 1) * mesh.get("dp_shard", 1) * mesh.get("tp", 1)


def check_load(storage: MemoryStorage, mesh: dict[str, int]) -> None:
    def work(comm: Any) -> None:
        manager = OverStorage(storage, comm, {"mesh": mesh})
        ref = manager.latest()
        assert ref is not None
        own = Holder(*items_of(mesh, comm.rank, filled=False))
        manager.load(ref, [own])
        assert own.loaded is not None
        for wanted, item in zip(items_of(mesh, comm.rank), own.items, strict=True):
            value = item.value if item.kind == "tensor" else own.loaded.get(item.name)
            if isinstance(wanted.value, torch.Tensor):
                assert torch.equal(value, wanted.value), (item.key, comm.rank)

    run_ranks(size_of(mesh), work)


@pytest.mark.parametrize("source", [PIPELINE, PLAIN, ONE], ids=["pipeline", "plain", "one"])
@pytest.mark.parametrize("target", [PIPELINE, {"pp": 2}, PLAIN, ONE], ids=["pipeline", "stages", "plain", "one"])
def test_state_moves_between_pipelines_and_other_meshes(source: dict[str, int], target: dict[str, int]) -> None:
    check_load(save(source), target)


def test_every_tensor_is_written_once_and_whole() -> None:
    opened = open_checkpoint("", save(PIPELINE))
    for name in ("embedding", "first", "second"):
        assert torch.equal(opened.read(f"model/{name}"), VALUES[name])
        boxes = [(piece.box_start, piece.box_size) for piece in opened.manifest.tensors[f"model/{name}"].pieces]
        assert sorted(boxes) == [((start,), (2,)) for start in (0, 2, 4, 6)]
    assert opened.read("model/second.bias").tolist() == [1.0] * 3
    assert len(opened.manifest.tensors["data/table"].pieces) == 1


def test_both_stages_writing_one_tensor_is_an_error() -> None:
    def change(rank: int, items: list[StateItem]) -> list[StateItem]:
        return [dataclasses.replace(item, is_copy=False) for item in items]

    with pytest.raises(CheckpointError, match=r"'model/embedding'.*overlap"):
        save(PIPELINE, change)


def test_what_one_rank_of_a_stage_lacks_is_an_error() -> None:
    def change(rank: int, items: list[StateItem]) -> list[StateItem]:
        return [item for item in items if rank != 6 or item.name != "second.bias"]

    with pytest.raises(
        CheckpointError, match=r"'model/second.bias' of kind replicated must be on all ranks; rank 4 has it, rank 6 has not"
    ):
        save(PIPELINE, change)


def test_what_no_stage_takes_is_an_error_on_all() -> None:
    storage = save(PLAIN)

    def work(comm: Any) -> str:
        manager = OverStorage(storage, comm, {"mesh": {"pp": 2}})
        own = [item for item in items_of({"pp": 2}, comm.rank) if item.name != "second"]
        ref = manager.latest()
        assert ref is not None
        with pytest.raises(CheckpointError) as caught:
            manager.load(ref, [Holder(*own)])
        return str(caught.value)

    for text in run_ranks(2, work):
        assert "1 only in the checkpoint" in text and "model/second" in text
