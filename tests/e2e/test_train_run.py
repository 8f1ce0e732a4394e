"""`intarsia train` and `intarsia show` as a user calls them, in this process: what a run leaves, resumes, refusals, numbers."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia import plugins
from intarsia.cli import main
from intarsia.discovery import Candidate, scan
from intarsia.hookspecs import hookimpl
from intarsia.train.events import append_event
from intarsia.train.run_directory import RunDirectory
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_checkpoint_posix.storage import PosixWriter
from intarsia_console.events import read_events
from intarsia_models_common.feed_forward import SwiGLU

RECIPE = f"{Path(__file__).with_name('train_recipes.py')}:tiny"

Train = Callable[..., int]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token stores, made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def train(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Runs `intarsia train` in an empty folder; the recipe is the tiny one unless --resume or another is named."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, recipe: str | None = RECIPE) -> int:
        return main(["train", *([recipe] if recipe else []), *arguments, f"data.cache={cache}", "--quiet"])

    yield call
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def unbroken(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one whole run of the tiny recipe that keeps every checkpoint."""
    path = tmp_path_factory.mktemp("unbroken") / "run"
    assert main(["train", RECIPE, "--dir", str(path), "checkpoint.keep_last=0", f"data.cache={cache}", "--quiet"]) == 0
    return path


def events(path: Path | str, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(Path(path)) if event["event"] == kind]


def steps(path: Path | str) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of each step; of a repeated one the last."""
    return {event["step"]: (event["loss"], event["gradient_norm"], event["learning_rate"]) for event in events(path, "step")}


def tensors(path: Path | str, step: int) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(Path(path) / "checkpoints" / f"step-{step:08}")
    return {
        key: checkpoint.read(key)
        for key in list(checkpoint.keys())
        if key.startswith(("model/", "optimizer/")) and not key.endswith("/step")
    }


def cut_back(source: Path, target: Path, step: int) -> None:
    """A copy of a run whose newest checkpoint is that of `step`."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


# ---------------------------------------------------------------- what a run leaves


def test_a_run_leaves_what_the_documentation_says(unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"recipe.json", "resolved.json", "plugins.json", "events.jsonl", "metrics", "traces", "checkpoints", "run.lock"} <= {
        p.name for p in unbroken.iterdir()
    }
    kinds = [event["event"] for event in read_events(unbroken)]
    assert kinds[:8] == ["run_start", *["build"] * 7] and kinds[-1] == "run_end"
    assert list(steps(unbroken)) == list(range(1, 9))
    assert [event["step"] for event in events(unbroken, "evaluation")] == [4, 8]
    assert sorted(event["step"] for event in events(unbroken, "checkpoint")) == [3, 6, 8]
    evaluations = events(unbroken, "evaluation")
    assert evaluations[1]["bits_per_byte"] < evaluations[0]["bits_per_byte"] < 8.2
    end = events(unbroken, "run_end")[0]
    assert (end["outcome"], end["step"], end["checkpoint_step"], end["error"]) == ("done", 8, 8, None)
    decisions = json.loads((unbroken / "resolved.json").read_text())["decisions"]
    assert decisions["sharder"]["value"] == "intarsia-eager:whole" and decisions["kernels.attention"]["reason"]
    assert main(["show", str(unbroken)]) == 0
    shown = capsys.readouterr().out
    assert "outcome      done" in shown and "evaluation.bits_per_byte" in shown and "8 of 8" in shown
    assert main(["show", str(unbroken), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["curves"]["step.loss"]) == 8


def test_show_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_a_run_directory_is_a_recipe(train: Train, unbroken: Path) -> None:
    assert train("--name", "again", recipe=str(unbroken)) == 0
    assert steps("runs/again") == steps(unbroken)


# ---------------------------------------------------------------- resuming


def test_resume_equals_never_having_stopped(train: Train, unbroken: Path) -> None:
    cut_back(unbroken, Path("cut"), 3)
    assert train("--resume", "cut", recipe=None) == 0
    assert steps("cut") == steps(unbroken)
    assert [event["step"] for event in events("cut", "resume")] == [3]
    assert events("cut", "run_end")[-1]["tokens_total"] == 8 * 5 * 24
    first, second = tensors(unbroken, 8), tensors("cut", 8)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_resume_with_fewer_steps_than_were_done_evaluates_and_says_so(train: Train, unbroken: Path) -> None:
    cut_back(unbroken, Path("cut"), 6)
    before = steps("cut")
    assert train("--resume", "cut", "train.steps=4", recipe=None) == 0
    assert steps("cut") == before and events("cut", "evaluation")[-1]["step"] == 6
    told = [event["message"] for event in events("cut", "warning")]
    assert any("The checkpoint is of step 6, and train.steps is 4: nothing is trained" in each for each in told), told


def test_resume_with_muon(train: Train) -> None:
    arguments = ("optimizer=muon", "checkpoint.keep_last=0", "train.steps=4")
    assert train("--name", "whole", *arguments) == 0
    (split,) = [event for event in events("runs/whole", "build") if event["stage"] == "optimizer"]
    # Seven matrices in each of two blocks; embedding, head and five norms.
    assert split["slots"] == {"momentum": 14, "exp_avg, exp_avg_sq, step": 7} and split["groups"] == {"default": 21}
    assert split["learning_rates"] == {"default": 0.02, "default.adamw": 0.003}
    cut_back(Path("runs/whole"), Path("cut"), 3)
    assert train("--resume", "cut", recipe=None) == 0
    assert steps("cut") == steps("runs/whole")


def test_evaluation_that_draws_changes_nothing_that_follows(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SwiGLU.forward
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: torch.nn.functional.dropout(forward(self, x), 0.5, training=True))
    every = ("train.steps=5", "checkpoint.keep_last=0")
    assert train("--name", "whole", *every, "evaluation.every=3") == 0
    assert train("--name", "quiet", *every, "evaluation.every=0") == 0
    cut_back(Path("runs/whole"), Path("cut"), 3)  # saved before the evaluation of the same step
    assert train("--resume", "cut", recipe=None) == 0
    assert steps("cut") == steps("runs/whole") == steps("runs/quiet")


def test_resume_of_another_model_shows_both_sides(train: Train, unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_back(unbroken, Path("cut"), 3)
    assert train("--resume", "cut", "train.seed=7", recipe=None) == 2
    text = capsys.readouterr().err
    assert "train.seed: was 0, is 7" in text and "--allow-changes" in text
    assert train("--resume", "cut", "optimizer.lr=0.002", recipe=None) == 0
    warnings = [event["message"] for event in events("cut", "warning")]
    assert any("optimizer.lr: was 0.01, is 0.002" in text for text in warnings)


def test_resume_without_a_checkpoint_begins_anew(train: Train) -> None:
    assert train("--name", "a", "train.steps=2", "checkpoint.every=0") == 0
    assert train("--resume", "runs/a", recipe=None) == 0
    assert len(events("runs/a", "run_start")) == 2 and list(steps("runs/a")) == [1, 2]
    assert "no complete checkpoint" in events("runs/a", "warning")[0]["message"]


def test_a_refused_build_does_not_take_the_directory(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--name", "a", "train.steps=1", "kernels.attention=spda") == 2
    assert "'sdpa'" in capsys.readouterr().err and not Path("runs/a").exists()
    assert train("--name", "a", "train.steps=1", "model.vocab_size=100") == 2
    assert train("--name", "a", "train.steps=1") == 0
    assert train("--name", "a", "train.steps=1") == 2
    assert "holds a run already" in capsys.readouterr().err


def test_resume_names_what_is_missing(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--resume", "nowhere", recipe=None) == 2
    assert train("--resume") == 2
    assert train(recipe=None) == 2
    text = capsys.readouterr().err
    assert "nowhere is no run directory" in text and "no run of 'tiny'" in text and "Which recipe?" in text


def test_a_damaged_checkpoint_is_skipped_and_told(train: Train, unbroken: Path) -> None:
    cut_back(unbroken, Path("cut"), 6)
    data = next(
        path for path in (Path("cut") / "checkpoints" / "step-00000006").rglob("*") if path.is_file() and path.stat().st_size > 5000
    )
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    assert train("--resume", "cut", recipe=None) == 0
    assert [event["step"] for event in events("cut", "resume")] == [3]
    assert any("step-00000006" in event["message"] for event in events("cut", "warning"))
    assert steps("cut") == steps(unbroken)


def test_resume_before_the_first_checkpoint_begins_with_the_weights_that_were_given(train: Train, unbroken: Path) -> None:
    assert train("--name", "a", "train.steps=2", "checkpoint.every=0", "--init-from", str(unbroken)) == 0
    first = steps("runs/a")
    assert train("--resume", "runs/a", recipe=None) == 0
    assert len(events("runs/a", "initialise")) == 2 and steps("runs/a") == first
    assert train("--resume", "runs/a", "checkpoint.every=1", recipe=None) == 0
    assert train("--resume", "runs/a", "train.steps=3", recipe=None) == 0
    assert [event["step"] for event in events("runs/a", "resume")] == [2] and len(events("runs/a", "initialise")) == 3


@pytest.mark.parametrize("part", ["data", "manifest.json"])
def test_a_run_whose_every_checkpoint_is_damaged_does_not_begin_anew(
    train: Train, unbroken: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_back(unbroken, Path("cut"), 6)
    for folder in (Path("cut") / "checkpoints").iterdir():
        path = next(path for path in (folder / part, *(folder / part).glob("*")) if path.is_file())
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    before = len(steps("cut"))
    assert train("--resume", "cut", recipe=None) == 5
    text = capsys.readouterr().err
    assert "Every checkpoint of cut is damaged" in text and "step-00000003: " in text and "step-00000006: " in text
    assert len(events("cut", "step")) == before


def test_resume_with_another_optimizer_says_what_to_do(train: Train, unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_back(unbroken, Path("cut"), 3)
    assert train("--resume", "cut", "optimizer=muon", recipe=None) == 2
    text = capsys.readouterr().err
    assert "intarsia-optimizers:adamw" in text and "intarsia-optimizers:muon" in text and "--init-from" in text
    assert train("--resume", "cut", "optimizer=muon", "--allow-changes", recipe=None) == 5
    text = capsys.readouterr().err
    assert "/momentum" in text and "--init-from cut/checkpoints/step-00000003" in text.replace(str(Path.cwd()) + "/", "")
    frozen = ("parameter_groups.0.name=kept", 'parameter_groups.0.match=["layers.0.*"]', "parameter_groups.0.frozen=true")
    assert train("--resume", "cut", *frozen, recipe=None) == 5
    assert "only in the checkpoint" in capsys.readouterr().err
    assert train("--name", "new", "optimizer=muon", "train.steps=1", "--init-from", "cut/checkpoints/step-00000003") == 0


def test_kernels_stay_chosen_until_the_recipe_names_them(train: Train, unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_back(unbroken, Path("cut"), 3)
    path = Path("cut/resolved.json")
    resolved = json.loads(path.read_text())
    resolved["decisions"]["kernels.linear"]["value"] = "intarsia-kernels:onednn"
    path.write_text(json.dumps(resolved))
    half = ("sharder=flexshard", "precision.compute=bfloat16", "train.steps=4")
    assert train("--resume", "cut", *half, recipe=None) == 2
    assert "onednn for operator linear cannot be used" in (text := capsys.readouterr().err) and "kernels.linear=auto" in text
    assert train("--resume", "cut", *half, "kernels.linear=auto", recipe=None) == 0
    assert json.loads(path.read_text())["decisions"]["kernels.linear"]["value"] == "intarsia-kernels:placed"
    resolved["decisions"]["kernels.rope"]["value"] = "another"
    path.write_text(json.dumps(resolved))
    assert train("--resume", "cut", "kernels.*=reference", "train.steps=5", recipe=None) == 0
    # What was named by itself, `kernels.linear=auto`, stays that.
    chosen = {name: d["value"] for name, d in json.loads(path.read_text())["decisions"].items() if name.startswith("kernels.")}
    assert chosen.pop("kernels.linear") == "intarsia-kernels:placed" and set(chosen.values()) == {"reference"}


# ---------------------------------------------------------------- how a run ends badly


def test_a_directory_in_use_and_an_existing_one_are_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    holder = RunDirectory(Path("runs/a"))
    holder.create(resume=False)
    assert train("--name", "a") == 2
    assert "in use by another run" in capsys.readouterr().err
    holder.write("recipe.json", {})
    append_event(holder.path, "step", step=1)
    holder.release()
    assert train("--name", "a") == 2
    assert "--resume runs/a" in capsys.readouterr().err


def test_not_a_number_ends_the_run_and_keeps_the_last_good_checkpoint(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--name", "a", "optimizer.lr=1e38", "checkpoint.every=1", "schedule.warmup_steps=1") == 4
    text = capsys.readouterr().err
    assert "Step 1 is not finite" in text and "First offending module: " in text and "on rank 0" in text
    assert "last good checkpoint is runs/a/checkpoints/step-00000001" in text
    assert [path.name for path in Path("runs/a/checkpoints").iterdir()] == ["step-00000001"]
    end = events("runs/a", "run_end")[0]
    assert end["outcome"] == "failed" and end["error"]["type"] == "NumericsError" and end["step"] == 1


def test_a_full_disk_ends_the_run_with_the_step_and_keeps_what_was_saved(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = PosixWriter.write

    def full(self: PosixWriter, data: bytes | memoryview) -> None:
        if any("checkpoint" in event["event"] for event in read_events(Path("runs/a"))):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(PosixWriter, "write", full)
    assert train("--name", "a", "train.steps=40") == 5
    text = capsys.readouterr().err
    assert "Saving the checkpoint of step " in text and "No space left on device" in text
    end = events("runs/a", "run_end")[0]
    assert end["outcome"] == "failed" and end["error"]["type"] == "CheckpointError" and end["step"] < 40
    assert end["checkpoint_step"] == 3
    assert train("--resume", "runs/a", recipe=None) == 5
    assert [event["step"] for event in events("runs/a", "resume")] == [3]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mesh.dp_shard=3"], "3 processes"),
        (["mesh.tp=2"], "2"),
        (["train.sequence_length=100"], "model.max_positions"),
        (["model.vocab_size=100"], "vocabulary"),
        (["optimizer=adamv"], "adamw"),
        (["train.threads=0"], "train.threads"),
        (["compile.mode=locl"], "'local'"),
        (["recompute.mode=block"], "'blocks'"),
        (["schedule.floor=2.0"], "schedule.floor"),
        (["--processes", "0"], "--processes is 0"),
        (["--resume", "x", "--name", "y"], "leave out"),
    ],
)
def test_bad_requests(train: Train, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*arguments) == 2
    assert text in capsys.readouterr().err


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.micro_batch=5"],
        ["train.micro_batch=1"],
        ["compile.mode=local", "compile.backend=eager"],
    ],
)
def test_losses_do_not_depend_on_how_the_step_is_computed(train: Train, unbroken: Path, arguments: list[str]) -> None:
    assert train("--name", "a", "train.steps=4", *arguments, "schedule=constant", "schedule.warmup_steps=3") == 0
    assert train("--name", "b", "train.steps=4", "schedule=constant", "schedule.warmup_steps=3") == 0
    first, second = steps("runs/a"), steps("runs/b")
    assert [loss for loss, _, _ in first.values()] == pytest.approx([loss for loss, _, _ in second.values()], rel=1e-5)
    assert [norm for _, norm, _ in first.values()] == pytest.approx([norm for _, norm, _ in second.values()], rel=1e-4)
    assert events("runs/a", "evaluation")[-1]["loss"] == pytest.approx(events("runs/b", "evaluation")[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputation_changes_no_bit(train: Train, unbroken: Path, every: int) -> None:
    assert train("--name", "a", "recompute.mode=blocks", f"recompute.every={every}", "train.deterministic=true") == 0
    assert steps("runs/a") == steps(unbroken)


def test_frozen_parameters_stay_and_the_others_train(train: Train, cache: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "frozen.py"
    recipe.write_text(
        "import importlib.util, chz\nfrom intarsia.config import ParameterGroup\n"
        f"spec = importlib.util.spec_from_file_location('base', {RECIPE.rpartition(':')[0]!r})\n"
        "base = importlib.util.module_from_spec(spec); spec.loader.exec_module(base)\n"
        "def frozen():\n    groups = (ParameterGroup(name='still', match=('tok_embeddings.*',), frozen=True),"
        " ParameterGroup(name='slow', match=('layers.0.*',), options={'lr': 0.0}))\n"
        "    return chz.replace(base.tiny(), parameter_groups=groups)\n"
    )
    assert train("--name", "a", "checkpoint.keep_last=0", recipe=f"{recipe}:frozen") == 0
    before, after = tensors("runs/a", 3), tensors("runs/a", 8)
    same = {key for key in before if key.startswith("model/") and torch.equal(before[key], after[key])}
    assert "model/tok_embeddings.weight" in same and all("layers.0." in key or "tok_embeddings" in key for key in same)
    assert not any("tok_embeddings" in key for key in before if key.startswith("optimizer/"))


def test_the_end_of_the_data_is_an_orderly_end(train: Train) -> None:
    assert (
        train(
            "--name",
            "a",
            "data.epochs=1",
            "data.mixture.0.source.limit=1",
            "data.held_out=0.0",
            "train.steps=100000",
            "train.global_batch=64",
            "train.micro_batch=64",
        )
        == 0
    )
    end = events("runs/a", "run_end")[0]
    assert end["outcome"] == "done" and 0 < end["step"] < 100000 and end["checkpoint_step"] == end["step"]
    assert any("The data ended" in event["message"] for event in events("runs/a", "warning"))


def test_profiled_steps_leave_chrome_traces(train: Train) -> None:
    assert train("--name", "a", "train.steps=3", "profile.steps=[1]") == 0
    traces = list(Path("runs/a/traces").iterdir())
    assert [path.name for path in traces] == ["step-000001-rank-0000.json"]
    assert json.loads(traces[0].read_text())["traceEvents"]


def test_log_every_thins_step_events_only(train: Train) -> None:
    assert train("--name", "a", "train.steps=5", "train.log_every=2") == 0
    assert list(steps("runs/a")) == [2, 4, 5] and events("runs/a", "step")[-1]["tokens_total"] == 5 * 5 * 24


# ---------------------------------------------------------------- plugins


class Watcher:
    """Stops after step 3, seeds the global generator at build, and has an observer that fails."""

    INTARSIA_API = 1

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @hookimpl
    def after_build(self, run: Any, stage: str) -> None:
        torch.manual_seed(999)
        self.calls.append(stage)

    @hookimpl
    def before_update(self, run: Any, step: int) -> None:
        self.calls.append(("update", step))

    @hookimpl
    def after_step(self, run: Any, summary: Any) -> None:
        if summary.step == 2:
            run.request_stop("three are enough")

    @hookimpl
    def after_evaluation(self, run: Any, step: int, metrics: Any) -> None:
        raise ValueError("broken observer")

    @hookimpl
    def after_run(self, run: Any, outcome: str) -> None:
        self.calls.append(outcome)


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    made = Watcher()
    plugins.use(plugins.load(entry_points=[*scan(), Candidate("acme-watcher", "1", "watcher", plugin=made)]))
    yield made
    plugins.use(None)


def test_hooks_see_the_run_and_may_stop_it(train: Train, unbroken: Path, watcher: Watcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--name", "a", "evaluation.every=2") == 75
    assert "three are enough: the run stopped after step 3 of 8" in capsys.readouterr().err
    assert watcher.calls == [
        "mesh",
        "data",
        "model",
        "parameters",
        "optimizer",
        "engine",
        "checkpoint",
        *[("update", step) for step in range(3)],
        "stopped",
    ]
    end = events("runs/a", "run_end")[0]
    assert (end["outcome"], end["reason"], end["checkpoint_step"]) == ("stopped", "three are enough", 3)
    messages = [event["message"] for event in events("runs/a", "warning")]
    assert any("broken observer" in text for text in messages) and any("global generator" in text for text in messages)
    assert steps("runs/a") == {step: value for step, value in steps(unbroken).items() if step <= 3}


class Wrecker:
    """A participant that raises."""

    INTARSIA_API = 1

    @hookimpl
    def before_step(self, run: Any, step: int) -> None:
        if step == 2:
            raise RuntimeError("no more")


def test_a_participant_that_raises_ends_the_run_and_is_named(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    plugins.use(plugins.load(entry_points=[*scan(), Candidate("acme-wrecker", "1", "wrecker", plugin=Wrecker())]))
    try:
        assert train("--name", "a") == 3
    finally:
        plugins.use(None)
    assert "acme-wrecker/wrecker failed in before_step" in capsys.readouterr().err
    assert events("runs/a", "run_end")[0]["error"]["type"] == "PluginError"


def test_code_that_exits_is_no_success(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exits.py").write_text("def recipe():\n    raise SystemExit(0)\n")
    (tmp_path / "exits_at_once.py").write_text("raise SystemExit(0)\n")
    assert train(recipe="exits.py:recipe") == 2 and train(recipe="exits_at_once.py:recipe") == 2
    assert "SystemExit" in capsys.readouterr().err
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: sys.exit(0))
    assert train("--name", "a") == 3
    assert "ended the run by SystemExit" in capsys.readouterr().err
    assert events("runs/a", "run_end")[0]["outcome"] == "failed"
