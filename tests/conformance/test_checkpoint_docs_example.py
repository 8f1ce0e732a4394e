"""The backend that the how-to shows keeps every promise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from intarsia.contracts import CheckpointBackend
from intarsia_testing.checkpoint_backend import CheckpointBackendConformance

PAGE = Path(__file__).parents[2] / "docs/how-to/write-a-checkpoint-backend.md"


class TestBoxFiles(CheckpointBackendConformance):
    def backends(self) -> list[CheckpointBackend]:
        code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class BoxFiles" in block)
        names: dict[str, Any] = {}
        exec(compile(code, str(PAGE), "exec"), names)
        return [names["BoxFiles"](None)]
