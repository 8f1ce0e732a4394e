"""A third party's family with a recurrence, installed by pip into a folder of its own, trains with its rows cut over ranks as it does on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from intarsia_console.events import read_events

from tests.support.pip_site import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "recurrence"


def test_cut_rows_train_as_whole_ones(tmp_path: Path) -> None:
    install(tmp_path / "site", EXAMPLE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}

    def run(module: str, *arguments: str) -> str:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    losses = {}
    for name, more in {"one": (), "cut": ("--processes", "2", "mesh.cp=2", "recompute.mode=blocks")}.items():
        run("intarsia", "train", "toy_recurrence/debug", "--dir", name, "--quiet", f"data.cache={tmp_path / 'cache'}", *more)
        losses[name] = [event["loss"] for event in read_events(tmp_path / name) if event["event"] == "step"]
    assert len(losses["one"]) == 3 and losses["cut"] == pytest.approx(losses["one"], rel=1e-5)
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null", "--rootdir", str(tmp_path))
    assert "keeps 17 of 17 promises." in run("pytest", *options, str(EXAMPLE / "tests"))
