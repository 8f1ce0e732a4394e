"""Reading `events.jsonl`, the record of a run. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from intarsia.train.events import FILE


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """The events of a run directory in order; lines that are no JSON object (cut off by a kill) are left out."""
    try:
        lines = (directory / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "event" in record:
            yield record
