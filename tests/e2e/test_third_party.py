"""Four distributions of third parties, installed by pip into a folder of their own, train together, resume on another number of processes, and keep
every promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from intarsia_console.events import read_events

from tests.support.pip_site import install

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("model", "placement", "kernel", "storage")
CHOICES = ("kernels.swiglu=acme-swiglu:lean", "sharder.placement=zigzag", "checkpoint.storage=sqlite")
# Llama's feed-forward layer in one block: the example kernel is called, and the family's own component is replaced.
OTHER_LAYER = ("model.layers.1.feed_forward=swiglu", "model.layers.1.feed_forward.hidden=64")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip put the four; their dependencies are those of this environment, so that no network is needed."""
    path = tmp_path_factory.mktemp("site")
    install(path, *(EXAMPLES / name for name in NAMES))
    return path


def run(site: Path, folder: Path, *arguments: str, module: str = "intarsia") -> str:
    """Standard output of `python -m module ...` with the four installed."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_they_are_listed_and_healthy(site: Path, tmp_path: Path) -> None:
    listed = json.loads(run(site, tmp_path, "plugins", "list", "--json"))
    text = json.dumps(listed)
    for name in ("acme-parallel", "acme-zigzag", "acme-swiglu", "acme-sqlite", "parallel/debug", "squared_relu"):
        assert name in text
    for name in ("acme-parallel:parallel", "acme-zigzag:zigzag", "acme-swiglu:lean", "acme-sqlite:sqlite"):
        assert name.partition(":")[0] in run(site, tmp_path, "plugins", "show", name)


def test_they_train_together_and_resume_on_another_mesh(site: Path, tmp_path: Path) -> None:
    cache = f"data.cache={tmp_path / 'cache'}"
    chosen = (*CHOICES, *OTHER_LAYER, cache, "--quiet")
    run(site, tmp_path, "train", "parallel/debug", "--processes", "2", "--dir", "two", *chosen)
    run(site, tmp_path, "train", "--resume", "two", "train.steps=5", "--allow-changes", "--quiet")
    run(site, tmp_path, "train", "parallel/debug", "--dir", "one", "train.steps=5", *OTHER_LAYER, cache, "--quiet")

    def losses(name: str) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in read_events(tmp_path / name) if event["event"] == "step"}

    # The same numbers as one process with nothing but what is built in.
    assert losses("two").keys() == losses("one").keys() == {1, 2, 3, 4, 5}
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
    recorded = json.loads((tmp_path / "two" / "recipe.json").read_text())
    text = json.dumps(recorded)
    for name in ("acme-parallel:parallel", "acme-zigzag:zigzag", "acme-sqlite:sqlite", "acme-swiglu:lean"):
        assert name in text
    assert (tmp_path / "two" / "files.sqlite").exists()
    assert not list((tmp_path / "two" / "checkpoints").glob("step-*"))
    assert "step-00000005" in run(site, tmp_path, "checkpoint", "list", "two")
    run(site, tmp_path, "checkpoint", "verify", "two")
    written = json.loads(run(site, tmp_path, "generate", "two", "--prompt", "def ", "--max-tokens", "5", "--ignore-eos", "--json"))
    assert written["step"] == 5 and len(written["completions"][0]["tokens"]) == 5


def test_each_keeps_every_promise(site: Path, tmp_path: Path) -> None:
    tests = [str(EXAMPLES / name / "tests" / "test_conformance.py") for name in NAMES]
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null", "--rootdir", str(tmp_path))
    output = run(site, tmp_path, *options, *tests, module="pytest")
    for subject in (
        "model acme-parallel:parallel",
        "placement acme-zigzag:zigzag",
        "kernel swiglu acme-swiglu:lean",
        "storage acme-sqlite:sqlite",
    ):
        line = next(line for line in output.splitlines() if line.startswith(subject))
        assert line.endswith("promises."), line
