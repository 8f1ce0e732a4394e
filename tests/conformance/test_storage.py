"""The posix storage and the kit's own double keep every promise of the contract."""

from __future__ import annotations

from pathlib import Path

from intarsia.contracts import Storage
from intarsia_checkpoint_posix.config import PosixConfig
from intarsia_testing.doubles import MemoryStorage
from intarsia_testing.storage import StorageConformance


class TestPosix(StorageConformance):
    entry = "intarsia-checkpoint-posix:posix"


class TestPosixWithoutSync(StorageConformance):
    entry = "intarsia-checkpoint-posix:posix"

    def config(self) -> PosixConfig:
        return PosixConfig(fsync=False)


class TestMemory(StorageConformance):
    def make(self, root: Path) -> Storage:
        if not hasattr(self, "made"):
            self.made = MemoryStorage()
        return self.made
