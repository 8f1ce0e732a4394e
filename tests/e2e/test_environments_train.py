"""The recipes of several turns and of code train as a user calls them, with the embedded generator: what is trained on is what was generated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from intarsia_console.events import read_events
from intarsia_sandbox import process

SMALL = (
    "train.steps=2", "data.loader.groups=2", "data.loader.group=2", "data.loader.held_out.tasks=2", "data.loader.held_out.at_start=false",
)  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "more", "turns"), [("alphabet_sort/debug", (), 2), ("code/debug", ("data.loader.environment.sandbox.unconfined=true",), 2)]
)
def test_recipes_train(recipe: str, more: tuple[str, ...], turns: int, tmp_path: Path) -> None:
    if recipe.startswith("code") and "refused" not in process.probe(process.readable(())):
        more = ()
    command = [sys.executable, "-c", "from intarsia.cli import run; run()", "train", recipe, "--dir", "run", "--quiet", *SMALL, *more]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "rollouts"]
    assert [event["step"] for event in events] == [1, 2] and all(event["samples"] == 4 and not event["failures"] for event in events)
    assert events[0]["gap_tokens"] > 0 and all(event["gap"] is None or event["gap"] < 1e-4 for event in events)
    for step in (1, 2):
        samples = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / f"step-{step:06}.jsonl").read_text().splitlines()]
        for sample in samples:
            (segment,) = sample["segments"]
            said = [turn["tokens"] for turn in sample["turns"] if turn["role"] == "assistant"]
            trained = [token for token, flag in zip(segment["tokens"], segment["trained"], strict=True) if flag == "1"]
            assert trained == [token for tokens in said for token in tokens] and 1 <= len(said) <= turns
            assert all(version >= 0 for version, flag in zip(segment["versions"], segment["trained"], strict=True) if flag == "1")


def test_an_alphabet_without_the_prompts_characters_is_refused(tmp_path: Path) -> None:
    """Nothing is generated, and the message names characters and setting."""
    words = ("data.loader.environment.instructions=Compute.", *SMALL)
    command = [sys.executable, "-m", "intarsia", "train", "arithmetic/debug", "--dir", "run", "--quiet", *words]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "'C', 'o', 'm', 'p'" in done.stderr and "data.tokenizer.alphabet" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "run").rglob("rollouts/*.jsonl"))


SEEING = """
import chz
from intarsia_data.config import ByteTokenizerConfig
from intarsia_environments.seeing import drawn_debug
from intarsia_multimodal.recipes import SPECIALS
from intarsia_qwen3_5.config import debug


def hybrid():
    recipe = drawn_debug()
    return chz.replace(recipe, model=debug(), data=chz.replace(recipe.data, tokenizer=ByteTokenizerConfig(specials=SPECIALS)))
"""


@pytest.mark.parametrize("recipe", ["drawn/debug", pytest.param("recipe.py:hybrid", marks=pytest.mark.slow)])
def test_what_is_seen_is_trained_on(recipe: str, tmp_path: Path) -> None:
    """Attention alone with DeepStack, and recurrences with attention: images go from the environment to generator and trainer, whose log-probabilities agree, after an update too."""
    (tmp_path / "recipe.py").write_text(SEEING)
    more = ("data.loader.max_lag=0", "train.micro_batch=2", "train.sequence_length=48")
    command = [sys.executable, "-m", "intarsia", "train", recipe, "--dir", "run", "--quiet", *SMALL, *more]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "rollouts"]
    assert [(event["step"], event["samples"], event["failures"]) for event in events] == [(1, 4, {}), (2, 4, {})]
    assert all(event["gap_tokens"] > 0 and event["gap"] < 1e-5 for event in events), [event["gap"] for event in events]
    for step in (1, 2):
        read = [(tmp_path / "run" / "rollouts" / f"{kind}-{step:06}.jsonl").read_text().splitlines() for kind in ("step", "trained")]
        samples, trained = ([json.loads(line) for line in lines] for lines in read)
        own = {line["id"]: line["log_probs"] for line in trained}
        for sample in samples:
            (segment,) = sample["segments"]
            ids = [token for token, flag in zip(segment["tokens"], segment["trained"], strict=True) if flag == "1"]
            assert ids == next(turn["tokens"] for turn in sample["turns"] if turn["role"] == "assistant")
            assert [each["kind"] for each in segment["media"]] == ["image"]
            told = [value for value, flag in zip(segment["log_probs"], segment["trained"], strict=True) if flag == "1"]
            assert told == pytest.approx(own[sample["id"]], abs=1e-5)
