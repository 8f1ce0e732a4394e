"""Tasks of two splits that have nothing in common, the same in every process. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from intarsia.contracts import Task
from intarsia.errors import UsageError, did_you_mean

SPLITS = ("train", "held_out")
HELD_OUT_IN = 5
"""One key in this many is held out."""


class Splits:
    """Tasks `train/0`, `train/1`, ... and `held_out/0`, ..., from (key, data) in order. A hash of the key says which split it goes to, whatever else is asked for: tasks of one key are
    on one side. Data that comes again is left out."""

    def __init__(self, name: str, seed: int, found: Iterable[tuple[str, dict[str, Any]]], tasks: int, held_out: int):
        if tasks < 1 or held_out < 1:
            raise UsageError(f"{name}: tasks is {tasks} and held_out is {held_out}; each must be at least 1.")
        self._name = name
        wanted = {"train": tasks, "held_out": held_out}
        self._tasks: dict[str, list[Task]] = {split: [] for split in SPLITS}
        seen: set[str] = set()
        for key, data in found:
            split = "held_out" if is_held_out(key, seed) else "train"
            mine = self._tasks[split]
            identity = json.dumps(data)
            if identity not in seen and len(mine) < wanted[split]:
                seen.add(identity)
                mine.append(Task(f"{split}/{len(mine)}", data, split))
            if all(len(self._tasks[split]) == wanted[split] for split in SPLITS):
                break
        for split, mine in self._tasks.items():
            if not mine:
                raise UsageError(
                    f"{name}: these settings leave the split {split} without a task: there are too few different ones. Make them harder."
                )

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split. UsageError for one that does not exist."""
        if split not in self._tasks:
            raise UsageError(f"{self._name}: there is no split {split!r}. {did_you_mean(split, SPLITS)} Splits: {', '.join(SPLITS)}.")
        return self._tasks[split]


def is_held_out(key: str, seed: int) -> bool:
    """Whether a key belongs to the split held_out."""
    return hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()[0] % HELD_OUT_IN == 0
