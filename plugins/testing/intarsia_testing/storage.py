"""Conformance of storages. Subclass, make your storage, run pytest; a failure says which promise is broken, in words.

    class TestBucket(StorageConformance):
        entry = "my-distribution:bucket"

        config = BucketConfig(bucket="test")

The promises are those of `intarsia.contracts.Storage` and `Writer`: what the commit protocol of checkpoints rests on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from intarsia.contracts import HasFolders, Storage
from intarsia.plugins import current

from intarsia_testing.base import Conformance
from intarsia_testing.promise import broken

NAMES = ("a.bin", "folder/b.json", "folder/deep er/ü-日本.bin", "folder.x/c", ".hidden/d", "folder/" + "n" * 200)
ESCAPES = ("../outside", "folder/../../outside", "/outside", "..", "folder//double", "./here")


def put(storage: Storage, name: str, data: bytes = b"data") -> None:
    """Write a whole file."""
    writer = storage.open(name)
    writer.write(data)
    writer.close()


class StorageConformance(Conformance):
    """Every promise of `intarsia.contracts.Storage`, one test each.

    Set `entry`, and `config` where the settings have no defaults. Or override `make` when no entry offers the storage.
    """

    kind: ClassVar[str] = "storage"

    def make(self, root: Path) -> Storage:
        """A storage whose root is `root`, a folder that need not exist. Two of one root see the same files."""
        return current().build(self.given_configs()[0], root)

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        """A fresh storage."""
        return self.make(tmp_path / "root")

    def raises(
        self, promise: str, kind: type[BaseException] | tuple[type[BaseException], ...], action: Callable[[], Any], what: str
    ) -> None:
        """`action` must raise `kind`."""
        names = " or ".join(one.__name__ for one in kind) if isinstance(kind, tuple) else kind.__name__
        try:
            action()
        except kind:
            return
        except Exception as error:
            broken(promise, f"{what} raises {type(error).__name__} ({error}), not {names}.")
        broken(promise, f"{what} raises nothing; it must raise {names}.")

    def test_says_where_it_is(self, storage: Storage, tmp_path: Path) -> None:
        if not isinstance(storage, Storage):
            broken("has all methods", f"{type(storage).__name__} lacks a method of intarsia.contracts.Storage.")
        if not storage.describe() or not isinstance(storage.describe(), str):
            broken("says where it is", f"describe() gives {storage.describe()!r}; messages need a place.")

    def test_bytes_come_back(self, storage: Storage, tmp_path: Path) -> None:
        data = bytes(range(256)) * 300
        for name in NAMES:
            writer = storage.open(name)
            for start in range(0, len(data), 7001):
                writer.write(memoryview(data)[start : start + 7001])
            writer.write(b"")
            writer.close()
            for reader in (storage, self.make(tmp_path / "root")):
                if reader.read(name) != data or reader.size(name) != len(data):
                    broken("bytes come back", f"{name!r} does not hold what was written, once closed.")
        put(storage, "empty", b"")
        if storage.read("empty") != b"" or storage.size("empty") != 0 or "empty" not in storage.list():
            broken("bytes come back", "a file of no bytes is a file: it is listed, has size 0 and reads as b''.")

    def test_wide_elements_count_as_bytes(self, storage: Storage) -> None:
        writer = storage.open("wide")
        writer.write(memoryview(bytes(range(64))).cast("I"))
        writer.close()
        if storage.read("wide") != bytes(range(64)):
            broken("bytes come back", "a memoryview of wider elements must be written as all of its bytes.")

    def test_ranges(self, storage: Storage) -> None:
        put(storage, "f", bytes(range(100)))
        for offset, length, expected in (
            (0, 10, range(10)),
            (90, 10, range(90, 100)),
            (95, 50, range(95, 100)),
            (100, 5, ()),
            (7, 0, ()),
            (200, 3, ()),
        ):
            if storage.read("f", offset, length) != bytes(expected):
                broken(
                    "reads ranges",
                    f"read('f', {offset}, {length}) of 100 bytes must give bytes {list(expected)[:3]}..., and fewer only at the end.",
                )
        if storage.read("f", 40) != bytes(range(40, 100)):
            broken("reads ranges", "without a length a read goes from the offset to the end of the file.")

    def test_a_file_appears_when_closed(self, storage: Storage) -> None:
        writer = storage.open("folder/f")
        writer.write(b"half")
        if storage.list() != []:
            broken(
                "a file appears when it is closed",
                f"{storage.list()} is listed while the file is still being written; a crash would leave half a file.",
            )
        self.raises(
            "a file appears when it is closed", FileNotFoundError, lambda: storage.read("folder/f"), "reading a file that is not closed yet"
        )
        writer.close()
        if storage.list() != ["folder/f"]:
            broken("a file appears when it is closed", f"after close() the storage lists {storage.list()}, not the file.")

    def test_abort_leaves_nothing(self, storage: Storage) -> None:
        writer = storage.open("f")
        writer.write(b"half")
        writer.abort()
        writer.abort()
        if storage.list():
            broken("abort leaves nothing", f"after abort() {storage.list()} is there.")
        put(storage, "f", b"old")
        writer = storage.open("f")
        writer.write(b"new")
        writer.abort()
        if storage.read("f") != b"old":
            broken("abort leaves nothing", "the earlier file of that name must survive an aborted rewrite.")

    def test_open_replaces(self, storage: Storage) -> None:
        put(storage, "f", b"a long first text")
        put(storage, "f", b"short")
        if storage.read("f") != b"short":
            broken("open replaces", f"writing a name again must replace the file whole; it holds {storage.read('f')!r}.")

    def test_missing_files(self, storage: Storage) -> None:
        put(storage, "folder/f")
        for name in ("none", "none/f", "folder", "folder/f/below"):
            self.raises("a missing name is FileNotFoundError", FileNotFoundError, partial(storage.read, name), f"read({name!r})")
            self.raises("a missing name is FileNotFoundError", FileNotFoundError, partial(storage.size, name), f"size({name!r})")
        self.raises(
            "a missing name is FileNotFoundError",
            FileNotFoundError,
            lambda: storage.publish("none", "to"),
            "publishing a folder that is missing",
        )

    def test_list(self, storage: Storage) -> None:
        if storage.list() != [] or storage.list("none") != []:
            broken("lists", "an empty storage, or a folder that is missing, is listed as [].")
        for name in reversed(NAMES):
            put(storage, name)
        if storage.list() != sorted(NAMES):
            broken("lists", f"list() gives {storage.list()}; it must give all names, sorted, relative to the root.")
        below = sorted(name for name in NAMES if name.startswith("folder/"))
        if storage.list("folder") != below:
            broken("lists", f"list('folder') gives {storage.list('folder')}: the folder's files by full name, and not those of 'folder.x'.")

    def test_unfinished_folders_are_found(self, storage: Storage) -> None:
        if not isinstance(storage, HasFolders):
            return
        if storage.folders() != [] or storage.folders("base/none") != []:
            broken("folders are found", "in an empty storage, or below a folder that is missing, folders() is [].")
        writer = storage.open("base/open/deep/f")
        writer.write(b"half")
        put(storage, "base/closed/f")
        put(storage, "base/file")
        if storage.folders("base") != ["closed", "open"]:
            broken(
                "folders are found",
                f"folders('base') gives {storage.folders('base')}, not ['closed', 'open']: a crash leaves folders with unfinished files only.",
            )
        writer.abort()

    def test_publish_moves_the_folder(self, storage: Storage) -> None:
        for name in ("from/a", "from/deep/b", "from.x/c"):
            put(storage, name, name.encode())
        storage.publish("from", "base/to")
        if storage.list() != ["base/to/a", "base/to/deep/b", "from.x/c"] or storage.read("base/to/deep/b") != b"from/deep/b":
            broken("publish moves the folder", f"after publish('from', 'base/to') there are {storage.list()}.")

    def test_publish_never_replaces(self, storage: Storage) -> None:
        put(storage, "from/a", b"new")
        put(storage, "to/b", b"old")
        put(storage, "file", b"old")
        for destination in ("to", "file"):
            self.raises(
                "publish never replaces",
                FileExistsError,
                partial(storage.publish, "from", destination),
                f"publishing onto {destination!r}, which is taken,",
            )
        if storage.list() != ["file", "from/a", "to/b"] or storage.read("to/b") != b"old":
            broken("publish never replaces", f"a refused publish must change nothing; now there are {storage.list()}.")

    def test_publish_is_one_winner(self, storage: Storage, tmp_path: Path) -> None:
        for index in range(4):
            put(storage, f"from{index}/a", b"%d" % index)
            put(storage, f"from{index}/b", b"%d" % index)
        outcomes: list[str] = []

        def race(index: int) -> None:
            try:
                self.make(tmp_path / "root").publish(f"from{index}", "to")
                outcomes.append("won")
            except OSError:
                outcomes.append("lost")

        run_together([partial(race, index) for index in range(4)])
        if outcomes.count("won") != 1 or storage.read("to/a") != storage.read("to/b"):
            broken(
                "publish is atomic", f"of four publishers of one name exactly one wins, with its whole folder; here: {sorted(outcomes)}."
            )

    def test_remove(self, storage: Storage) -> None:
        for name in ("folder/a", "folder/deep/b", "folder.x/c", "single"):
            put(storage, name)
        storage.remove("folder")
        storage.remove("single")
        if storage.list() != ["folder.x/c"]:
            broken("remove deletes", f"after remove('folder') and remove('single') there are {storage.list()}.")
        for name in ("folder", "single", "never/there"):
            try:
                storage.remove(name)
            except Exception as error:
                broken(
                    "remove ignores what is missing", f"remove({name!r}) of something that is gone raises {type(error).__name__}: {error}."
                )

    def test_no_escape(self, storage: Storage, tmp_path: Path) -> None:
        (tmp_path / "outside").write_bytes(b"mine")
        put(storage, "a/file")
        for name in ESCAPES:
            for action in (partial(put, storage), storage.read, storage.remove, partial(storage.publish, "a")):
                self.raises("names stay inside", (ValueError, OSError), partial(action, name), f"the name {name!r}")
        if (tmp_path / "outside").read_bytes() != b"mine":
            broken("names stay inside", "a file outside of the root was changed.")

    def test_writers_at_once(self, storage: Storage, tmp_path: Path) -> None:
        def work(index: int) -> None:
            own = self.make(tmp_path / "root") if index % 2 else storage
            writer = own.open(f"folder/deep/{index}")
            for _ in range(50):
                writer.write(bytes([index]) * 997)
            writer.close()

        run_together([partial(work, index) for index in range(8)])
        for index in range(8):
            if storage.read(f"folder/deep/{index}") != bytes([index]) * 997 * 50:
                broken("writers may work at once", f"file {index} of 8 that were written at the same time does not hold its own bytes.")


def run_together(tasks: list[Callable[[], None]]) -> None:
    """Run tasks in threads that start at once; the first error is raised."""
    start, errors = threading.Barrier(len(tasks)), []

    def run(task: Callable[[], None]) -> None:
        try:
            start.wait(300)
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    if errors:
        raise errors[0]
