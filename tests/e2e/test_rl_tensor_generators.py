"""`intarsia train arithmetic/debug` on two ranks, with two generators that are each cut over two processes: the second rank of one and the first of the other are killed, and the run ends with all of its samples."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from intarsia_console.events import read_events
from intarsia_rl.controller.writer import files, read

from tests.support.held_runs import held_after

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

STEPS = 4
RUN = (
    f"train.steps={STEPS}", "train.sequence_length=32", "data.loader.groups=2", "data.loader.group=4", "data.loader.max_lag=0", "data.loader.generators=2",
    "data.loader.generator.tensor=2", "data.loader.weights=socket", "data.loader.held_out.every=0", "data.loader.held_out.at_start=false",
)  # fmt: skip


def ranks(root: Path) -> dict[str, int]:
    """The processes by name that a launcher or a generator of the run in `root` has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            place = (folder / "cwd").resolve()
        except OSError:
            continue
        for module in ("intarsia_rl.processes", "intarsia_generation.engine.follower"):
            if module in words and place == root.resolve():
                found[words[words.index(module) + 1]] = int(folder.name)
    return found


def rollouts(path: Path) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in read_events(path) if event["event"] == "rollouts"} if path.exists() else {}


def test_ranks_of_generators_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "run"
    command = [sys.executable, "-m", "intarsia", "train", "arithmetic/debug", "--processes", "2", "--dir", str(place), "--quiet", *RUN]
    path, released = held_after(STEPS - 1, tmp_path / "held")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
    run = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 800
    for step, name in ((1, "generator-1/1"), (2, "generator-0")):
        while step not in rollouts(place) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        there = ranks(tmp_path)
        assert {"controller", "generator-0", "generator-0/1", name} <= set(there), (there, run.poll())
        os.kill(there[name], signal.SIGKILL)
        while ranks(tmp_path).get(name, there[name]) == there[name] and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    released.touch()
    _, errors = run.communicate(timeout=800)
    assert run.returncode == 0, errors
    found = rollouts(place)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all((event["trained_samples"], event["lag"]["max"]) == (8, 0) for event in found.values())
    assert all(event["gap_tokens"] > 0 and event["gap"] < 1e-4 for event in found.values()), [event["gap"] for event in found.values()]
    assert found[STEPS]["kills"] == {"generators": 2, "workers": 0}
    samples = [record["id"] for kind, _, file in files(place / "rollouts") if kind == "step" for record in read(file)]
    assert len(samples) == len(set(samples)) == 8 * STEPS
    # A dead one whose parent is dead as well may keep its number, without a name.
    deadline = time.monotonic() + 600
    while (left := ranks(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
