"""A real run leaves what docs/reference/run-directory.md says, no more and no less; README's commands run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from intarsia.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "run-directory.md").read_text("utf-8")
RECIPE = f"{Path(__file__).with_name('train_recipes.py')}:tiny"
OPTIONAL = {"evaluation": {"bits_per_byte"}, "build": {"work"}}
NULL = {
    "step": {"mfu"},
    "run_end": {"reason", "checkpoint_step", "error"},
    "build": {"evaluation"},
    "generate": {"step"},
}
TYPES = {
    **dict.fromkeys(("step", "steps", "world", "tokens", "counted_tokens", "tokens_total", "memory_bytes", "pid", "sample"), int),
    **dict.fromkeys(("parameters", "trainable_parameters", "checkpoint_step"), int),
    **dict.fromkeys(
        ("loss", "gradient_norm", "learning_rate", "seconds_s", "tokens_per_s", "bits_per_byte", "time_s", "elapsed_s", "media_flops"),
        (int, float),
    ),
    **dict.fromkeys(
        ("run", "directory", "device", "host", "plugins", "stage", "location", "message", "outcome", "prompt", "text", "finish"), str
    ),
    **dict.fromkeys(("mesh", "versions", "metrics", "settings", "error"), dict),
}


def documented() -> dict[str, set[str]]:
    """The fields of each event by the page; under "" those of every event."""
    found = {}
    for heading, body in re.findall(r"^##+ (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL):
        cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", body, re.MULTILINE)
        if heading == "generate":
            cells = [body.partition("each completion: ")[2].partition("See ")[0]]
        found["" if heading == "events.jsonl" else heading] = set(re.findall(r"`(\w+)`", " ".join(cells)))
    return found


FIELDS = documented()
OF_STAGE = {
    field: stage
    for fields, stage in re.findall(r"^\| (.+?) \| stage (\w+): ", PAGE, re.MULTILINE)
    for field in re.findall(r"`(\w+)`", fields)
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained, resumed with more steps, refused, profiled, written to by a sink, and that has written text."""
    path = tmp_path_factory.mktemp("documented") / "run"
    more = ["sinks.0=tensorboard", "profile.steps=1", "--quiet"]
    assert main(["train", RECIPE, "--dir", str(path), *more]) == 0
    assert main(["train", "--resume", str(path), "train.steps=9", "train.log_every=2", *more]) == 0
    assert main(["train", "--resume", str(path), "train.seed=1", *more]) == 2
    assert main(["generate", str(path), "--prompt", "a", "--max-tokens", "2"]) == 0
    return path


@pytest.fixture(scope="module")
def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]


def test_the_page_has_the_fields_that_this_test_reads() -> None:
    assert FIELDS[""] == {"schema", "event", "time_s", "elapsed_s"}
    assert {"run_start", "build", "initialise", "resume", "step", "evaluation", "checkpoint", "generate", "warning", "run_end"} <= set(
        FIELDS
    )
    assert all(FIELDS[name] for name in FIELDS if name.islower())
    assert OF_STAGE["data"] == "data" and OF_STAGE["trainable_parameters"] == "parameters"


def test_every_kind_of_event_is_documented_and_most_happened(events: list[dict[str, Any]]) -> None:
    happened = {event["event"] for event in events}
    assert happened <= set(FIELDS)
    assert happened >= {"run_start", "build", "resume", "step", "evaluation", "checkpoint", "generate", "run_end"}


def test_every_event_has_the_documented_fields_and_no_others(events: list[dict[str, Any]]) -> None:
    for event in events:
        kind = event["event"]
        expected, there = FIELDS[""] | FIELDS[kind], set(event)
        if kind == "build":
            expected -= {field for field, stage in OF_STAGE.items() if stage != event["stage"]}
        assert expected - there <= OPTIONAL.get(kind, set()), (kind, "missing", expected - there)
        assert there <= expected, (kind, "not documented", there - expected)
        assert event["schema"] == 1
        for name in there:
            if event[name] is None:
                assert name in NULL.get(kind, set()), (kind, name, "is null")
            elif name in TYPES:
                assert isinstance(event[name], TYPES[name]) and not isinstance(event[name], bool), (kind, name, event[name])


def test_what_the_page_says_of_stages_changes_and_errors(events: list[dict[str, Any]]) -> None:
    first = [event for event in events if event["event"] == "build"][:7]
    named = re.search(r"A stage of the build is done: (.*), in this order", PAGE)
    assert named and [event["stage"] for event in first] == re.findall(r"`(\w+)`", named[1])
    (resume,) = [event for event in events if event["event"] == "resume"]
    assert resume["changes"] and all(set(change) == {"what", "saved", "now", "level", "why"} for change in resume["changes"])
    ends = [event for event in events if event["event"] == "run_end"]
    assert [end["outcome"] for end in ends] == ["done", "done", "failed"]
    assert set(ends[-1]["error"]) == {"type", "message"} and ends[0]["error"] is None


def test_the_directory_is_the_documented_tree(run: Path) -> None:
    tree = re.search(r"^    runs/NAME/\n((?:    .*\n)+)", PAGE, re.MULTILINE)
    assert tree is not None
    names = {line.split()[0].rstrip("/") for line in tree[1].splitlines()}
    assert {path.name for path in run.iterdir()} == names
    assert (run / "traces" / "step-00000001-rank-0.json").is_file() or sorted((run / "traces").glob("step-*-rank-*.json"))
    assert list((run / "metrics" / "tensorboard").iterdir())
    assert (run / "checkpoints" / "step-00000009").is_dir()


def test_show_says_why_the_last_attempt_failed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run)]) == 0
    assert re.search("outcome      failed: UsageError: .*was made by another run", capsys.readouterr().out)


def readme() -> Iterator[list[str]]:
    """The commands below "Train something", with their words, made short."""
    block = (ROOT / "README.md").read_text("utf-8").partition("## Train something\n")[2].partition("\n## ")[0]
    for line in block.splitlines():
        if line.startswith("    intarsia "):
            words = shlex.split(re.split(r"\s{3,}", line.strip())[0])[1:]
            short = {"train": ["train.steps=2", "train.sequence_length=32", "evaluation.batches=1"], "generate": ["--max-tokens", "3"]}
            yield [word for word in words if not word.startswith("train.steps=")] + short.get(words[0], [])


def test_readmes_commands_run(tmp_path: Path) -> None:
    commands = list(readme())
    assert len(commands) >= 6
    for words in commands:
        done = subprocess.run([sys.executable, "-m", "intarsia", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and done.stdout, (words, done.stderr)
