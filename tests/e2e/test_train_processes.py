"""`intarsia train` in processes of its own: killed, stopped, and as several ranks whose numbers are those of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from intarsia.cli import main
from intarsia_console.events import read_events

RECIPE = f"{Path(__file__).with_name('train_recipes.py')}:tiny"
DEADLINE_S = 600


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token stores, made once."""
    return tmp_path_factory.mktemp("cache")


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(path) if event["event"] == kind]


def losses(path: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(path, "step")}


def numbers(path: Path) -> list[float]:
    """Losses and norms of all steps, and evaluations."""
    steps = {event["step"]: [event["loss"], event["gradient_norm"]] for event in events(path, "step")}
    evaluations = {event["step"]: [event["loss"], event["bits_per_byte"]] for event in events(path, "evaluation")}
    return [value for found in (steps, evaluations) for step in sorted(found) for value in found[step]]


# The command, that stays where it has logged a step: whoever kills it in the middle does not come too late.
STAYS = """
import time
from intarsia.cli import run
from intarsia.train import events
append = events._append

def stay(path, record):
    append(path, record)
    while record["event"] == "step" and record["step"] == {step}:
        time.sleep(60)

events._append = stay
run()
"""


def start(*arguments: str, cache: Path, recipe: str | None = RECIPE, stays: int | None = None) -> subprocess.Popen[str]:
    module = ["-m", "intarsia"] if stays is None else ["-c", STAYS.format(step=stays)]
    command = [sys.executable, *module, "train", *([recipe] if recipe else []), *arguments, f"data.cache={cache}", "--quiet"]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def alone(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    path = tmp_path_factory.mktemp("alone") / "run"
    assert main(["train", RECIPE, "--dir", str(path), "checkpoint.keep_last=0", f"data.cache={cache}", "--quiet"]) == 0
    return path


def test_killed_in_the_middle_and_resumed_equals_never_killed(cache: Path, tmp_path: Path) -> None:
    long = ("train.steps=60", "checkpoint.every=7")
    assert main(["train", RECIPE, "--dir", str(tmp_path / "whole"), *long, f"data.cache={cache}", "--quiet"]) == 0
    path = tmp_path / "killed"
    process = start("--dir", str(path), *long, cache=cache, stays=50)
    wait_for(process, lambda: bool(events(path, "checkpoint")) and len(losses(path)) >= 10)
    process.kill()
    process.communicate()
    assert len(losses(path)) < 60
    assert main(["train", "--resume", str(path), "--quiet"]) == 0
    assert events(path, "resume")[0]["step"] >= 7
    assert {event["step"]: event["loss"] for event in events(path, "step")} == losses(tmp_path / "whole")
    assert numbers(path) == numbers(tmp_path / "whole")


def test_sigterm_saves_and_says_so(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = start("--dir", str(path), "train.steps=100000", "checkpoint.every=null", cache=cache)
    wait_for(process, lambda: len(losses(path)) >= 3)
    process.send_signal(signal.SIGTERM)
    code, text = finish(process)
    assert code == 75 and "SIGTERM: the run stopped after step" in text and f"--resume {path}" in text
    end = events(path, "run_end")[0]
    assert (end["outcome"], end["reason"], end["checkpoint_step"]) == ("stopped", "SIGTERM", end["step"])
    assert main(["train", "--resume", str(path), f"train.steps={end['step'] + 1}", "--quiet"]) == 0
    assert list(losses(path))[-1] == end["step"] + 1


@pytest.mark.parametrize(
    ("processes", "arguments"),
    [
        (2, ["mesh.dp_replicate=2"]),
        (2, ["sharder=flexshard"]),
        (3, ["sharder=flexshard"]),
        (4, ["sharder=flexshard", "mesh.dp_replicate=2"]),
    ],
)
def test_several_processes_give_the_numbers_of_one(alone: Path, cache: Path, tmp_path: Path, processes: int, arguments: list[str]) -> None:
    path = tmp_path / "run"
    code, text = finish(start("--dir", str(path), "--processes", str(processes), *arguments, cache=cache))
    assert code == 0, text
    assert numbers(path) == pytest.approx(numbers(alone), rel=1e-5)
    assert events(path, "run_start")[0]["world"] == processes


def test_another_degree_trains_on_exactly_the_samples_left(alone: Path, cache: Path, tmp_path: Path) -> None:
    """One process saved; two go on. Equal losses mean the same samples in the same steps."""
    path = tmp_path / "run"
    shutil.copytree(alone, path)
    for step in (6, 8):
        shutil.rmtree(path / "checkpoints" / f"step-{step:08}")
    code, text = finish(start("--resume", str(path), "--processes", "2", "sharder=flexshard", cache=cache, recipe=None))
    assert code == 0, text
    assert numbers(path) == pytest.approx(numbers(alone), rel=1e-5)
    assert events(path, "resume")[0]["step"] == 3
    assert any("random generators" in event["message"] for event in events(path, "warning"))


def test_ranks_agree_on_what_is_not_finite(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    code, text = finish(
        start("--dir", str(path), "--processes", "2", "sharder=flexshard", "optimizer.lr=1e38", "checkpoint.every=1", cache=cache)
    )
    assert code == 4
    assert "First offending module: " in text and "[rank" not in text
    assert text.count("is not finite") == 1


def test_sigterm_reaches_all_ranks(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = start("--dir", str(path), "--processes", "2", "mesh.dp_replicate=2", "train.steps=100000", cache=cache)
    wait_for(process, lambda: len(losses(path)) >= 3)
    process.send_signal(signal.SIGTERM)
    code, text = finish(process)
    assert code == 75 and "the run stopped after step" in text
    end = events(path, "run_end")[0]
    assert end["outcome"] == "stopped" and end["checkpoint_step"] == end["step"]


def test_ranks_stop_when_their_launcher_is_killed(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = start("--dir", str(path), "--processes", "2", "mesh.dp_replicate=2", "train.steps=100000", cache=cache)
    wait_for(process, lambda: len(losses(path)) >= 3)
    process.kill()
    deadline = time.monotonic() + DEADLINE_S
    while not events(path, "run_end") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.communicate()
    end = events(path, "run_end")[0]
    assert (end["outcome"], end["reason"]) == ("stopped", "the launcher is gone") and end["checkpoint_step"] == end["step"]


def test_errors_come_before_any_process_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", RECIPE, "--processes", "3", "mesh.dp_replicate=2"]) == 2
    assert "3" in capsys.readouterr().err and not Path("runs").exists()


STOPS_AT_THE_END = """
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def after_step(run, summary):
    if summary.step == run.recipe.train.steps - 1:
        run.request_stop("enough")
"""


def test_a_stop_that_comes_too_late_is_no_stop_on_any_rank(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer asks on rank 0, after the last step: no step is left in which the ranks could agree, so all of them finish."""
    (tmp_path / "acme_stop.py").write_text(STOPS_AT_THE_END)
    (tmp_path / "acme_stop-1.0.dist-info").mkdir()
    (tmp_path / "acme_stop-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-stop\nVersion: 1.0\n")
    (tmp_path / "acme_stop-1.0.dist-info" / "entry_points.txt").write_text("[intarsia]\nstop = acme_stop\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("INTARSIA_CHECK_COLLECTIVES", "1")
    path = tmp_path / "run"
    code, text = finish(start("--dir", str(path), "--processes", "2", "mesh.dp_replicate=2", cache=cache))
    assert code == 0, text
    end = events(path, "run_end")[0]
    assert (end["outcome"], end["step"], end["checkpoint_step"]) == ("done", 8, 8)
    assert events(path, "evaluation")[-1]["step"] == 8


def test_a_rank_refuses_to_run_with_other_plugins_than_its_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"fingerprint": "other", "plugins": {"acme-gone/gone": "1.0"}}
    monkeypatch.setenv("INTARSIA_PLUGINS_EXPECTED", json.dumps(expected))
    assert main(["train", RECIPE, "--dir", str(tmp_path / "run")]) == 3
    assert "acme-gone/gone 1.0 is missing" in capsys.readouterr().err and not (tmp_path / "run").exists()
