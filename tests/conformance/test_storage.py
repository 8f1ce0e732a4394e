"""The posix storage and the kit's own double keep every promise of the contract."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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


@pytest.fixture(scope="class")
def _scratch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    request.cls.scratch = tmp_path_factory.mktemp("scratch")


@pytest.mark.usefixtures("_scratch")
class TestThePagesExample(StorageConformance):
    """One scratch folder serves all runs, as the page's default does."""

    def make(self, root: Path) -> Storage:
        page = Path(__file__).parents[2] / "docs/how-to/write-a-storage.md"
        code = next(block for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if "def build" in block)
        names: dict[str, Any] = {}
        exec(compile(code, str(page), "exec"), names)
        return names["build"](SimpleNamespace(root=str(self.scratch)), root)
