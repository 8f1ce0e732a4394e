"""`intarsia train` with the real engine: trainer, controller, engine and environment workers in processes of their own; weights are pushed after every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from intarsia_console.events import read_events

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

RECIPES = Path(__file__).with_name("_recipes.py")
STEPS = 20
SMALL = ("data.loader.groups=4", "data.loader.group=4", "data.loader.held_out.every=0", "data.loader.held_out.at_start=false")


def train(path: Path, recipe: str, *settings: str) -> list[dict[str, Any]]:
    """Run it; the events `rollouts` of its steps."""
    command = [sys.executable, "-c", "from intarsia.cli import run; run()", "train", f"{RECIPES}:{recipe}", "--with", "batch_invariant"]
    run = ["--dir", str(path), f"train.steps={STEPS}", "train.sequence_length=64", "data.loader.max_lag=1", *settings, "--quiet"]
    found = subprocess.run([*command, *run], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=800)
    assert found.returncode == 0, found.stderr[-4000:]
    return [event for event in read_events(path) if event["event"] == "rollouts"]


def check(events: list[dict[str, Any]], compared: int = STEPS) -> None:
    """At least so many steps were compared with the generator, and there was no difference at all; generation went on during training."""
    assert [event["step"] for event in events] == list(range(1, STEPS + 1))
    gaps = [event["gap"] for event in events if event["gap_tokens"] > 0]
    assert gaps == [0.0] * len(gaps) and len(gaps) >= compared
    assert max(event["lag"]["max"] for event in events) == 1


def test_twenty_asynchronous_steps_without_a_gap_and_the_reward_rises(tmp_path: Path) -> None:
    events = train(tmp_path / "run", "dense", "data.loader.held_out.every=0", "data.loader.held_out.at_start=false")
    check(events)
    rewards = [event["reward"] for event in events]
    assert sum(rewards[-5:]) > 1.2 * sum(rewards[:5]), rewards


@pytest.mark.parametrize(
    ("recipe", "dtype", "settings"),
    [
        ("dense", "bfloat16", ()),
        ("experts", "float32", ()),
        ("experts", "bfloat16", ("data.loader.replay_routes=true", "data.loader.audit=8")),
    ],
    ids=("dense-bfloat16", "experts-float32", "experts-bfloat16-replayed"),
)
def test_no_gap_for(tmp_path: Path, recipe: str, dtype: str, settings: tuple[str, ...]) -> None:
    # Where the last step has changed a router's choice, samples that are scored anew cannot be compared with a trainer that replays the choice before.
    compared = STEPS // 2 if "data.loader.replay_routes=true" in settings else STEPS
    check(train(tmp_path / "run", recipe, f"precision.compute={dtype}", *SMALL, *settings), compared)
