"""`intarsia train` with FlexShard's own words: two processes with split masters and Muon, a trace and a timeline of a step, and the same run resumed on one, in other ways."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from intarsia.cli import main
from intarsia_console.events import read_events

RECIPE = f"{Path(__file__).with_name('train_recipes.py')}:tiny"
SETTINGS = ("sharder=flexshard", "sharder.placement=flat", "sharder.master=split", "precision.compute=bfloat16", "optimizer=muon")
DEADLINE_S = 600
# bfloat16 gradients of other micro-batches round otherwise.
ROUNDING = 1e-4


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(path) if event["event"] == kind]


def numbers(path: Path) -> dict[int, tuple[float, float]]:
    return {event["step"]: (event["loss"], event["gradient_norm"]) for event in events(path, "step")}


def intarsia(*arguments: str) -> str:
    command = [sys.executable, "-m", "intarsia", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes."""
    path = tmp_path_factory.mktemp("two") / "run"
    more = (f"data.cache={path.parent / 'cache'}", "checkpoint.keep_last=0", "profile.steps=1", "--quiet")
    intarsia("train", RECIPE, "--dir", str(path), "--processes", "2", *SETTINGS, *more)
    return path


def cut_off(run: Path, path: Path) -> Path:
    """The run as it was after its first checkpoint."""
    shutil.copytree(run, path)
    for step in (6, 8):
        shutil.rmtree(path / "checkpoints" / f"step-{step:08}")
    return path


def test_two_processes_learn(two: Path) -> None:
    losses = [loss for loss, _ in numbers(two).values()]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.05
    (start,) = events(two, "run_start")
    assert start["world"] == 2 and events(two, "run_end")[0]["outcome"] == "done"


def test_a_step_that_was_asked_for_has_a_timeline_and_named_phases(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (timeline,) = events(two, "timeline")
    assert (timeline["step"], timeline["rank"], timeline["clock"]) == (2, 0, "host")
    parts = ("compute_ms", "exposed_ms", "update_ms", "rest_ms")
    assert all(timeline[part] > 0 for part in parts)
    assert sum(timeline[part] for part in parts) == pytest.approx(timeline["step_ms"])
    seconds = next(event["seconds_s"] for event in events(two, "step") if event["step"] == 2)
    assert timeline["step_ms"] <= seconds * 1000
    assert [row["bucket"] for row in timeline["buckets"]] == ["root", "layers.0", "layers.1"]
    assert all(row["gathered_bytes"] > 0 < row["reduced_bytes"] and row["reductions"] == 1 for row in timeline["buckets"])
    for rank in (0, 1):
        trace = json.loads((two / "traces" / f"step-000001-rank-{rank:04}.json").read_text("utf-8"))
        names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        assert names >= {f"{phase} layers.1" for phase in ("gather", "wait", "forward", "backward", "reduce", "wait for sum of")}
        assert any(name.startswith("update ") for name in names)
    assert main(["show", str(two)]) == 0
    text = capsys.readouterr().out
    assert "step 2 on rank 0" in text and "by the host's clock: compute" in text and text.count("  layers.") == 2
    assert main(["show", str(two), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["timelines"] == [timeline]


def test_two_processes_go_on_as_if_never_cut_off(two: Path, tmp_path: Path) -> None:
    path = cut_off(two, tmp_path / "run")
    intarsia("train", "--resume", str(path), "--processes", "2", "profile.steps=[]", "--quiet")
    assert events(path, "resume")[0]["step"] == 3
    again = events(path, "step")[8:]
    assert [(event["step"], event["loss"], event["gradient_norm"]) for event in again] == [
        (step, *values) for step, values in numbers(two).items() if step > 3
    ]


@pytest.mark.parametrize(
    "other",
    [(), ("sharder.placement=owned", "sharder.master=float32"), ("sharder.placement=row", "sharder.offload=low", "sharder.reshard=never")],
    ids=["as it was", "owned, whole masters", "row, halves in the host's memory"],
)
def test_one_process_goes_on_from_the_same_numbers(two: Path, tmp_path: Path, other: tuple[str, ...]) -> None:
    """The first loss after the resume is that of the same weights on the same rows; later ones differ by how bfloat16 gradients round."""
    path = cut_off(two, tmp_path / "run")
    assert main(["train", "--resume", str(path), *other, "profile.steps=[]", "--quiet"]) == 0
    again = {event["step"]: event["loss"] for event in events(path, "step")[8:]}
    assert sorted(again) == [4, 5, 6, 7, 8]
    assert again[4] == pytest.approx(numbers(two)[4][0], rel=1e-6)
    assert list(again.values()) == pytest.approx([loss for step, (loss, _) in numbers(two).items() if step > 3], rel=ROUNDING)
