"""`intarsia train` on a mesh loses a process in the middle: the others end within the bound with an error that says which rank is missing, and the run is resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from intarsia_console.events import read_events

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from parallel_recipes import write_documents

RECIPE = f"{Path(__file__).parents[1]}/distributed/parallel_recipes.py:deepseek"
SMALL = ["train.steps=20000", "checkpoint.every=2", "evaluation.every=0", "train.micro_batch=1", "train.global_batch=2"]


def steps_of(directory: Path) -> list[int]:
    """Steps that are logged."""
    return [event["step"] for event in read_events(directory) if event["event"] == "step"]


def children_of(pid: int) -> dict[int, int]:
    """The launcher's ranks: rank to process id."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        environ = dict(part.split("=", 1) for part in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in part)
        if "RANK" in environ:
            found[int(environ["RANK"])] = int(child)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("mesh", [("mesh.pp=2", "engine=pipeline", "engine.schedule=zb_h1"), ("mesh.ep=2",)])
def test_the_others_end_and_the_run_goes_on(mesh: tuple[str, ...], tmp_path: Path) -> None:
    write_documents(tmp_path)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "INTARSIA_TIMEOUT_S": "3000", "INTARSIA_TEST_DOCUMENTS": str(tmp_path)}
    command = [sys.executable, "-m", "intarsia", "train"]
    directory = tmp_path / "run"
    begin = [*command, RECIPE, *SMALL, *mesh, "--processes", "2", "--dir", str(directory), "--quiet"]
    process = subprocess.Popen(begin, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(steps_of(directory)) < 5:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    # Long before the limit of a collective.
    output, _ = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "rank 1 was ended by SIGKILL" in output
    done = max(steps_of(directory))
    again = [*command, "--resume", str(directory), f"train.steps={done + 2}", "--processes", "2", "--quiet"]
    resumed = subprocess.run(again, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert resumed.returncode == 0, resumed.stdout
    assert max(steps_of(directory)) == done + 2
