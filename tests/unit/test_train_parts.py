"""Schedules, parameter groups, progress lines, resume rules, `intarsia show`."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.checkpoint.facts import check_changes, compare_facts
from intarsia.config import ParameterGroup
from intarsia.errors import UsageError
from intarsia.train.events import EventLog
from intarsia.train.groups import assign, freeze, optimizer_groups
from intarsia_console.progress import Progress, clock, short
from intarsia_console.show import spark, summary, text_lines
from intarsia_optimizers.config import ConstantConfig, CosineConfig, LinearConfig, SqrtConfig, WSDConfig
from intarsia_optimizers.schedules import build_constant, build_cosine, build_linear, build_sqrt, build_wsd
from torch import nn

# ---------------------------------------------------------------- schedules


def test_warm_up_rises_linearly_and_never_starts_at_zero() -> None:
    schedule = build_constant(ConstantConfig(warmup_steps=4))
    assert [schedule.factor(step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_to_the_floor_after_the_last_step() -> None:
    line = build_linear(LinearConfig(warmup_steps=2, floor=0.2))
    assert line.factor(2, 10) == 1.0
    assert line.factor(6, 10) == pytest.approx(0.6)
    assert line.factor(9, 10) == pytest.approx(0.3)
    assert line.factor(10, 10) == pytest.approx(0.2)
    wave = build_cosine(CosineConfig(floor=0.1))
    assert wave.factor(5, 10) == pytest.approx(0.55)
    assert wave.factor(10, 10) == pytest.approx(0.1)


def test_wsd_is_stable_until_the_decay() -> None:
    share = build_wsd(WSDConfig(warmup_steps=2, decay=0.2))
    assert [share.factor(step, 10) for step in (1, 2, 7, 8, 9)] == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5])
    steps = build_wsd(WSDConfig(decay=4, shape="sqrt"))
    assert steps.factor(6, 10) == 1.0
    assert steps.factor(7, 10) == pytest.approx(1 - math.sqrt(0.25))
    longer_than_the_run = build_wsd(WSDConfig(decay=100))
    assert longer_than_the_run.factor(5, 10) == pytest.approx(0.5)


def test_sqrt_halves_at_four_times_the_timescale() -> None:
    schedule = build_sqrt(SqrtConfig(warmup_steps=10))
    assert schedule.factor(10, 1000) == 1.0
    assert schedule.factor(10 + 30, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: build_linear(LinearConfig(floor=1.5)), "floor is 1.5"),
        (lambda: build_constant(ConstantConfig(warmup_steps=-1)), "warmup_steps is -1"),
        (lambda: build_wsd(WSDConfig(shape="lineer")), "'linear'"),
        (lambda: build_wsd(WSDConfig(decay=-0.5)), "decay is -0.5"),
        (lambda: build_sqrt(SqrtConfig()), "timescale is 0"),
    ],
)
def test_schedules_refuse_what_makes_no_sense(make, text) -> None:
    with pytest.raises(UsageError, match=text):
        make()


# ---------------------------------------------------------------- groups


NAMES = ["embedding.weight", "layers.0.norm.weight", "layers.0.wq.weight", "layers.1.norm.weight", "layers.1.wq.weight"]


def test_first_matching_group_wins() -> None:
    groups = [ParameterGroup(name="norms", match=("*.norm.*",)), ParameterGroup(name="layers", match=("layers.*",))]
    assert list(assign(groups, NAMES).values()) == ["default", "norms", "layers", "norms", "layers"]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([ParameterGroup(name="a", match=("layers.0.wk.weight",))], "matches no parameter.*layers.0.wq.weight"),
        ([ParameterGroup(name="default", match=("*",))], "two parameter groups 'default'"),
        ([ParameterGroup(name="a", match=("*",)), ParameterGroup(name="a", match=("*",))], "two parameter groups 'a'"),
    ],
)
def test_groups_that_cannot_be_meant_are_refused(groups, text) -> None:
    with pytest.raises(UsageError, match=text):
        assign(groups, NAMES)


def test_frozen_groups_are_kept_from_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [
        ParameterGroup(name="still", match=("0.*",), frozen=True),
        ParameterGroup(name="slow", match=("*.bias",), options={"lr": 0.1}),
    ]
    freeze(groups, model)
    parameters = dict(model.named_parameters())
    made = optimizer_groups(groups, parameters, [name for name, value in parameters.items() if value.requires_grad])
    assert [(group.name, list(group.parameters), dict(group.options)) for group in made] == [
        ("slow", ["1.bias"], {"lr": 0.1}),
        ("default", ["1.weight"], {}),
    ]
    with pytest.raises(UsageError, match="No parameter trains"):
        freeze([ParameterGroup(name="all", match=("*",), frozen=True)], model)


# ---------------------------------------------------------------- resume


def test_resume_stops_at_another_model_and_warns_of_another_learning_rate() -> None:
    saved = {
        "recipe": {"model.dim": 32, "optimizer.lr": 0.1, "checkpoint.every": 5},
        "world": 1,
        "plugins": [{"distribution": "a", "version": "1"}],
    }
    now = {
        "recipe": {"model.dim": 64, "optimizer.lr": 0.2, "checkpoint.every": 7},
        "world": 2,
        "plugins": [{"distribution": "a", "version": "2"}],
    }
    differences = compare_facts(saved, now)
    with pytest.raises(UsageError, match=r"model.dim: was 32, is 64") as error:
        check_changes(differences, False, "runs/x/checkpoints/step-5")
    assert "--allow-changes" in str(error.value)
    warnings = check_changes(differences, True, "runs/x")
    assert any("optimizer.lr: was 0.1, is 0.2" in text for text in warnings)
    assert any("plugin a: was '1', is '2'" in text for text in warnings)
    assert not any("checkpoint.every" in text for text in warnings)


# ---------------------------------------------------------------- progress and show


STEP = {
    "event": "step",
    "loss": 2.5,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "tokens_per_s": 12345.0,
    "mfu": 0.41,
    "memory_bytes": 2e9,
}


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    display = Progress(1.0, stream)
    display.write({"event": "run_start", "steps": 3, "directory": "runs/a"})
    for step in (1, 2, 3):
        display.write({**STEP, "step": step})
    display.write({"event": "evaluation", "step": 3, "loss": 2.0, "bits_per_byte": 1.5})
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines.pop(0) == "run directory runs/a"
    assert lines[0].startswith("step 1/3  loss 2.5000") and "12.3k tok/s" in lines[0] and "MFU 41.0%" in lines[0] and "mem 2GB" in lines[0]
    assert "ETA" in lines[-2] and "step 3/3" in lines[-2]
    assert "bits/byte 1.5000" in lines[-1]
    assert "\r" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_live_line_on_a_terminal() -> None:
    stream = Terminal()
    display = Progress(1.0, stream)
    display.write({"event": "run_start", "steps": 2, "directory": "runs/a"})
    display.write({**STEP, "step": 1})
    display.write({**STEP, "step": 2})
    display.write({"event": "checkpoint", "step": 2, "location": "here"})
    display.close()
    assert stream.getvalue().count("\r") == 2
    assert stream.getvalue().endswith("\ncheckpoint after step 2  here\n")


def test_a_line_of_rollouts_says_how_the_policy_goes() -> None:
    stream = io.StringIO()
    display = Progress(1.0, stream)
    display.write({"event": "run_start", "steps": 1, "directory": "runs/a"})
    rollouts = {"reward": 0.5, "lag": {"max": 1.0}, "gap": 0.0, "idle": {"trainer": 0.5, "generators": 0.08}, "length": {"mean": 7.25}}
    display.write({"event": "rollouts", **rollouts, "failures": {"tool": 2, "scorer": 1}, "kills": {"generators": 0, "workers": 0}})
    display.write({**STEP, "step": 1, "metrics": {"entropy": 2.481, "kl": 0.0016, "clip_share": 0.0219}})
    line = stream.getvalue().splitlines()[-1]
    assert "reward 0.5  lag 1  gap 0  idle 50%/8%  loss" in line
    assert "length 7.25  entropy 2.48  kl 0.0016  clip 2.2%  failed 3  " in line and "killed" not in line


def test_numbers_and_times_are_short() -> None:
    assert [short(value) for value in (0.5, 999, 1234, 5_600_000)] == ["0.5", "999", "1.23k", "5.6M"]
    assert [clock(value) for value in (5, 65, 3723)] == ["00:05", "01:05", "1:02:03"]


def test_show_takes_the_last_attempt_of_each_step(tmp_path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    log = EventLog(tmp_path)
    log.write("run_start", run="tiny", steps=4, world=1, device="cpu", versions={"torch": "2"})
    for step, loss in ((1, 4.0), (2, 3.0), (3, 9.0)):
        log.write("step", step=step, loss=loss)
    log = EventLog(tmp_path)
    log.write("run_start", run="tiny", steps=4, world=1, device="cpu", versions={"torch": "2"})
    log.write("resume", step=2, location="x")
    for step, loss in ((3, 2.0), (4, 1.0)):
        log.write("step", step=step, loss=loss)
    found = summary(tmp_path)
    assert found["curves"]["step.loss"] == [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]]
    assert (found["attempts"], found["outcome"]) == (2, "running or killed")
    log.write("run_end", outcome="failed", step=4, error={"type": "UsageError", "message": "made by another run\nmodel.dim"})
    assert "failed: UsageError: made by another run" in text_lines(summary(tmp_path), 20, "_.-=+*%#")[1]
    log.write("run_end", outcome="done", step=4)
    found = summary(tmp_path)
    assert found["outcome"] == "done"
    text = "\n".join(text_lines(json.loads(json.dumps(found)), 20, "_.-=+*%#"))
    assert "4 of 4" in text and "4 -> 1 (least 1)" in text and "resume       after step 2" in text


def test_sparks_are_as_wide_as_asked() -> None:
    assert spark([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert len(spark(list(range(1000)), 30)) == 30
    assert spark([3.0, 3.0], 8) == "▁▁"
    assert spark([], 8) == ""


def test_a_sink_that_seeds_moves_no_generator(tmp_path: Path) -> None:
    class Seeding:
        def write(self, event: Mapping[str, Any]) -> None:
            torch.manual_seed(1)
            random.seed(1)

        close = torch.seed

    log = EventLog(tmp_path, [("acme:seeding", Seeding())])
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    log.write("step")
    log.close()
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
