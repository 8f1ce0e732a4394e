"""How a rank of the command ends: exit handlers have run, output is written, and nothing that a thread of torch still does can abort it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A thread that is inside torch when the interpreter ends, where it must take the interpreter's lock again: an ordinary end aborts the process.
SCRIPT = """
import atexit, sys, threading, time
import torch
import intarsia.cli

def main(argv=None):
    atexit.register(lambda: print("handlers ran"))
    print("said")
    big = torch.randn(1000, 1000)
    threading.Thread(target=lambda: [torch.linalg.svdvals(big) for _ in range(100)], daemon=True).start()
    time.sleep(0.2)
    return 5

intarsia.cli.main = main
intarsia.cli.run()
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_exit_code_output_and_handlers(ranks: str) -> None:
    command = [sys.executable, "-c", SCRIPT if ranks == "2" else SCRIPT.replace("range(100)", "range(0)")]
    done = subprocess.run(
        command, env={**os.environ, "WORLD_SIZE": ranks, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split("\n"), done.stderr) == (5, ["said", "handlers ran", ""], "")
