"""A generator and an environment worker are killed in the middle of a run with the embedded generator: it ends with the right number of samples."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from intarsia_console.events import read_events
from intarsia_rl.controller.writer import files, read

from tests.support.held_runs import held_after

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

STEPS = 6
RUN = (
    f"train.steps={STEPS}", "train.sequence_length=32", "data.loader.groups=4", "data.loader.group=4", "data.loader.generators=2", "data.loader.max_lag=0",
    "data.loader.held_out.every=0", "data.loader.held_out.at_start=false",
)  # fmt: skip


def launched() -> tuple[dict[int, int], dict[int, str]]:
    """The parent of each process of this machine, and the name of each that was started by a launcher, by their numbers."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
        except (ValueError, OSError):
            continue
        if "intarsia_rl.processes" in words:
            names[int(folder.name)] = words[words.index("intarsia_rl.processes") + 1]
    return parents, names


def processes(root: int) -> dict[str, int]:
    """The processes of a run by name, with their numbers: all that descend from `root` and were started by a launcher."""
    parents, names = launched()

    def ancestors(number: int) -> Iterator[int]:
        while number in parents:
            number = parents[number]
            yield number

    return {name: number for number, name in names.items() if root in ancestors(number)}


def rollouts(path: Path) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in read_events(path) if event["event"] == "rollouts"} if path.exists() else {}


def test_a_generator_and_a_worker_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "intarsia",
        "train",
        "arithmetic/debug",
        "--with",
        "batch_invariant",
        "--dir",
        str(place),
        "--quiet",
        *RUN,
    ]
    path, released = held_after(STEPS - 1, tmp_path / "held")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
    run = subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 800
    seen: set[int] = set()
    for step, name in ((1, "generator-1"), (2, "environment")):
        while step not in rollouts(place) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        there = processes(run.pid)
        seen |= set(there.values())
        assert {"controller", "generator-0", name} <= set(there), (there, run.poll())
        os.kill(there[name], signal.SIGKILL)
        while processes(run.pid).get(name, there[name]) == there[name] and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    released.touch()
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    found = rollouts(place)
    assert sorted(found) == list(range(1, STEPS + 1))
    for event in found.values():
        assert (event["trained_samples"], event["lag"]["max"]) == (16, 0)
        assert event["gap"] == 0.0 and event["gap_tokens"] > 0, "the new generator has the trainer's weights, bit for bit"
    assert found[STEPS]["kills"] == {"generators": 1, "workers": 1}
    samples = [record["id"] for kind, _, file in files(place / "rollouts") if kind == "step" for record in read(file)]
    assert len(samples) == len(set(samples)) == 16 * STEPS
    while (left := seen & set(launched()[1])) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
