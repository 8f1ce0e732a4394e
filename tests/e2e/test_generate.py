"""`intarsia generate` and `intarsia train --init-from` as a user calls them, in this process, on a run of two steps."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.cli import main
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_console.events import read_events

RECIPE = f"{Path(__file__).with_name('train_recipes.py')}:tiny"
TINY = ("evaluation.every=0", "checkpoint.every=2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", RECIPE, "--dir", str(path), *TINY, "train.steps=2", f"data.cache={cache}", "--quiet"]) == 0
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


Generate = Callable[..., dict[str, Any]]


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    def call(source: Path, *arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        code = main(["generate", str(source), "--max-tokens", "12", "--ignore-eos", "--json", *arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)

    return call


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["generate", *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def test_a_run_its_checkpoint_and_its_export_write_the_same(run: Path, generate: Generate, tmp_path: Path) -> None:
    assert main(["checkpoint", "export", str(run), str(tmp_path / "hf"), "--to", "hf"]) == 0
    arguments = ("--prompt", "def ", "--temperature", "0.7", "--seed", "3")
    first = generate(run, *arguments)
    assert first["step"] == 2 and len(first["completions"][0]["tokens"]) == 12
    assert len(first["completions"][0]["log_probs"]) == 12 and max(first["completions"][0]["log_probs"]) < 0
    (checkpoint,) = (run / "checkpoints").iterdir()
    exported = tmp_path / "hf"
    shutil.copytree(checkpoint, tmp_path / "moved")  # a checkpoint that lies in no run knows its model by itself
    for source, tokenizer in ((checkpoint, ()), (tmp_path / "moved", ()), (exported, ("--tokenizer", "byte"))):
        again = generate(source, *arguments, *tokenizer)
        assert [each["tokens"] for each in again["completions"]] == [each["tokens"] for each in first["completions"]]


def test_the_run_records_what_was_generated(run: Path, generate: Generate) -> None:
    result = generate(run, "--prompt", "a", "--prompt", "bc", "--samples", "2", "--top-k", "5")
    events = [event for event in read_events(run) if event["event"] == "generate"]
    assert [(event["prompt"], event["sample"]) for event in events] == [("a", 0), ("a", 1), ("bc", 0), ("bc", 1)]
    for event, completion in zip(events, result["completions"], strict=True):
        assert event["text"] == completion["text"] and event["tokens"] == 12 and event["step"] == 2
        assert event["tokens_per_s"] > 0 and event["seconds_s"] > 0 and event["settings"]["top_k"] == 5


def test_a_checkpoint_alone_records_nothing(run: Path, generate: Generate) -> None:
    (checkpoint,) = (run / "checkpoints").iterdir()
    before = (run / "events.jsonl").read_bytes()
    generate(checkpoint, "--prompt", "a")
    assert (run / "events.jsonl").read_bytes() == before


def test_text_streams_behind_its_prompt(run: Path, capsys: pytest.CaptureFixture[str], generate: Generate) -> None:
    whole = generate(run, "--prompt", "def ", "--greedy")["completions"][0]["text"]
    assert main(["generate", str(run), "--prompt", "def ", "--greedy", "--max-tokens", "12", "--ignore-eos"]) == 0
    streamed = capsys.readouterr()
    assert streamed.out == f"def {whole}\n"
    assert "12 tokens in" in streamed.err and "checkpoint of step 2" in streamed.err and "ended by length" in streamed.err
    assert main(["generate", str(run), "--prompt", "def ", "--greedy", "--max-tokens", "12", "--ignore-eos", "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed.out


def test_prompts_from_a_file_and_from_standard_input(
    run: Path, generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts").write_text("one\ntwo\n")
    assert [each["prompt"] for each in generate(run, "--prompts-file", str(tmp_path / "prompts"))["completions"]] == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\ntext"))
    assert generate(run)["completions"][0]["prompt"] == "piped\ntext"


def test_equal_prompts_are_numbered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--max-tokens", "2", *(["--prompt", "def"] * 3)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- ")]
    assert shown == ["--- prompt 1", "--- prompt 2", "--- prompt 3"]


def test_chat_begins_with_the_turns_markers(run: Path, generate: Generate) -> None:
    (completion,) = generate(run, "--chat", "--prompt", "hi")["completions"]
    # bos, the user's marker, two bytes, end of turn, and the assistant's marker, behind which it speaks.
    assert completion["prompt_tokens"] == [256, 261, 104, 105, 259, 262] and completion["prompt"] == "hi"


@pytest.mark.parametrize(
    "arguments,code,words",
    [
        (("--prompt", "a" * 60, "--max-tokens", "10"), 2, ("has 61 tokens", "that is 71", "64 positions", "at most 3")),
        (("--prompt", "a", "--kernels", "attention=sdpaa"), 2, ("has no kernel 'sdpaa'", "sdpa")),
        (("--prompt", "a", "--top-p", "0", "--min-p", "2"), 2, ("top_p is 0.0", "min_p is 2.0")),
        (("--prompt", "a", "--greedy", "--samples", "2"), 2, ("same text each time",)),
        (("--prompt", "a", "--greedy", "--temperature", "0.5"), 2, ("contradict",)),
        (("--prompt", "a", "--dtype", "int8"), 2, ("cannot run in dtype 'int8'",)),
        (("--prompt", "a", "--tokenizer", "bite"), 2, ("Did you mean 'byte'",)),
        (("--prompt", "a", "--tokenizer", "no/tokenizer.json"), 2, ("there is no no/tokenizer.json",)),
        (("--prompts-file", "nothing"), 2, ("nothing", "cannot be read")),
    ],
)
def test_refusals(trained: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    got, err = failure(capsys, str(trained), *arguments)
    assert got == code and all(word in err for word in words), err


def test_sources_that_are_none(trained: Path, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, err = failure(capsys, str(tmp_path / "empty"), "--prompt", "a")
    assert code == 2 and "a run directory" in err and "config.json and *.safetensors" in err and "manifest.json" in err
    assert "There is nothing at" in failure(capsys, str(tmp_path / "absent"), "--prompt", "a")[1]
    shutil.rmtree(run / "checkpoints")
    code, err = failure(capsys, str(run), "--prompt", "a")
    assert code == 5 and "no complete checkpoint" in err


def test_a_tokenizer_that_is_too_big(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(300)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    code, err = failure(capsys, str(run), "--prompt", "w1", "--tokenizer", str(tmp_path))
    assert code == 2 and "has 300 ids" in err and "holds 264" in err


def test_without_a_prompt(run: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from intarsia_generation.cli import command; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout == "False\n", done.stderr


# ---------------------------------------------------------------- train --init-from


def weights(path: Path, step: int = 0) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path if step == 0 else path / "checkpoints" / f"step-{step:08}")
    return {key: checkpoint.read(key) for key in checkpoint.manifest.tensors if key.startswith("model/")}


@pytest.mark.parametrize("form", ["run", "hf"])
def test_init_from(trained: Path, cache: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = trained
    if form == "hf":
        source = tmp_path / "hf"
        assert main(["checkpoint", "export", str(trained), str(source), "--to", "hf"]) == 0
    new = tmp_path / "new"
    options = (*TINY, "train.steps=0", "train.seed=9", f"data.cache={cache}")
    assert main(["train", RECIPE, "--dir", str(new), "--init-from", str(source), *options, "--quiet"]) == 0
    begun, wanted = weights(new), weights(trained)
    assert begun.keys() == wanted.keys() and all(torch.equal(begun[key], wanted[key]) for key in wanted)
    events = list(read_events(new))
    assert any(event["event"] == "initialise" and str(source) in event["location"] for event in events)
    assert not any(event["event"] == "warning" for event in events)
    assert json.loads((new / "recipe.json").read_text())["values"]["train.init_from"] == str(source)
    # The run goes on from its own checkpoint, and needs the source no more.
    if form == "hf":
        shutil.rmtree(source)
    assert main(["train", "--resume", str(new), "train.steps=1", "--quiet"]) == 0
    assert [event["step"] for event in read_events(new) if event["event"] == "step"] == [1]


def test_init_from_another_model(trained: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--init-from", str(trained), *TINY, "train.steps=0", f"data.cache={cache}", "--quiet"]
    assert main(["train", RECIPE, "--dir", str(tmp_path / "a"), *arguments, "model.layers.*.feed_forward.hidden=24"]) == 5
    assert "feed_forward.w1.weight has shape [32, 16], the model's has [24, 16]" in capsys.readouterr().err
    assert main(["train", RECIPE, "--dir", str(tmp_path / "b"), *arguments, "model.rope.theta=1234.0"]) == 0
    warnings = [event["message"] for event in read_events(tmp_path / "b") if event["event"] == "warning"]
    assert len(warnings) == 1 and "model.rope.theta is 1234.0, there 500000.0" in warnings[0]
    assert main(["train", RECIPE, "--resume", str(tmp_path / "b"), "--init-from", str(trained)]) == 2


def test_two_ranks_read_each_its_own_boxes(trained: Path, cache: Path, tmp_path: Path) -> None:
    source, new = tmp_path / "hf", tmp_path / "new"
    assert main(["checkpoint", "export", str(trained), str(source), "--to", "hf"]) == 0
    options = (*TINY, "train.steps=0", "sharder=flexshard", f"data.cache={cache}")
    assert main(["train", RECIPE, "--dir", str(new), "--init-from", str(source), *options, "--quiet", "--processes", "2"]) == 0
    assert open_checkpoint(new).manifest.world == 2
    begun, wanted = weights(new), weights(trained)
    assert begun.keys() == wanted.keys() and all(torch.equal(begun[key], wanted[key]) for key in wanted)
