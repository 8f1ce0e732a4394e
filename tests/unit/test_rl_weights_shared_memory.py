"""Weights in shared memory: files are used again, readers notice what is overwritten, and nothing of dead runs stays."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.comm import SelfCommunicator
from intarsia.errors import DistributedError, UsageError
from intarsia_rl.weights import shared_memory
from intarsia_rl.weights.config import SharedMemoryConfig
from intarsia_rl.weights.held import Held
from intarsia_rl.weights.shared_memory import SharedMemory, read, remove_stale
from intarsia_testing.communicator import run_ranks
from intarsia_testing.weight_transport import SHAPES, Trainer, published


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[SharedMemory]:
    made = SharedMemory(SharedMemoryConfig(folder=str(tmp_path / "memory")), tmp_path)
    yield made
    made.close()


def publish(transport: SharedMemory, trainer: Trainer, step: int) -> Any:
    trainer.train(step)
    version = transport.publish(step, trainer.parts)
    assert version is not None
    return version.location


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{shared_memory.PREFIX}-*"))


def test_two_files_serve_any_number_of_versions(transport: SharedMemory, tmp_path: Path) -> None:
    trainer, seen = Trainer(SelfCommunicator()), set()
    for step in range(8):
        location = publish(transport, trainer, step)
        transport.retire(step - 1)
        seen.add((location["path"], os.stat(location["path"]).st_ino))
        assert torch.equal(dict(read(location, ["matrix"]))["matrix"], published(step)["matrix"])
    assert len(seen) == 2 == len(files(tmp_path / "memory"))
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in files(tmp_path / "memory"))


def test_versions_that_are_not_retired_stay_until_there_are_too_many(transport: SharedMemory, tmp_path: Path) -> None:
    trainer = Trainer(SelfCommunicator())
    locations = [publish(transport, trainer, step) for step in range(6)]
    for step in (0, 1):
        with pytest.raises(
            DistributedError, match=rf"does not hold version {step} of the weights \(any more\), but version {step + 4}: take a newer one"
        ):
            list(read(locations[step], ["matrix"]))
    for step in (2, 3, 4, 5):
        assert torch.equal(dict(read(locations[step], ["matrix"]))["matrix"], published(step)["matrix"])
    for step in (2, 3, 4):
        transport.retire(step)
    publish(transport, trainer, 6)
    assert len(files(tmp_path / "memory")) == 2, "memory that slow readers needed is given back"


def test_a_reader_notices_that_its_version_is_overwritten(transport: SharedMemory) -> None:
    trainer = Trainer(SelfCommunicator())
    reading = read(publish(transport, trainer, 0), list(SHAPES))
    next(reading)
    transport.retire(0)
    publish(transport, trainer, 1)
    with pytest.raises(DistributedError, match="does not hold version 0"):
        list(reading)


def test_what_is_written_is_none_until_it_is_whole(transport: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that breaks off half-way: the version before stays readable, the new one is not there, and the next one is whole."""
    trainer = Trainer(SelfCommunicator())
    locations = [publish(transport, trainer, step) for step in (0, 1)]
    transport.retire(0)
    with monkeypatch.context() as patch:
        pieces = Held.pieces

        def half(self: Held) -> Iterator[Any]:
            for number, piece in enumerate(pieces(self)):
                if number == 3:
                    raise KeyboardInterrupt
                yield piece

        patch.setattr(Held, "pieces", half)
        with pytest.raises(KeyboardInterrupt):
            publish(transport, trainer, 2)
    with pytest.raises(DistributedError, match="but none that is whole"):
        list(read({**locations[0], "version": 2}, ["matrix"]))
    assert torch.equal(dict(read(locations[1], ["matrix"]))["matrix"], published(1)["matrix"])
    location = publish(transport, trainer, 2)
    assert all(torch.equal(tensor, published(2)[name]) for name, tensor in read(location, list(SHAPES)))


def test_readers_cannot_change_the_memory(transport: SharedMemory) -> None:
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    for _, tensor in read(location, ["matrix"]):
        tensor.zero_()
    assert torch.equal(dict(read(location, ["matrix"]))["matrix"], published(0)["matrix"])


def test_trainers_without_common_memory_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shared_memory._File.open

    def elsewhere(path: Path) -> Any:
        raise FileNotFoundError(path)

    def rank(world: Any) -> str:
        transport = SharedMemory(SharedMemoryConfig(folder=str(tmp_path)), tmp_path)
        try:
            transport.publish(0, Trainer(world).parts)
        except UsageError as error:
            return str(error)
        finally:
            transport.close()
        return ""

    monkeypatch.setattr(shared_memory._File, "open", elsewhere)
    messages = run_ranks(2, rank)
    assert all("not every trainer rank finds" in message and "weights=socket" in message for message in messages)
    monkeypatch.setattr(shared_memory._File, "open", made)
    assert run_ranks(2, rank) == ["", ""]


def test_a_generator_on_another_machine_is_told_so(transport: SharedMemory) -> None:
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    with pytest.raises(DistributedError, match="another machine: choose weights=socket"):
        list(read({**location, "path": "/dev/shm/nothing", "machine": "other"}, ["matrix"]))
    with pytest.raises(DistributedError, match=r"is not at /dev/shm/nothing any more\.$"):
        list(read({**location, "path": "/dev/shm/nothing"}, ["matrix"]))


# ---------------------------------------------------------------- room


def test_the_runs_folder_serves_where_shared_memory_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(shared_memory, "SHARED", tmp_path / "shm")
    allocate = os.posix_fallocate

    def full(file: int, offset: int, length: int) -> None:
        if "/shm/" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    transport = SharedMemory(SharedMemoryConfig(), tmp_path / "run")
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    assert Path(location["path"]).parent == tmp_path / "run" / "weights" and not files(tmp_path / "shm")
    assert torch.equal(dict(read(location, ["matrix"]))["matrix"], published(0)["matrix"])
    transport.close()
    assert not files(tmp_path / "run" / "weights")


def test_no_room_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    transport = SharedMemory(SharedMemoryConfig(), tmp_path)
    with pytest.raises(UsageError, match=r"no room for 0 MiB of weights \(.*weights: No space left on device\)\. Set weights.folder"):
        publish(transport, Trainer(SelfCommunicator()), 0)


def test_one_version_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"weights\.versions is 1; it must be at least 2"):
        SharedMemory(SharedMemoryConfig(versions=1), tmp_path)


# ---------------------------------------------------------------- the dead

RUN = """
import sys, time
from intarsia.comm import SelfCommunicator
from intarsia_rl.weights.config import SharedMemoryConfig
from intarsia_rl.weights.shared_memory import SharedMemory
from intarsia_testing.weight_transport import Trainer
transport = SharedMemory(SharedMemoryConfig(folder=sys.argv[1]), sys.argv[1])
trainer = Trainer(SelfCommunicator())
transport.publish(0, trainer.parts)
trainer.train(1)
print(transport.publish(1, trainer.parts).location["path"], flush=True)
if sys.argv[2] == "wait":
    time.sleep(3600)
"""


def test_files_of_the_dead_go_with_the_next_start_and_those_of_the_living_stay(tmp_path: Path, transport: SharedMemory) -> None:
    folder = tmp_path / "memory"
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    other = subprocess.Popen([sys.executable, "-c", RUN, str(folder), "wait"], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    other.stdout.readline()
    assert len(files(folder)) == 3
    assert remove_stale(folder) == [] and len(files(folder)) == 3
    os.kill(other.pid, signal.SIGKILL)
    other.wait(timeout=600)
    other.stdout.close()
    assert len(files(folder)) == 3, "nobody could clean up"
    second = SharedMemory(SharedMemoryConfig(folder=str(folder)), tmp_path)
    publish(second, Trainer(SelfCommunicator()), 0)
    assert len(files(folder)) == 2 and Path(location["path"]).exists()
    assert torch.equal(dict(read(location, ["matrix"]))["matrix"], published(0)["matrix"])
    second.close()


def test_a_process_that_ends_without_close_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path), "end"], capture_output=True, text=True, timeout=600, check=True)
    assert not files(tmp_path) and not Path(done.stdout.strip()).exists()
