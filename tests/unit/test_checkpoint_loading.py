"""Loading: strict by name both ways, kinds, dtypes, schema versions, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from intarsia.checkpoint import CheckpointRef, commit, compare_facts
from intarsia.contracts import Box, StateItem, Storage
from intarsia.errors import CheckpointError, IntarsiaError, PluginError, UsageError
from intarsia.layout import Layout
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_testing.communicator import run_ranks
from intarsia_testing.doubles import MemoryStorage
from intarsia_testing.stateful import Holder, OverStorage, tensor_item


def saved(*components: Holder, facts: dict[str, Any] | None = None) -> tuple[MemoryStorage, CheckpointRef]:
    """A storage with one checkpoint of the components."""
    storage = MemoryStorage()
    manager = OverStorage(storage, facts=facts)
    manager.save(1, components)
    manager.close()
    return storage, commit.scan(storage, "checkpoints")[0][0]


def load(storage: Storage, ref: CheckpointRef, *components: Holder, **options: Any) -> None:
    """Load on one process."""
    OverStorage(storage).load(ref, components, **options)


def weights(**tensors: torch.Tensor) -> Holder:
    """A component of whole tensors."""
    return Holder(*(tensor_item(name, tensor) for name, tensor in tensors.items()))


def test_a_renamed_key_is_named_on_both_sides_and_nothing_is_changed() -> None:
    storage, ref = saved(weights(wq=torch.ones(2), wk=torch.ones(2)))
    now = weights(wq=torch.zeros(2), wk_proj=torch.zeros(2))
    with pytest.raises(CheckpointError) as caught:
        load(storage, ref, now)
    text = str(caught.value)
    assert "1 missing in the checkpoint:\n  model/wk_proj  (on the other side: model/wk)" in text
    assert "1 only in the checkpoint:\n  model/wk  (on the other side: model/wk_proj)" in text
    assert now.items[0].value.tolist() == [0, 0] and now.loaded is None


def test_added_and_removed_keys_of_any_kind_and_owner_are_errors_unless_listed() -> None:
    before = Holder(StateItem("data", "cursor", "keyed", {}), StateItem("rng", "torch", "rank", 3), tensor_item("w", torch.ones(2)))
    storage, ref = saved(before)
    for index in range(3):
        fewer = Holder(*[item for place, item in enumerate(before.items) if place != index])
        with pytest.raises(CheckpointError, match=rf"1 only in the checkpoint:\n  {before.items[index].key}"):
            load(storage, ref, fewer)
        load(storage, ref, fewer, allow_unexpected=[before.items[index].key])
    more = Holder(*before.items, StateItem("extra", "x", "replicated", 1), tensor_item("v", torch.full((2,), 5.0)))
    with pytest.raises(CheckpointError, match=r"2 missing in the checkpoint:\n  extra/x\n  model/v"):
        load(storage, ref, more)
    load(storage, ref, more, allow_missing=["extra/*", "model/v"])
    assert more.loaded is not None and set(more.loaded) == {"cursor", "torch", "w"} and more.items[-1].value.tolist() == [5, 5]


def test_equal_shapes_in_another_order_are_told_apart_by_name() -> None:
    storage, ref = saved(weights(a=torch.tensor([1.0]), b=torch.tensor([2.0])))
    now = weights(b=torch.zeros(1), a=torch.zeros(1))
    load(storage, ref, now)
    assert {item.name: item.value.item() for item in now.items} == {"a": 1, "b": 2}


def test_shapes_and_dtypes_must_fit() -> None:
    storage, ref = saved(
        weights(a=torch.ones(2, 3), b=torch.full((2,), 1.5)), Holder(StateItem("buffers", "c", "replicated", torch.ones(2)))
    )
    other = Holder(StateItem("buffers", "c", "replicated", torch.ones(3)))
    with pytest.raises(CheckpointError) as caught:
        load(storage, ref, weights(a=torch.ones(3, 2), b=torch.zeros(2, dtype=torch.bfloat16)), other)
    text = str(caught.value)
    assert "model/a: saved with shape [2, 3], wanted [3, 2]" in text
    assert "model/b: saved in float32, wanted bfloat16" in text
    assert "buffers/c: saved with shape [2], wanted [3]" in text
    now = weights(a=torch.zeros(2, 3), b=torch.zeros(2, dtype=torch.bfloat16))
    load(storage, ref, now, Holder(StateItem("buffers", "c", "replicated", torch.zeros(2))), allow_dtype=["model/b"])
    assert now.items[1].value.tolist() == [1.5, 1.5]


def test_kinds_must_fit() -> None:
    storage, ref = saved(Holder(StateItem("a", "x", "replicated", [1.0])))
    with pytest.raises(CheckpointError, match="a/x: saved as JSON, wanted as a tensor"):
        load(storage, ref, Holder(StateItem("a", "x", "replicated", torch.ones(1))))
    storage, ref = saved(Holder(StateItem("a", "x", "replicated", {"n": 1})))
    with pytest.raises(CheckpointError, match="a/x: saved as replicated, wanted as keyed"):
        load(storage, ref, Holder(StateItem("a", "x", "keyed", {})))


class Migrating(Holder):
    """Version 2 doubles what version 1 stored."""

    def migrate(self, name: str, version: int, value: Any) -> Any:
        assert version == 1
        return value * 2


def test_schema_versions() -> None:
    storage, ref = saved(Holder(StateItem("a", "x", "replicated", 21), tensor_item("w", torch.ones(3))))
    new = Migrating(StateItem("a", "x", "replicated", 0, version=2), tensor_item("w", torch.zeros(3), version=2))
    load(storage, ref, new)
    assert new.loaded is not None and new.loaded["x"] == 42 and new.items[1].value.tolist() == [2, 2, 2]
    with pytest.raises(CheckpointError, match="a/x: saved in version 1 of its schema, a is at 2 and cannot migrate"):
        load(storage, ref, Holder(*new.items))
    storage, ref = saved(Holder(StateItem("a", "x", "replicated", 21, version=3)))
    with pytest.raises(CheckpointError, match="saved in version 3 of its schema, a reads up to 2: upgrade a"):
        load(storage, ref, Migrating(StateItem("a", "x", "replicated", 0, version=2)))


def test_tensors_that_are_not_contiguous_are_saved_and_filled() -> None:
    value = torch.arange(12.0).view(3, 4)
    storage, ref = saved(weights(w=value.t()))
    now = torch.zeros(3, 4)
    load(storage, ref, weights(w=now.t()))
    assert torch.equal(now, value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (StateItem("a", "x", "replicated", {1: 2}), "keys must be strings"),
        (StateItem("a", "x", "replicated", float("nan")), "it holds nan"),
        (StateItem("a", "x", "replicated", object()), "holds a object"),
        (StateItem("a", "x", "keyed", [1]), "must be a JSON object"),
        (StateItem("a", "x", "keyed", torch.ones(1)), "must be a JSON object"),
        (StateItem("a", "x", "tensor", torch.ones(1)), "a torch tensor and a layout"),
        (StateItem("a", "x@rank3", "rank", 1), "no '@rank'"),
        (StateItem("", "x", "rank", 1), "needs an owner"),
        (StateItem("a", "x", "tensor", torch.ones(3), Layout.whole((4,))), "3 elements on rank 0, its layout gives this rank 4"),
        (StateItem("a", "x", "tensor", torch.ones(4).half(), Layout.whole((4,))), "its layout says float32"),
        (StateItem("a", "x", "tensor", torch.ones(4), Layout.whole((4,)).partial("tp", 1, "sum")), "reduction pending"),
        (StateItem("a", "x", "tensor", torch.ones(4), Layout.whole((4,), axes=[("tp", 2)])), "not axes of the mesh"),
    ],
)
def test_items_that_cannot_be_saved(item: StateItem, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        saved(Holder(item))


def test_two_items_of_one_name_are_refused() -> None:
    with pytest.raises(PluginError, match="Two state items are called 'model/w'"):
        saved(weights(w=torch.ones(1)), weights(w=torch.ones(1)))


def test_rank_state_is_exact_on_the_same_mesh_and_missing_on_another() -> None:
    storage = MemoryStorage()
    mesh = {"dp_shard": 2, "tp": 1}

    def holder(rank: int) -> Holder:
        return Holder(StateItem("rng", "torch", "rank", torch.full((3,), rank)), StateItem("rng", "python", "rank", {"rank": rank}))

    def save(comm: Any) -> None:
        manager = OverStorage(storage, comm, {"mesh": mesh})
        manager.save(1, [holder(comm.rank)])
        manager.wait()
        manager.close()

    def read(facts: dict[str, Any]) -> Any:
        def work(comm: Any) -> tuple[Any, bool]:
            manager = OverStorage(storage, comm, facts)
            ref = manager.latest()
            assert ref is not None
            own = holder(9)
            manager.load(ref, [own])
            assert own.loaded is not None
            values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in own.loaded.items()}
            return values, own.missing_rank_state

        return work

    run_ranks(2, save)
    same = [({"torch": [rank] * 3, "python": {"rank": rank}}, False) for rank in range(2)]
    assert run_ranks(2, read({"mesh": {"dp_shard": 2}})) == same
    assert run_ranks(2, read({"mesh": {"tp": 2}})) == [({}, True)] * 2
    assert run_ranks(3, read({"mesh": {"dp_shard": 3}})) == [({}, True)] * 3
    assert run_ranks(1, read({})) == [({}, True)]


def test_a_layout_without_axes_is_written_once_whatever_the_world() -> None:
    storage = MemoryStorage()

    def save(comm: Any) -> None:
        manager = OverStorage(storage, comm)
        manager.save(1, [weights(w=torch.arange(6.0))])
        manager.wait()

    run_ranks(3, save)
    opened = open_checkpoint("", storage)
    assert len(opened.manifest.tensors["model/w"].pieces) == 1 and opened.read("model/w").tolist() == [0, 1, 2, 3, 4, 5]


def test_keyed_state_is_merged_and_given_whole_to_every_rank() -> None:
    storage = MemoryStorage()

    def save(comm: Any) -> None:
        manager = OverStorage(storage, comm)
        manager.save(1, [Holder(StateItem("data", "cursor", "keyed", {"all": 1, f"file-{comm.rank}": comm.rank}))])
        manager.wait()

    def read(comm: Any) -> Any:
        manager, own = OverStorage(storage, comm), Holder(StateItem("data", "cursor", "keyed", {}))
        ref = manager.latest()
        assert ref is not None
        manager.load(ref, [own])
        return own.loaded

    run_ranks(3, save)
    assert run_ranks(2, read) == [{"cursor": {"all": 1, "file-0": 0, "file-1": 1, "file-2": 2}}] * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda rank: StateItem("a", "x", "replicated", {"n": rank // 2}),
            "'a/x' of kind replicated must be equal on all ranks, and 'the value' differs: it is {'n': 0} on an earlier rank and {'n': 1} on rank 2",
        ),
        (lambda rank: StateItem("a", "x", "replicated", torch.full((3,), rank // 2)), "'a/x' must be equal on all ranks, and differs"),
        (
            lambda rank: StateItem("a", "x", "replicated", torch.ones(3 + rank // 2)),
            r"differs: on rank 0 .*\[3\].* on rank 2 .*\[4\]",
        ),
        (
            lambda rank: StateItem("a", f"x{rank // 2}", "replicated", 1),
            "'a/x0' of kind replicated must be on all ranks; rank 0 has it, rank 2 has not",
        ),
        (
            lambda rank: StateItem("a", "x", "keyed", {"k": rank // 2}),
            "'a/x' of kind keyed must be equal on all ranks, and 'k' differs: it is 0 on an earlier rank and 1 on rank 2",
        ),
        (
            lambda rank: StateItem("a", "x", "replicated", 1, version=1 + rank // 2),
            "'a/x' must be equal on all ranks, and differs: on rank 0 .*'version': 1.*on rank 2 .*'version': 2",
        ),
        (lambda rank: StateItem("a", f"x{rank // 2}", "rank", 1), "'a/x0' must have an entry for each of 3 ranks, and lacks rank 2"),
        (
            lambda rank: StateItem("a", f"x{rank // 2}", "rank", torch.ones(1)),
            "'a/x0' must have an entry for each of 3 ranks, and lacks rank 2",
        ),
    ],
)
def test_ranks_that_contradict_each_other(make: Any, words: str) -> None:
    storage = MemoryStorage()

    def work(comm: Any) -> str:
        manager = OverStorage(storage, comm)
        manager.save(3, [Holder(make(comm.rank))])
        try:
            manager.wait()
        except CheckpointError as error:
            return str(error)
        return ""

    import re

    texts = run_ranks(3, work)
    assert all("step 3" in text and re.search(words, text) for text in texts), texts
    assert commit.scan(storage, "checkpoints")[0] == []


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    storage, ref = saved(weights(w=torch.ones(2)))

    def work(comm: Any) -> str:
        own = weights(w=torch.ones(2 + comm.rank))
        try:
            OverStorage(storage, comm).load(ref, [own])
        except IntarsiaError as error:
            return str(error)
        return ""

    texts = run_ranks(2, work)
    assert all("model/w: saved with shape [2], wanted [3]" in text for text in texts), texts


def test_a_checkpoint_of_a_newer_format_stops_a_resume() -> None:
    storage, ref = saved(weights(w=torch.ones(2)))
    older = {name.replace(ref.folder, "checkpoints/step-00000000"): data for name, data in storage.files.items()}
    storage.files.update(older)
    assert open_checkpoint("", storage).keys() == ["model/w"]
    name = f"{ref.folder}/manifest.json"
    storage.files[name] = (
        storage.files[name].replace(b'"version":1,"world"', b'"version":2,"world"').replace(b'"intarsia ', b'"intarsia 9.')
    )
    storage.files[f"{ref.folder}/COMMIT"] = commit.marker_bytes(storage.files[name]).replace(b"checkpoint 1", b"checkpoint 2")
    with pytest.raises(CheckpointError, match=r"checkpoint format 2, written by Intarsia 'intarsia 9\..* reads formats up to 1\. Upgrade"):
        OverStorage(storage).latest()
    with pytest.raises(CheckpointError, match="checkpoint format 2"):
        open_checkpoint("", storage)
    assert open_checkpoint("checkpoints/step-00000000", storage).keys() == ["model/w"]


def test_open_checkpoint_reads_boxes_and_values() -> None:
    value = torch.arange(60.0).view(5, 12)
    storage, ref = saved(
        Holder(tensor_item("w", value), tensor_item("e", torch.empty(0, 4)), StateItem("a", "x", "replicated", {"n": [1]}))
    )
    opened = open_checkpoint(ref.folder, storage)
    assert opened.keys() == ["a/x", "model/e", "model/w"]
    assert opened.value("a/x") == {"n": [1]} and opened.verify() == []
    assert torch.equal(opened.read("model/w"), value) and opened.read("model/e").shape == (0, 4)
    assert torch.equal(opened.read("model/w", Box((1, 2), (3, 5))), value[1:4, 2:7])
    with pytest.raises(CheckpointError, match=r"no tensor 'model/ww'\. Did you mean 'model/w'"):
        opened.read("model/ww")
    with pytest.raises(CheckpointError, match=r"no value 'a/y'\. Did you mean 'a/x'"):
        opened.value("a/y")
    with pytest.raises(UsageError, match="not inside the shape"):
        opened.read("model/w", Box((1, 2), (5, 5)))


def test_a_backend_that_is_not_installed_is_named() -> None:
    storage, ref = saved(weights(w=torch.ones(2)))
    name = f"{ref.folder}/manifest.json"
    storage.files[name] = storage.files[name].replace(b"intarsia-checkpoint-stream:stream", b"acme-tape:tape")
    storage.files[f"{ref.folder}/COMMIT"] = commit.marker_bytes(storage.files[name])
    with pytest.raises(CheckpointError, match="backend 'acme-tape:tape', which is not installed"):
        load(storage, ref, weights(w=torch.ones(2)))


def test_values_that_a_component_cannot_take_up_are_the_checkpoints_fault() -> None:
    class Picky(Holder):
        def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
            values["cursor"]["next"] += 1

    storage = MemoryStorage()
    manager = OverStorage(storage)
    manager.save(1, [Holder(StateItem("data", "cursor", "keyed", {"before": 3}))])
    manager.wait()
    ref = manager.latest()
    assert ref is not None
    with pytest.raises(CheckpointError, match=r"step-00000001: cursor cannot be taken up by Picky \(KeyError: 'next'\)"):
        manager.load(ref, [Picky(StateItem("data", "cursor", "keyed", {}))])


def test_facts_are_compared() -> None:
    def facts(**changes: Any) -> Mapping[str, Any]:
        recipe = {"model.dim": 8, "train.seed": 0, "train.steps": 10, "data.shuffle": True} | changes
        return {"recipe": recipe, "world": 2, "kernels": {"rope": "reference"}, "plugins": [{"distribution": "a", "version": "1"}]}

    assert compare_facts(facts(), facts()) == []
    now = dict(facts(**{"model.dim": 9, "train.steps": 20, "data.shuffle": False}))
    now |= {"world": 4, "kernels": {"rope": "triton"}, "plugins": [{"distribution": "a", "version": "2"}]}
    found = {difference.what: difference.level for difference in compare_facts(facts(), now)}
    assert found == {
        "recipe model.dim": "fatal",
        "recipe data.shuffle": "warning",
        "kernel rope": "warning",
        "plugin a": "warning",
        "recipe train.steps": "note",
        "world": "note",
    }
    assert next(iter(found)) == "recipe model.dim"
    assert "recipe model.dim: was 8, is 9" in str(compare_facts(facts(), now)[0])
    added = facts(**{"model.bias": True})
    assert [difference.saved for difference in compare_facts(facts(), added)] == [None]
    assert compare_facts({}, now) == [] and [d.what for d in compare_facts({"world": 2}, now)] == ["world"]
