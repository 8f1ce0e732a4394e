"""Qwen families in debug size learn from rewards with the embedded generator: Qwen3, bit for bit in the mode, and Qwen3.5 (recurrences and attention, and it also sees) on text alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from intarsia_console.events import read_events

RECIPE = """
import chz
from intarsia_environments.recipes import arithmetic_debug
from intarsia_qwen3 import config as qwen3
from intarsia_qwen3_5 import config as qwen3_5


def recipe(model):
    return chz.replace(arithmetic_debug(), name="families", model=model)


def dense():
    return recipe(qwen3.debug())


def experts():
    return recipe(qwen3.moe_debug())


def hybrid():
    return recipe(qwen3_5.debug())
"""

RUN = (
    "train.steps=2", "train.sequence_length=32", "data.loader.groups=2", "data.loader.group=4", "data.loader.max_lag=0", "data.loader.held_out.every=0",
    "data.loader.held_out.at_start=false",
)  # fmt: skip


def train(folder: Path, recipe: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "recipe.py").write_text(RECIPE)
    command = [sys.executable, "-m", "intarsia", "train", f"recipe.py:{recipe}", *words, "--dir", str(folder / "run"), "--quiet", *RUN]
    return subprocess.run(
        command, cwd=folder, text=True, capture_output=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "words", "most"),
    [
        ("dense", (), 1e-4),
        ("dense", ("--with", "batch_invariant"), 0.0),
        pytest.param("experts", ("--with", "batch_invariant", "data.loader.replay_routes=true"), 0.0, marks=pytest.mark.slow),
        ("hybrid", (), 1e-4),
    ],
    ids=["qwen3", "qwen3 invariant", "qwen3 experts invariant", "qwen3.5"],
)
def test_families_learn_from_rewards(recipe: str, words: tuple[str, ...], most: float, tmp_path: Path) -> None:
    """Caches and states begin anew with every request and with every version of the weights: log-probabilities are the trainer's up to rounding, in the mode bit for bit, after an update too."""
    done = train(tmp_path, recipe, *words)
    assert done.returncode == 0, done.stderr
    found = [event for event in read_events(tmp_path / "run") if event["event"] == "rollouts"]
    gaps = [event["gap"] for event in found]
    print(f"{recipe} {' '.join(words)}: gap of trainer and generator {gaps}")
    assert [(event["step"], event["trained_samples"]) for event in found] == [(1, 8), (2, 8)]
    assert all(event["gap_tokens"] > 0 for event in found) and max(gaps) <= most, gaps
