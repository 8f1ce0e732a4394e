"""A mixture of experts learns from rewards with the experts that its generator chose; recipes and files of the fine-tuning example train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from intarsia_console.events import read_events

EXAMPLE = Path(__file__).parents[2] / "examples" / "fine_tuning" / "recipes.py"
RECIPE = """
import chz
from intarsia_deepseek_v3.config import deepseek_v3, v3_router
from intarsia_environments.recipes import arithmetic_debug
from intarsia_models_common.config import MLAConfig, RopeConfig


def moe():
    recipe = arithmetic_debug()
    model = deepseek_v3(
        dim=48, layers=3, dense_layers=1, dense_hidden=96, expert_hidden=32, shared_experts=1, vocab_size=recipe.model.vocab_size, max_positions=512, ahead=0,
        attention=MLAConfig(heads=4, kv_rank=24, q_rank=24, nope_dim=12, rope_dim=8, value_dim=12), rope=RopeConfig(interleaved=True),
        router=v3_router(experts=8, top_k=2, groups=4, top_groups=2, scale=2.5), embedding_std=0.5,
    )
    return chz.replace(recipe, name="moe", model=model)
"""


def train(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The command in a process of its own; the run's events."""
    command = [sys.executable, "-c", "from intarsia.cli import run; run()", "train", *words, "--dir", str(folder / "run"), "--quiet"]
    done = subprocess.run(
        command, cwd=folder, text=True, capture_output=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(read_events(folder / "run"))


@pytest.mark.timeout(1800)
def test_the_generators_experts_are_the_trainers(tmp_path: Path) -> None:
    """In the batch-invariant mode, with turns: with the same experts in the same order all log-probabilities are the generator's, bit for bit."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    small = [
        "train.steps=3",
        "train.sequence_length=32",
        "data.loader.groups=3",
        "data.loader.group=4",
        "data.loader.max_lag=0",
        "data.loader.held_out.every=0",
    ]
    events = train(
        tmp_path, "recipe.py:moe", "--with", "batch_invariant", "data.loader.replay_routes=true", "recompute.mode=blocks", *small
    )
    rollouts = [event for event in events if event["event"] == "rollouts"]
    assert [event["gap"] for event in rollouts] == [0.0] * 3 and all(event["gap_tokens"] > 0 for event in rollouts)
    steps = [event for event in events if event["event"] == "step"]
    assert [event["metrics"]["ratio_mean"] for event in steps] == [1.0] * 3
    assert all("moe.1.sequence_loss" in event["metrics"] for event in steps)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["sft", "sft_templated", "dpo"])
def test_the_fine_tuning_example_trains(tmp_path: Path, name: str) -> None:
    small = ["train.steps=2", "train.log_every=1", "model.layers.*.feed_forward.hidden=64", "evaluation.every=0"]
    events = train(tmp_path, f"{EXAMPLE}:{name}", *small)
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 2
    if name == "sft":
        # Two answers of one or two digits with the end of turn, and the end of the text behind the last: of about 60 tokens of a conversation these are trained on.
        assert 16 * 3 <= steps[0]["counted_tokens"] <= 16 * 7
    elif name == "sft_templated":
        # The same without an end of the text.
        assert 16 * 2 <= steps[0]["counted_tokens"] <= 16 * 6
    else:
        assert steps[0]["counted_tokens"] == 16 and steps[0]["metrics"]["margin"] == 0.0
