"""`intarsia train arithmetic/debug` as a user calls it, with the embedded generator and real processes: it runs, is killed, and goes on exactly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_console.events import read_events
from intarsia_rl.controller.writer import files, read

RUN = (
    "train.steps=12", "train.sequence_length=32", "checkpoint.every=2", "data.loader.groups=4", "data.loader.group=4", "data.loader.max_lag=0",
    "data.loader.held_out.tasks=4", "data.loader.held_out.at_start=false",
)  # fmt: skip


# The command; one that stays where it has logged a step, until there is a file, is not killed too late, nor are its processes.
RUNS = "from intarsia.cli import run; run()"
STAYS = """
import time
from pathlib import Path
from intarsia.cli import run
from intarsia.train import events
append = events._append

def stay(path, record):
    append(path, record)
    while record["event"] == "step" and record["step"] == {step} and not Path({released!r}).exists():
        time.sleep(0.02)

events._append = stay
run()
"""


def start(folder: Path, *arguments: str, program: str = RUNS) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    command = [sys.executable, "-c", program, "train", *arguments, "--quiet"]
    return subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def ended(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors


def events(path: Path, kind: str) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in read_events(path) if event["event"] == kind}


def rollouts(path: Path) -> dict[str, list[dict[str, Any]]]:
    return {file.name: [{**record, "timings_s": None} for record in read(file)] for _, _, file in files(path / "rollouts")}


def weights(path: Path, step: int) -> dict[str, bytes]:
    checkpoint = open_checkpoint(path / "checkpoints" / f"step-{step:08}")
    return {key: checkpoint.read(key).numpy().tobytes() for key in list(checkpoint.keys()) if key.startswith("model/")}


def kill_children(running: subprocess.Popen[str], path: Path) -> list[str]:
    """Kill a generator and an environment worker of a run that has just begun again; their kinds."""
    end, found = time.monotonic() + 800, {}
    while running.poll() is None and time.monotonic() < end:
        begun = len([event for event in read_events(path) if event["event"] == "generators"]) == 2
        if begun and len(found) == 3:
            break
        for folder in Path("/proc").glob("[0-9]*") if len(found) < 3 else ():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                if "intarsia_rl.processes" in words and (folder / "cwd").resolve() == path.parent.resolve():
                    found[words[words.index("intarsia_rl.processes") + 1].partition("-")[0]] = int(folder.name)
    for kind in ("generator", "environment"):
        os.kill(found[kind], signal.SIGKILL)
    return sorted(kind for kind in found if kind != "controller")


@pytest.mark.timeout(2400)
def test_a_run_with_the_embedded_generator_is_killed_and_goes_on_exactly(tmp_path: Path) -> None:
    """In batch-invariant mode, at lag 0: the run that was killed, and whose generator and worker were killed after it went on, ends with the very weights, rollouts and losses of one that was not."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    released = tmp_path / "released"
    stays = {step: STAYS.format(step=step, released=str(released)) for step in (7, 9)}
    running = start(tmp_path, "arithmetic/debug", "--with", "batch_invariant", "--dir", str(broken), *RUN, program=stays[7])
    end = time.monotonic() + 800
    while running.poll() is None and time.monotonic() < end and not (3 in events(broken, "rollouts") and events(broken, "checkpoint")):
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=600)
    ended(start(tmp_path, "arithmetic/debug", "--with", "batch_invariant", "--dir", str(whole), *RUN))
    running = start(tmp_path, "--resume", str(broken), program=stays[9])
    killed = kill_children(running, broken)
    released.touch()
    ended(running)
    assert killed == ["environment", "generator"]
    for path in (whole, broken):
        found = events(path, "rollouts")
        assert sorted(found) == list(range(1, 13)) and all(
            event["trained_samples"] == 16 and event["lag"]["max"] == 0 for event in found.values()
        )
        assert all(event["gap"] == 0.0 and event["gap_tokens"] > 0 for event in found.values()), (
            "trainer and generator are equal bit for bit"
        )
        assert events(path, "held_out")[12]["samples"] == 4
    assert [event["step"] for event in read_events(broken) if event["event"] == "resume"] in ([2], [4], [6])
    assert rollouts(whole) == rollouts(broken)
    assert sum(events(broken, "rollouts")[12]["kills"].values()) == 2
    losses = [{step: (event["loss"], event["gradient_norm"]) for step, event in events(path, "step").items()} for path in (whole, broken)]
    assert losses[0] == losses[1] and weights(whole, 12) == weights(broken, 12)
