"""The quick start of reinforcement learning: a small model learns a task from rewards alone, is killed, and comes back exactly.

    python examples/rl_quickstart.py [--recipe alphabet_sort/debug] [--directory runs/rl-quickstart] [PATH=VALUE ...]

Three acts, all through the command line that you would use yourself:

1. train the recipe in the batch-invariant mode with turns (`data.loader.max_lag=0`), and kill everything (SIGKILL) in the middle;
2. resume it from its last checkpoint and let it run to the end: the steps that were done before the kill and are done again must be the same, bit for bit;
3. look at the rollouts.

What is claimed at the end is read from the run's `events.jsonl`, never from printed text. Exit code 1 when a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quickstart import command, done_twice, events, say, steps, train_and_kill

CHECKPOINT_EVERY, KILL_AFTER = 5, 8
LOW, HIGH = 0.2, 0.9
COMPARED = ("reward", "gap", "gap_tokens", "trained_tokens", "lag", "length")


def step_facts(run: Path) -> list[tuple[int, tuple[Any, ...]]]:
    """What each step was, in the order of the log: a step that was done again is there twice."""
    rollouts: dict[int, dict[str, Any]] = {}
    found = []
    for event in events(run):
        if event["event"] == "rollouts":  # A kill may come between these and the end of their step.
            rollouts[event["step"]] = event
        elif event["event"] == "step":
            rollout = rollouts.get(event["step"], {})
            found.append((event["step"], (event["loss"], event["gradient_norm"], *(rollout.get(name) for name in COMPARED))))
    return found


def proof(run: Path, code: int) -> dict[str, Any]:
    """What the event log says."""
    rewards = [event["reward"] for event in events(run, "held_out")]
    rollouts = events(run, "rollouts")
    repeated, differ = done_twice(step_facts(run))
    return {
        "held_out_reward_before": rewards[0],
        "held_out_reward_after": rewards[-1],
        "exit_code_of_the_kill": code,
        "resumed_after_step": events(run, "resume")[0]["step"],
        "steps": steps(run),
        "steps_done_twice": repeated,
        "steps_that_differ": differ,
        "largest_gap": max(event["gap"] or 0.0 for event in rollouts),
        "tokens_compared": sum(event["gap_tokens"] for event in rollouts),
        "largest_lag": max(event["lag"]["max"] for event in rollouts),
        "kills": rollouts[-1]["kills"],
    }


def main() -> int:
    """Play the acts; print and save the proof."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="alphabet_sort/debug", help="what to train")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/rl-quickstart"), help="where the run goes; an earlier one there is replaced"
    )
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE", help="overrides of the recipe")
    options = parser.parse_args()
    start, run = time.monotonic(), options.directory / "run"
    shutil.rmtree(run, ignore_errors=True)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")

    say(f"1. A small model learns {options.recipe} from rewards; everything is killed (SIGKILL) after step {KILL_AFTER}")
    settings = [
        "--with",
        "batch_invariant",
        "--dir",
        str(run),
        f"checkpoint.every={CHECKPOINT_EVERY}",
        "data.loader.max_lag=0",
        *options.overrides,
    ]
    code = train_and_kill(run, [options.recipe, *settings], KILL_AFTER)
    say("2. Resumed from that checkpoint, to the end")
    subprocess.run(command("train", "--resume", str(run)), check=True)
    say("3. What it wrote")
    subprocess.run(command("rl", "show", str(run), "--held-out"), check=True)
    last = str(max(event["step"] for event in events(run, "held_out")))
    subprocess.run(command("rl", "show", str(run), "--held-out", "--step", last, "--limit", "3"), check=True)

    facts = proof(run, code)
    facts["seconds_s"] = round(time.monotonic() - start, 1)
    (options.directory / "proof.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    say("What the event log proves")
    learned = facts["held_out_reward_before"] < LOW and facts["held_out_reward_after"] > HIGH
    exact = bool(facts["steps_done_twice"]) and not facts["steps_that_differ"]
    equal = facts["largest_gap"] == 0.0 and facts["tokens_compared"] > 0
    print(f"  learned   reward on held-out tasks went from {facts['held_out_reward_before']:.3f} to {facts['held_out_reward_after']:.3f}")
    print(f"  died      exit by signal {-code} after step {KILL_AFTER}; resumed after step {facts['resumed_after_step']}")
    print(f"  exact     steps {facts['steps_done_twice']} were done twice: {'equal bit for bit' if exact else 'they DIFFER'}")
    print(
        f"  equal     largest difference of a log-probability between trainer and generator: {facts['largest_gap']} ({facts['tokens_compared']} tokens)"
    )
    print(f"  lag       at most {facts['largest_lag']} steps")
    print(f"\nGo on: intarsia rl show {run}   intarsia show {run}   intarsia config {options.recipe}")
    return 0 if learned and exact and equal and facts["largest_lag"] == 0 and code == -signal.SIGKILL else 1


if __name__ == "__main__":
    sys.exit(main())
