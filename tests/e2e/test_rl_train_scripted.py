"""`intarsia train` on rollouts of a scripted generator, all in this process: the real recipe, trainer, loader, controller and pools, without a second interpreter."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from intarsia import plugins
from intarsia.cli import main
from intarsia.contracts import Run
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_console.events import read_events
from intarsia_rl.contracts import Request
from intarsia_rl.controller.writer import files, read
from intarsia_rl.processes.local import LocalProcesses
from intarsia_testing import rl_doubles
from intarsia_testing.rl_doubles import InProcess, InProcessLauncher, Misbehaves, ScriptedTokens, offered

Train = Callable[..., int]

SMALL = {
    "data.loader.generator": "scripted",
    "data.loader.generator.vocab_size": "17",
    "data.loader.generator.stop_id": "12",
    "data.loader.groups": "4",
    "data.loader.group": "3",
    "data.loader.held_out.tasks": "4",
    "train.sequence_length": "32",
    "train.micro_batch": "4",
    "checkpoint.every": "2",
    "checkpoint.keep_last": "0",
}


class Doubles:
    """What started a run's processes, and what its generators answered."""

    def __init__(self) -> None:
        self.launcher = InProcessLauncher()
        self.answers: dict[str, tuple[int, ...]] = {}

    def named(self, name: str) -> list[InProcess]:
        return [process for process in self.launcher.started if process.name.startswith(name)]


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doubles]:
    """Processes are objects here, and the scripted generator is an entry."""
    made = Doubles()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalProcesses, "start", lambda self, *arguments: made.launcher.start(*arguments))
    real = ScriptedTokens.generate

    async def generate(self: ScriptedTokens, request: Request, on_tokens: Any = None) -> Any:
        answer = await real(self, request, on_tokens)
        made.answers[request.id] = answer.tokens
        return answer

    monkeypatch.setattr(ScriptedTokens, "generate", generate)
    plugins.use(offered(tmp_path / "site", monkeypatch))
    yield made
    plugins.use(None)


def train(name: str, *arguments: str) -> int:
    values = SMALL | dict(argument.split("=", 1) for argument in arguments)
    return main(["train", "arithmetic/debug", "--dir", name, "--quiet", *(f"{path}={value}" for path, value in values.items())])


def events(path: str, kind: str) -> dict[int, dict[str, Any]]:
    """By step; of a step that was done again the last."""
    return {event["step"]: event for event in read_events(Path(path)) if event["event"] == kind}


def rollouts(path: str, kind: str = "step") -> dict[int, list[dict[str, Any]]]:
    return {number: list(read(file)) for found, number, file in files(Path(path) / "rollouts") if found == kind}


def timeless(records: dict[int, list[dict[str, Any]]]) -> Any:
    return {number: [{**record, "timings_s": None} for record in each] for number, each in records.items()}


def weights(path: str, step: int) -> dict[str, Any]:
    checkpoint = open_checkpoint(Path(path) / "checkpoints" / f"step-{step:08}")
    return {key: checkpoint.read(key).tolist() for key in list(checkpoint.keys()) if key.startswith("model/")}


def test_a_run_trains_on_the_very_ids_that_were_generated(doubles: Doubles, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "train.steps=5", "data.loader.max_lag=2") == 0
    assert sorted(events("run", "rollouts")) == [1, 2, 3, 4, 5] == sorted(events("run", "step"))
    assert sorted(events("run", "held_out")) == [0, 5] and sorted(events("run", "evaluation")) == [5]
    held_out, evaluation = events("run", "held_out")[5], events("run", "evaluation")[5]
    assert held_out["samples"] == 4
    for event in events("run", "rollouts").values():
        assert 0 <= event["lag"]["min"] <= event["lag"]["max"] <= 2 and event["trained_samples"] == 12 and event["groups"] == 4
        assert set(event["idle"]) == {"trainer", "generators"} and event["kills"] == {"generators": 0, "workers": 0}
        assert event["gap"] is None or event["gap"] > 0, "a scripted generator's numbers are not the trainer's"
    assert evaluation["loss"] <= 0
    numbers = [record["group"] for each in rollouts("run").values() for record in each]
    assert numbers == sorted(numbers) and numbers == [number for number in range(20) for _ in range(3)]
    for step, each in rollouts("run").items():
        for record in each:
            [segment] = record["segments"]
            generated = [token for token, trained in zip(segment["tokens"], segment["trained"], strict=True) if trained == "1"]
            answer = doubles.answers[f"{record['id']}/1/0"]
            assert tuple(generated) == answer and record["step"] == step and record["turns"][-1]["tokens"] == list(answer)
    assert main(["rl", "show", "run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert main(["rl", "show", "run", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["samples"] for row in table] == [12] * 5 and all(row["kills"] == {"generators": 0, "workers": 0} for row in table)


def test_events_and_files_have_the_documented_fields_and_no_others(doubles: Doubles) -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert train("run", "train.steps=2", "data.loader.environment.partial=0.3") == 0
    page = (docs / "reference" / "run-directory.md").read_text("utf-8")
    for kind in ("generators", "rollouts", "held_out"):
        body = page.partition(f"### {kind}\n")[2].partition("\n#")[0]
        fields = {name for cells in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", body, re.MULTILINE) for name in re.findall(r"`(\w+)`", cells)}
        [*found] = [event for event in read_events(Path("run")) if event["event"] == kind]
        assert found and all(set(event) - {"schema", "event", "time_s", "elapsed_s"} == fields for event in found), kind
    body = (docs / "explanation" / "reinforcement-learning.md").read_text("utf-8").partition("| field | meaning |")[2].partition("\n\n")[0]
    fields = {name for cells in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", body, re.MULTILINE) for name in re.findall(r"`(\w+)`", cells)}
    assert all(set(record) == fields for each in rollouts("run").values() for record in each)


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("unbroken", "train.steps=6", "data.loader.max_lag=0") == 0

    def stop(run: Run, step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        from intarsia_rl import hooks

        real = hooks.record_step
        patched.setattr(hooks, "record_step", lambda run, step: (real(run, step), stop(run, step)))
        assert train("broken", "train.steps=6", "data.loader.max_lag=0") == 130
    assert sorted(rollouts("broken")) == [1, 2, 3], "the third step was begun and is lost"
    (Path("broken/rollouts/step-000009.jsonl")).write_text("{}\n")
    assert main(["train", "--resume", "broken", "--quiet"]) == 0
    assert timeless(rollouts("broken")) == timeless(rollouts("unbroken")), "what came after the checkpoint is done again, and only that"
    assert [event["step"] for event in read_events(Path("broken")) if event["event"] == "resume"] == [2]
    losses = [
        {step: (event["loss"], event["gradient_norm"]) for step, event in events(run, "step").items()} for run in ("unbroken", "broken")
    ]
    assert losses[0] == losses[1] and weights("unbroken", 6) == weights("broken", 6)


def test_at_lag_2_nothing_is_lost_or_counted_twice_by_stopping(doubles: Doubles) -> None:
    assert train("run", "train.steps=4", "data.loader.max_lag=2") == 0
    assert main(["train", "--resume", "run", "train.steps=7", "--quiet"]) == 0
    numbers = [record["group"] for each in rollouts("run").values() for record in each]
    assert numbers == [number for number in range(28) for _ in range(3)]
    lags = [event["lag"]["max"] for event in events("run", "rollouts").values()]
    assert len(lags) == 7 and max(lags) <= 2


def test_generators_and_workers_that_die_cost_nothing(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia_rl import hooks

    real = hooks.record_step

    def kill(run: Run, step: int) -> None:
        real(run, step)
        if step in (1, 2):
            for process in (doubles.named("generator")[-1], doubles.named("environment")[-1]):
                process._reason.get_loop().call_soon_threadsafe(process.die, "the test killed it")

    monkeypatch.setattr(hooks, "record_step", kill)
    assert train("run", "train.steps=5", "data.loader.max_lag=1", "data.loader.generators=2", "data.loader.generator.token_s=0.01") == 0
    numbers = [record["group"] for each in rollouts("run").values() for record in each]
    assert numbers == [number for number in range(20) for _ in range(3)]
    assert not any(record["failure"] for each in rollouts("run").values() for record in each)
    last = events("run", "rollouts")[5]
    assert last["kills"]["generators"] >= 1 and last["kills"]["workers"] >= 1
    assert all(event["trained_samples"] == 12 for event in events("run", "rollouts").values())


def test_what_weighs_more_than_a_message_goes_in_pages(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a step, and of a checkpoint, have no bound together: routes, images, long contexts."""
    assert train("whole", "train.steps=4", "data.loader.max_lag=1") == 0
    calls, sizes, call = [], [], InProcess.call
    real = rl_doubles.encode

    async def count(self: InProcess, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        calls.append(method)
        return await call(self, method, *arguments, timeout_s=timeout_s)

    def measure(value: Any, limit: int) -> list[bytes]:
        made = real(value, limit)
        sizes.append(sum(map(len, made)))
        return made

    monkeypatch.setattr(InProcess, "call", count)
    monkeypatch.setattr(rl_doubles, "encode", measure)
    monkeypatch.setattr("intarsia_rl.processes.pages.PAGE_BYTES", 4000)
    assert train("pages", "train.steps=3", "data.loader.max_lag=1") == 0
    assert main(["train", "--resume", "pages", "--quiet", "train.steps=4"]) == 0
    assert calls.count("more") > 30 and calls.count("take_up") > 2
    assert weights("pages", 2) == weights("whole", 2)
    assert [record["id"] for each in rollouts("pages").values() for record in each] == [
        record["id"] for each in rollouts("whole").values() for record in each
    ]
    biggest = max(sizes)
    assert all(size < 40_000 for size in sizes), f"{biggest} bytes in one message"


def test_a_gap_in_the_mode_that_promises_none_ends_the_run(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripted generator's numbers are not the model's."""
    monkeypatch.setattr("intarsia_rl.invariant.check.check", lambda run: None)
    assert train("run", "train.steps=2", "data.loader.invariant=true") == 4
    said = capsys.readouterr().err
    assert "Step 1: log-probabilities of trainer and generator differ by up to" in said and "intarsia rl parity" in said
    assert events("run", "rollouts")[1]["gap"] > 0 and not events("run", "step")


def test_a_split_without_a_task_to_evaluate_on_is_said(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Misbehaves.tasks
    monkeypatch.setattr(Misbehaves, "tasks", lambda self, split: real(self, split) if split == "train" else [])
    assert train("run", "train.steps=2", "data.loader.environment=misbehaves") == 2
    assert "The environment has no task in its split 'held_out' to evaluate on." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [("dapo", "the algorithm left every group out. Rewards are 0 to 0"), ("grpo", None)],
)
def test_rounds_without_anything_to_learn_end_the_run_with_the_reason(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], algorithm: str, reason: str | None
) -> None:
    # Every answer is the end alone: all rewards are equal.
    monkeypatch.setattr("intarsia_testing.rl_doubles.script", lambda request, config: request.forced or [12])
    code = train("run", "train.steps=2", f"loss.algorithm={algorithm}", "data.loader.barren_rounds=2", "data.loader.groups=2")
    if reason is None:
        assert code == 0
        assert all(event["loss"] == 0.0 and event["gradient_norm"] == 0.0 for event in events("run", "step").values()), (
            "equal rewards give 0"
        )
        return
    error = capsys.readouterr().err
    assert code == 2 and "2 rounds of 2 groups in a row have nothing to train on" in error and reason in error
    assert not rollouts("run")


def test_an_environment_that_always_fails_ends_the_run_with_its_words(doubles: Doubles, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("data.loader.environment=misbehaves", "data.loader.barren_rounds=1", "data.loader.max_lag=0", "data.loader.held_out.every=0", "data.tokenizer=byte", "model.vocab_size=264")  # fmt: skip
    vocabulary = ("data.loader.generator.vocab_size=264", "data.loader.generator.stop_id=259")
    import intarsia_testing.rl_doubles as module

    real = module.Misbehaves.tasks
    module.Misbehaves.tasks = lambda self, split: [module.Task(f"train/{number}", {"do": "fail"}) for number in range(4)]  # type: ignore[method-assign]
    try:
        assert train("run", "train.steps=2", "train.sequence_length=128", *arguments, *vocabulary) == 3
    finally:
        module.Misbehaves.tasks = real  # type: ignore[method-assign]
    error = capsys.readouterr().err
    assert "12 of 12 tries failed, 12 of them like this: tool: the tool is broken" in error


@pytest.mark.parametrize(
    ("settings", "words"), [((), ""), (("temperature=0.7", "top_k=5"), "has temperature=0.7, top_k=5: tokens are drawn")]
)
def test_another_distribution_than_the_policys_is_said_once(doubles: Doubles, settings: tuple[str, ...], words: str) -> None:
    assert train("run", "train.steps=2", *(f"data.loader.sampling.{each}" for each in settings)) == 0
    said = [event["message"] for event in read_events(Path("run")) if event["event"] == "warning" and "sampling" in event["message"]]
    assert len(said) == bool(words) and all(words in each for each in said)


@pytest.mark.parametrize("kind", ["held_out", "step", "trained"])
def test_a_full_disk_is_said_and_no_bug(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name.startswith(f"{kind}-"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr("intarsia_rl.controller.writer.os.replace", replace)
    assert train("run", "train.steps=2") == 2
    said = capsys.readouterr().err
    assert (
        f"cannot be written to run/rollouts/{kind}-" in said.replace(f"{Path.cwd()}/", "") and "No space left on device. Make room" in said
    )
    assert not list(Path("run/rollouts").glob("*.tmp"))


def test_a_bug_of_an_algorithm_is_told_with_its_place(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("intarsia_rl.algorithms.grpo.GRPO.token_weight", lambda self, sample: 1 / 0)
    assert train("run", "train.steps=2", "data.loader.held_out.at_start=false") == 3
    said = capsys.readouterr().err
    assert "The rollouts ended by ZeroDivisionError: division by zero (" in said and "met a bug" not in said


def test_numbers_that_are_not_finite_end_the_run_with_code_4(doubles: Doubles, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "train.steps=4", "optimizer.lr=1e38", "schedule.warmup_steps=0", "train.clip_norm=none") == 4
    assert "is not finite" in capsys.readouterr().err


def test_a_generator_that_cannot_be_built_says_so(doubles: Doubles, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "train.steps=2", "data.loader.generator.fails=no engine here") == 2
    assert "no engine here" in capsys.readouterr().err


def test_an_environment_whose_tasks_cannot_be_had_is_said_and_no_bug_of_the_command(
    doubles: Doubles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(self: Misbehaves, split: str) -> Any:
        raise KeyError("no such table")

    monkeypatch.setattr(Misbehaves, "tasks", raises)
    assert train("run", "train.steps=2", "data.loader.environment=misbehaves") == 3
    said = capsys.readouterr().err
    assert "): KeyError: 'no such table'" in said and "boundary `environment`" in said and "met a bug" not in said


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("data.loader.uses=3", "max_lag=1 allows less"),
        ("data.loader.in_flight=contine", "Did you mean 'continue'?"),
        ("data.loader.group=0", "group=0 must be at least 1"),
        ("data.loader.sampling.top_p=nan", "sampling.top_p=nan must be above 0 and at most 1"),
        ("data.loader.timeout_s=nan", "timeout_s=nan must be a number of seconds above 0"),
        ("data.loader.held_out.tasks=-1", "held_out.tasks=-1 must be at least 0"),
        ("data.loader.generator_threads=0", "generator_threads=0 must be at least 1"),
        ("loss=cross_entropy", "data.loader=rollouts learns by loss=policy"),
        ("data.loader.split=trian", "there is no split 'trian'. Did you mean 'train'?"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(doubles: Doubles, capsys: pytest.CaptureFixture[str], override: str, text: str) -> None:
    assert train("run", "train.steps=2", override) == 2
    assert text in capsys.readouterr().err
