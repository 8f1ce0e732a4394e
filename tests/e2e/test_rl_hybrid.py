"""A model of recurrences and attention that also sees, Qwen3.5 in debug size, learns from rewards on text alone with the embedded generator."""

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
from intarsia_qwen3_5.config import debug


def seeing():
    return chz.replace(arithmetic_debug(), name="seeing", model=debug())
"""

RUN = (
    "train.steps=2", "train.sequence_length=32", "data.loader.groups=2", "data.loader.group=4", "data.loader.max_lag=0", "data.loader.held_out.every=0",
    "data.loader.held_out.at_start=false",
)  # fmt: skip


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "intarsia", "train", "recipe.py:seeing", *words, "--dir", str(folder / "run"), "--quiet", *RUN]
    return subprocess.run(
        command, cwd=folder, text=True, capture_output=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )


@pytest.mark.timeout(1800)
def test_recurrences_and_attention_learn_from_rewards(tmp_path: Path) -> None:
    """States begin anew with every request and with every version of the weights: log-probabilities are the trainer's up to rounding, after an update too."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr
    found = [event for event in read_events(tmp_path / "run") if event["event"] == "rollouts"]
    assert [(event["step"], event["trained_samples"]) for event in found] == [(1, 8), (2, 8)]
    assert all(event["gap_tokens"] > 0 and event["gap"] < 1e-4 for event in found), [event["gap"] for event in found]
