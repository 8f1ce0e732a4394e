"""What storages, processes and disks do to a save: death at every operation, full disks, flipped bytes, aliased buffers, late errors."""

from __future__ import annotations

import contextlib
import errno
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.checkpoint import commit
from intarsia.contracts import StateItem, Storage
from intarsia.errors import CheckpointError
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_checkpoint_posix.storage import PosixStorage
from intarsia_testing.communicator import run_ranks
from intarsia_testing.doubles import FaultyStorage, Killed, MemoryStorage, SlowStorage
from intarsia_testing.stateful import Holder, OverStorage, tensor_item


def state(number: int) -> Holder:
    """A component whose every part says `number`."""
    return Holder(
        tensor_item("w", torch.full((4, 3), float(number))),
        tensor_item("empty", torch.empty(0, 3)),
        tensor_item("scale", torch.full((5,), number, dtype=torch.bfloat16)),
        StateItem("progress", "steps", "replicated", {"steps": number}),
        StateItem("progress", "table", "replicated", torch.full((3,), number)),
        StateItem("data", "cursor", "keyed", {"source": number}),
        StateItem("rng", "torch", "rank", torch.full((6,), number, dtype=torch.uint8)),
        StateItem("rng", "python", "rank", [number]),
    )


def number_of(holder: Holder) -> int:
    """The number that all parts of a loaded component agree on."""
    loaded = holder.loaded
    assert loaded is not None
    numbers = [loaded[name].flatten().tolist() for name in ("w", "scale", "table", "torch")]
    numbers += [[loaded["steps"]["steps"]], [loaded["cursor"]["source"]], loaded["python"]]
    found = {int(value) for values in numbers for value in values}
    assert len(found) == 1, numbers
    return found.pop()


def load_newest(storage: Storage) -> int | None:
    """What a fresh process would resume from."""
    manager = OverStorage(storage)
    ref = manager.latest()
    if ref is None:
        return None
    holder = state(-1 % 256)
    step = manager.load(ref, [holder])
    assert number_of(holder) == step
    return step


def save(storage: Storage, step: int, **options: Any) -> None:
    """Save and wait in a manager of its own."""
    manager = OverStorage(storage, **options)
    manager.save(step, [state(step)])
    manager.close()


def test_death_at_every_operation_leaves_the_old_or_the_new() -> None:
    operations = 0
    outcomes = set()
    while True:
        operations += 1
        inner = MemoryStorage()
        save(inner, 1, keep_last=1)
        storage = FaultyStorage(inner, operations)
        with contextlib.suppress(Killed, CheckpointError):
            save(storage, 2, keep_last=1)
        found = load_newest(inner)
        assert found in (1, 2), f"killed at operation {operations}: {storage.log}"
        outcomes.add(found)
        if not storage.dead:
            break
        # The next session saves over whatever the dead one left, and leaves nothing behind.
        save(inner, 2, keep_last=1, exclusive=True)
        assert load_newest(inner) == 2
        folders = {name.split("/")[1] for name in inner.list()}
        assert len(folders) == 1 and not any(folder.startswith("saving.") for folder in folders), (operations, folders)
    assert outcomes == {1, 2} and operations > 10


def test_death_at_every_operation_on_a_disk(tmp_path: Path) -> None:
    for operation in range(1, 40):
        inner = PosixStorage(tmp_path / str(operation), fsync=False)
        save(inner, 1)
        storage = FaultyStorage(inner, operation)
        with contextlib.suppress(Killed, CheckpointError):
            save(storage, 2)
        assert load_newest(inner) in (1, 2)
        if not storage.dead:
            return
        # Files that were still open when the process died, and folders without a file, are in no list; the next session deletes them all the same.
        (inner.root / "checkpoints/step-00000009/data").mkdir(parents=True)
        save(inner, 3, exclusive=True)
        names = {path.name for path in (inner.root / "checkpoints").iterdir()}
        whole = {ref.folder.rpartition("/")[2] for ref in commit.scan(inner, "checkpoints")[0]}
        assert names == whole, f"killed at operation {operation}: {names - whole}"
    pytest.fail("a save has fewer operations than this")


def test_the_marker_is_the_last_thing_written() -> None:
    storage = FaultyStorage(MemoryStorage())
    save(storage, 2)
    published = next(place for place, (operation, _) in enumerate(storage.log) if operation == "publish")
    marker = "checkpoints/step-00000002/COMMIT"
    assert storage.log[published + 1 :] == [("open", marker), ("write", marker), ("close", marker)]


def test_a_file_that_cannot_be_synced_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage = PosixStorage(tmp_path)
    storage.open("folder/first").close()
    monkeypatch.setattr("os.fsync", full)
    writer = storage.open("folder/f")
    writer.write(b"data")
    with pytest.raises(OSError, match="No space"):
        writer.close()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["first"]


def test_every_flipped_byte_is_found() -> None:
    storage = MemoryStorage()
    save(storage, 1)
    save(storage, 2)
    names = [name for name in storage.list() if "step-00000002" in name]
    assert {name.rsplit("/", 1)[1] for name in names} == {"COMMIT", "manifest.json", "rank-00000-000.bin"}
    for name in names:
        good = storage.files[name]
        places = range(0, len(good), max(1, len(good) // 60))
        for place in [*places, len(good) - 1]:
            storage.files[name] = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
            manager = OverStorage(storage)
            ref = manager.latest()
            assert ref is not None and ref.step == 1, (name, place)
            assert [entry.folder for entry in manager.skipped] == ["checkpoints/step-00000002"]
        for cut in (b"", good[:-1], good + b"x"):
            storage.files[name] = cut
            assert load_newest(storage) == 1, (name, len(cut))
        del storage.files[name]
        assert load_newest(storage) == 1
        storage.files[name] = good
    assert load_newest(storage) == 2


def test_a_flipped_byte_is_found_by_whoever_reads_a_tensor() -> None:
    storage = MemoryStorage()
    save(storage, 7)
    name = next(name for name in storage.list("checkpoints/step-00000007") if name.endswith(".bin"))
    good = storage.files[name]
    assert open_checkpoint("", storage).read("model/w").tolist()[0][0] == 7
    for place in range(0, len(good), 7):
        storage.files[name] = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        with pytest.raises(CheckpointError, match=r"step-00000007 is damaged: .*\.bin was changed"):
            open_checkpoint("", storage).read("model/w")


def test_a_flipped_byte_stops_a_load_and_verify_names_the_file() -> None:
    storage = MemoryStorage()
    save(storage, 2)
    name = next(name for name in storage.list() if name.endswith(".bin"))
    manager = OverStorage(storage)
    ref = manager.latest(verify=False)
    assert ref is not None and not ref.verified
    good = storage.files[name]
    storage.files[name] = bytes([good[0] ^ 4]) + good[1:]
    holder = state(9)
    with pytest.raises(CheckpointError, match=r"rank-00000-000\.bin was changed"):
        manager.load(ref, [holder])
    assert holder.loaded is None and holder.items[0].value[0, 0] == 9
    storage.files["checkpoints/step-00000002/extra"] = b""
    problems = open_checkpoint("checkpoints/step-00000002", storage).verify()
    assert problems == [
        ("data/rank-00000-000.bin", "was changed: its SHA-256 is not the manifest's"),
        ("extra", "does not belong to the checkpoint"),
    ]


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_in_any_file_is_refused_and_does_nothing(tmp_path: Path) -> None:
    storage = MemoryStorage()
    save(storage, 2)
    evil = pickle.dumps(Evil(tmp_path / "touched"))
    folder = "checkpoints/step-00000002"
    for name in storage.list():
        good = dict(storage.files)
        storage.files[name] = evil
        if name.endswith("manifest.json"):
            # Even with a marker that fits.
            storage.files[f"{folder}/COMMIT"] = commit.marker_bytes(evil)
        manager = OverStorage(storage)
        assert manager.latest() is None
        assert name.rsplit("/", 1)[1] in manager.skipped[0].reason
        with pytest.raises(CheckpointError, match=name.rsplit("/", 1)[1]):
            opened = open_checkpoint(folder, storage)
            problems = opened.verify()
            raise CheckpointError(str(problems))
        storage.files = good
    assert not (tmp_path / "touched").exists()


def test_the_save_owns_its_buffers() -> None:
    inner, gate = MemoryStorage(), threading.Event()
    manager = OverStorage(SlowStorage(inner, gate=gate))
    holder = state(7)
    cursor = holder.items[5].value
    manager.save(7, [holder])
    for item in holder.items:
        if isinstance(item.value, torch.Tensor):
            item.value.zero_()
    cursor["source"] = 0
    holder.items[3].value["steps"] = 0
    holder.items[7].value[0] = 0
    manager.facts["later"] = True
    gate.set()
    manager.close()
    assert load_newest(inner) == 7
    assert open_checkpoint("checkpoints/step-00000007", inner).manifest.facts == {}


def test_saving_returns_while_the_storage_still_writes() -> None:
    inner, gate = MemoryStorage(), threading.Event()
    manager = OverStorage(SlowStorage(inner, gate=gate))
    manager.save(1, [state(1)])
    manager.save(2, [state(2)])
    assert not any("COMMIT" in name for name in inner.list())
    gate.set()
    manager.wait()
    assert [ref.step for ref in commit.scan(inner, "checkpoints")[0]] == [2, 1]
    manager.close()


def test_retention_waits_for_the_new_one() -> None:
    inner, gate = MemoryStorage(), threading.Event()
    save(inner, 1, keep_last=1)
    slow = SlowStorage(inner, gate=gate)
    manager = OverStorage(slow, keep_last=1)
    manager.save(2, [state(2)])
    manager.save(3, [state(3)])
    assert slow.waiting.wait(600)
    assert load_newest(inner) == 1
    gate.set()
    manager.close()
    assert load_newest(inner) == 3
    assert [ref.step for ref in commit.scan(inner, "checkpoints")[0]] == [3]


def test_keep_last_and_keep_every() -> None:
    storage = MemoryStorage()
    manager = OverStorage(storage, keep_last=2, keep_every=4)
    for step in range(1, 11):
        manager.save(step, [state(step)])
    manager.close()
    assert [ref.step for ref in commit.scan(storage, "checkpoints")[0]] == [10, 9, 8, 4]


def test_keep_last_zero_keeps_all() -> None:
    storage = MemoryStorage()
    manager = OverStorage(storage, keep_last=0)
    for step in range(4):
        manager.save(step, [state(step)])
    manager.close()
    assert len(commit.scan(storage, "checkpoints")[0]) == 4


def test_a_damaged_checkpoint_does_not_count_as_kept() -> None:
    storage = MemoryStorage()
    for step in (1, 2):
        save(storage, step, keep_last=1 if step == 1 else 2)
    storage.files.pop("checkpoints/step-00000002/data/rank-00000-000.bin")
    save(storage, 3, keep_last=2)
    assert [ref.step for ref in commit.scan(storage, "checkpoints")[0]] == [3, 1]


def test_the_checkpoint_that_is_being_loaded_is_not_purged() -> None:
    storage = MemoryStorage()
    save(storage, 1)
    manager = OverStorage(storage, keep_last=1)
    ref = manager.latest()
    assert ref is not None

    class Saving(Holder):
        def load_state(self, values: Any, missing_rank_state: bool = False) -> None:
            manager.save(2, [state(2)])
            manager._drain()
            super().load_state(values)

    holder = Saving(*state(0).items)
    manager.load(ref, [holder])
    assert [found.step for found in commit.scan(storage, "checkpoints")[0]] == [2, 1]
    manager.close()


def test_going_back_makes_the_later_commit_the_newest() -> None:
    storage = MemoryStorage()
    for step in (5, 10, 7):
        save(storage, step, keep_last=0)
    assert load_newest(storage) == 7


def test_a_step_saved_again_never_touches_the_earlier_one() -> None:
    storage = MemoryStorage()
    for _ in range(3):
        save(storage, 4, keep_last=0)
    refs = commit.scan(storage, "checkpoints")[0]
    assert [ref.folder.rsplit("/")[1] for ref in refs] == ["step-00000004.2", "step-00000004.1", "step-00000004"]


@pytest.mark.parametrize("background", [True, False])
def test_a_failed_save_is_raised_with_its_step_and_the_old_one_stays(background: bool) -> None:
    inner = MemoryStorage()
    manager = OverStorage(
        FaultyStorage(inner, 1, OSError(errno.ENOSPC, "No space left on device"), match="step-00000002/data"), background=background
    )
    told: list[tuple[int, str]] = []
    manager.on_error(lambda step, error: told.append((step, str(error))))
    manager.save(1, [state(1)])
    manager.wait()
    with pytest.raises(CheckpointError) as caught:
        manager.save(2, [state(2)])
        manager._drain()
        manager.poll()
    text = str(caught.value)
    for part in (
        "step 2",
        "memory:memory",
        "No space left",
        "disk is full",
        "The checkpoint of step 1 (memory:memory/checkpoints/step-00000001)",
    ):
        assert part in text
    assert [step for step, _ in told] == [2]
    assert load_newest(inner) == 1 and not [name for name in inner.list() if "saving." in name]
    manager.close()


def test_a_failure_of_the_last_save_is_raised_by_close() -> None:
    manager = OverStorage(FaultyStorage(MemoryStorage(), 1, OSError("broken cable"), match="manifest"))
    manager.save(3, [state(3)])
    with pytest.raises(CheckpointError, match=r"step 3 .* failed while committing: broken cable"):
        manager.close()
    manager.close()
    with pytest.raises(CheckpointError, match="closed"):
        manager.save(4, [state(4)])


def test_durable_is_told_after_it_is_so_on_the_main_thread() -> None:
    storage, told = MemoryStorage(), []
    manager = OverStorage(storage)
    manager.on_durable(lambda step, location: told.append((step, location, threading.current_thread() is threading.main_thread())))
    manager.save(1, [state(1)])
    manager.wait()
    assert told == [(1, "memory:memory/checkpoints/step-00000001", True)]
    assert open_checkpoint("checkpoints/step-00000001", storage).manifest.step == 1
    manager.close()


def test_old_checkpoints_that_cannot_be_deleted_do_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    storage = FaultyStorage(
        MemoryStorage(), 1, PermissionError(errno.EACCES, "denied"), operations=("remove",), match="COMMIT", forever=True
    )
    for step in (1, 2):
        save(storage, step, keep_last=1)
    assert "could not be deleted" in caplog.text and load_newest(storage) == 2


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay() -> None:
    storage = MemoryStorage()
    own = commit.temporary_token("aaa")
    host, pid, _ = own.split(".")
    leftovers = {
        "dead": f"{host}.999999999.bbb.1",
        "elsewhere": "other-host.1.ccc.1",
        "living": f"{host}.1.ddd.1",
        "own earlier": f"{own}.3",
        "own later": f"{own}.5",
        "reborn": f"{host}.{pid}.eee.1",
    }
    for name in leftovers.values():
        storage.open(f"checkpoints/saving.{name}.step-00000001/data/x").close()
    storage.open("checkpoints/step-00000009/data/x").close()
    gone = commit.clean(storage, "checkpoints", own, 4, exclusive=False)
    want = {f"checkpoints/saving.{leftovers[name]}.step-00000001" for name in ("dead", "own earlier", "reborn")}
    assert set(gone) == want
    commit.clean(storage, "checkpoints", own, 4, exclusive=True)
    assert storage.list() == [f"checkpoints/saving.{own}.5.step-00000001/data/x"]


def test_a_rank_that_fails_fails_the_save_everywhere() -> None:
    inner = MemoryStorage()

    def work(comm: Any) -> str:
        storage: Storage = inner if comm.rank != 1 else FaultyStorage(inner, 1, OSError("rank 1's cable"), match="data/")
        manager = OverStorage(storage, comm)
        manager.save(5, [Holder(StateItem("rng", "a", "rank", torch.ones(3)))])
        try:
            manager.wait()
        except CheckpointError as error:
            return str(error)
        return ""

    texts = run_ranks(3, work)
    assert all("step 5" in text and "rank 1's cable" in text for text in texts), texts
    assert commit.scan(inner, "checkpoints")[0] == []


def test_a_rank_that_never_saves_is_named() -> None:
    def work(comm: Any) -> str:
        manager = OverStorage(MemoryStorage() if comm.rank else storage, comm, timeout_s=0.3)
        if comm.rank != 2:
            manager.save(5, [state(5)])
        try:
            manager.wait()
        except CheckpointError as error:
            return str(error)
        return ""

    storage = MemoryStorage()
    assert "rank 1, 2 had not written its part after" in run_ranks(3, work)[0]
