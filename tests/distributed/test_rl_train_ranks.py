"""Rollouts on several trainer ranks: one controller, the same samples, the losses of one process; a position saved by one mesh is taken up by another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _spawn import spawn
from intarsia_rl.controller.writer import files, read

RUN = [
    "arithmetic/debug", "data.loader.generator=scripted", "data.loader.generator.vocab_size=17", "data.loader.generator.stop_id=12", "data.loader.groups=3",
    "data.loader.group=3", "data.loader.max_lag=0", "data.loader.held_out.tasks=3", "train.sequence_length=16", "train.micro_batch=2", "checkpoint.every=2",
]  # fmt: skip


def work(*arguments: str) -> int:
    """A rank of `intarsia train`, whose controller and all that this starts are objects in rank 0's process."""
    from intarsia.cli import main
    from intarsia_rl.processes.local import LocalProcesses
    from intarsia_testing.rl_doubles import InProcessLauncher

    launcher = InProcessLauncher()
    LocalProcesses.start = lambda self, *given: launcher.start(*given)  # type: ignore[assignment,method-assign]
    return main(["train", *arguments, "--quiet"])


def found(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The rollouts, and the step events."""
    rollouts = {
        file.name: [{**record, "timings_s": None} for record in read(file)]
        for kind, _, file in files(path / "rollouts")
        if kind != "trained"
    }
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return rollouts, {event["step"]: event for event in events if event["event"] == "step"}


@pytest.mark.parametrize("mesh", [[], ["mesh.tp=2"]], ids=["dp2", "tp2"])
def test_two_ranks_train_on_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: list[str]) -> None:
    from intarsia_testing.rl_doubles import offered

    offered(tmp_path / "site", monkeypatch)
    monkeypatch.chdir(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    assert spawn(work, 1, *RUN, "--dir", str(one), "train.steps=4", world=False) == [0]
    assert spawn(work, 2, *RUN, "--dir", str(two), "train.steps=2", *mesh, world=False) == [0, 0]
    assert spawn(work, 2, "--resume", str(two), "train.steps=4", world=False) == [0, 0]
    (first, steps), (second, others) = found(one), found(two)
    second.pop("held_out-000002.jsonl")
    assert first == second and len(first) == 6
    for step, event in steps.items():
        assert event["counted_tokens"] == others[step]["counted_tokens"]
        if step <= 2:  # later ones follow the schedule of a longer run
            assert event["loss"] == pytest.approx(others[step]["loss"], abs=1e-6)
            assert event["gradient_norm"] == pytest.approx(others[step]["gradient_norm"], rel=1e-3)
