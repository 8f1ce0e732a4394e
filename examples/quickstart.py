"""The quick start: a small Llama learns, dies, comes back exactly, and writes.

    python examples/quickstart.py [--directory runs/quickstart] [--steps 400]

Four acts, all through the command line that you would use yourself:

1. train `llama3/debug` on the source code of Python's standard library to the end;
2. begin the same run again elsewhere, and kill it (SIGKILL) in the middle of training;
3. resume it from its last checkpoint, let it pass the point of its death, stop it in order (SIGTERM);
4. let the trained model write.

What is claimed at the end is read from the runs' `events.jsonl`, never from printed text. Exit code 1 when a claim does not hold.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RECIPE = "llama3/debug"
CHECKPOINT_EVERY, KILL_AFTER, STOP_AFTER = 20, 30, 50


def events(run: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The run's events, those called `name` if given; a line that a kill cut off is skipped."""
    found = []
    path = run / "events.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict) and name in (None, event.get("event")):
            found.append(event)
    return found


def steps(run: Path) -> int:
    """The number of the last finished step."""
    return max((event["step"] for event in events(run, "step")), default=0)


def say(text: str) -> None:
    """A heading."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def command(*arguments: str) -> list[str]:
    """`intarsia ...` by the Python that runs this file, shown as a user would type it."""
    print("$ intarsia " + " ".join(f'"{a}"' if " " in a else a for a in arguments), flush=True)
    return [sys.executable, "-m", "intarsia", *arguments]


def run_until(arguments: list[str], reached: Callable[[], bool], number: signal.Signals, limit_s: float = 300.0) -> int:
    """Start a command, send it the signal `number` once `reached()`, and return its exit code (negative: died of a signal)."""
    process = subprocess.Popen(arguments)
    deadline = time.monotonic() + limit_s
    while process.poll() is None and not reached():
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"The run did not get there within {limit_s:.0f} s.")
        time.sleep(0.02)
    if process.poll() is None:
        process.send_signal(number)
    return process.wait()


def train_and_kill(run: Path, arguments: list[str], after: int, limit_s: float = 300.0) -> int:
    """Train into `run`, and kill everything (SIGKILL) after step `after`, once there is a checkpoint. Returns the exit code."""
    code = run_until(command("train", *arguments), lambda: steps(run) >= after and bool(events(run, "checkpoint")), signal.SIGKILL, limit_s)
    saved = events(run, "checkpoint")
    if not saved:
        raise SystemExit(f"The training ended with exit code {code} before its first checkpoint; it says why above.")
    print(f"the process died of signal {-code}; its newest checkpoint holds step {saved[-1]['step']}")
    return code


def done_twice(found: Iterable[tuple[int, tuple[Any, ...]]]) -> tuple[list[int], list[int]]:
    """Of steps in the order of the log, each with what it was: those that were done a second time, and those of them that differ."""
    first: dict[int, tuple[Any, ...]] = {}
    twice, differ = [], []
    for step, values in found:
        if step in first:
            twice.append(step)
            differ += [step] if first[step] != values else []
        first.setdefault(step, values)
    return twice, differ


def train_to_the_end(run: Path, overrides: list[str]) -> None:
    """Act 1."""
    say("1. A small Llama learns from the source code of Python's standard library")
    subprocess.run(command("train", RECIPE, "--dir", str(run), *overrides), check=True)


def kill_and_resume(run: Path, overrides: list[str]) -> tuple[int, int]:
    """Acts 2 and 3. Returns both exit codes."""
    say(f"2. The same run again, killed without warning (SIGKILL) after step {KILL_AFTER}")
    killed = train_and_kill(run, [RECIPE, "--dir", str(run), *overrides], KILL_AFTER)
    say(f"3. Resumed from that checkpoint; stopped in order (SIGTERM) after step {STOP_AFTER}")
    stopped = run_until(
        command("train", "--resume", str(run)),
        lambda: bool(events(run, "resume")) and steps(run) >= STOP_AFTER,
        signal.SIGTERM,
    )
    return killed, stopped


def write(run: Path, prompt: str) -> None:
    """Act 4."""
    say("4. The trained model writes")
    subprocess.run(
        command("generate", str(run), "--prompt", prompt, "--max-tokens", "200", "--temperature", "0.7", "--seed", "1"), check=True
    )


def proof(unbroken: Path, broken: Path, codes: tuple[int, int]) -> dict[str, Any]:
    """What the event logs say."""
    evaluations = events(unbroken, "evaluation")
    reference = {event["step"]: (event["loss"], event["gradient_norm"]) for event in events(unbroken, "step")}
    again = [(event["step"], (event["loss"], event["gradient_norm"])) for event in events(broken, "step")]
    resumed_at = events(broken, "resume")[0]["step"]
    after = [step for step, _ in again if step > resumed_at]
    return {
        "bits_per_byte_before": evaluations[0]["bits_per_byte"],
        "bits_per_byte_after": evaluations[-1]["bits_per_byte"],
        "exit_code_of_the_kill": codes[0],
        "exit_code_of_the_stop": codes[1],
        "resumed_after_step": resumed_at,
        "last_step_after_the_resume": max(after, default=0),
        "steps_compared": len(again),
        "steps_that_differ": [step for step, values in again if reference.get(step) != values],
        "text": events(unbroken, "generate")[-1].get("text"),
    }


def main() -> int:
    """Play the four acts; print and save the proof."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/quickstart"), help="where both runs go; an earlier quick start there is replaced"
    )
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of the whole run")
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE", help="overrides of the recipe, for both runs")
    options = parser.parse_args()
    if options.steps <= STOP_AFTER:
        parser.error(f"--steps must be more than {STOP_AFTER}: the broken run dies after {KILL_AFTER} and is stopped after {STOP_AFTER}.")
    start = time.monotonic()
    unbroken, broken = options.directory / "unbroken", options.directory / "broken"
    for run in (unbroken, broken):
        shutil.rmtree(run, ignore_errors=True)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # One cache of tokenised text serves both runs.
    shared = [
        f"train.steps={options.steps}",
        f"checkpoint.every={CHECKPOINT_EVERY}",
        "evaluation.at_start=true",
        f"data.cache={options.directory / 'cache'}",
        *options.overrides,
    ]

    train_to_the_end(unbroken, shared)
    codes = kill_and_resume(broken, shared)
    write(unbroken, "def ")

    facts = proof(unbroken, broken, codes)
    facts["seconds_s"] = round(time.monotonic() - start, 1)
    (options.directory / "proof.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    say("What the event logs prove")
    exact = not facts["steps_that_differ"] and facts["last_step_after_the_resume"] > KILL_AFTER
    learned = facts["bits_per_byte_after"] < facts["bits_per_byte_before"]
    print(f"  learned   bits per byte on held-out text fell from {facts['bits_per_byte_before']:.2f} to {facts['bits_per_byte_after']:.2f}")
    print(f"  died      exit by signal {-codes[0]} after step {KILL_AFTER}; resumed after step {facts['resumed_after_step']}")
    print(
        f"  exact     {facts['steps_compared']} steps of the broken run, up to step {facts['last_step_after_the_resume']}: losses and gradient norms "
        + ("equal the unbroken run's bit for bit" if exact else f"DIFFER at steps {facts['steps_that_differ'][:10]}")
    )
    print(f"  stopped   in order, exit code {codes[1]} (75: stopped with a checkpoint)")
    say("Where everything lies")
    for path, what in (
        (unbroken, "the run: recipe.json, resolved.json, plugins.json, events.jsonl, checkpoints/"),
        (broken, "the run that died and came back"),
        (options.directory / "proof.json", "the claims above, as JSON"),
    ):
        print(f"  {path}   {what}")
    print(f'\nGo on: intarsia show {unbroken}   intarsia generate {unbroken} --prompt "class "   intarsia config {RECIPE}')
    return 0 if exact and learned and codes == (-signal.SIGKILL, 75) else 1


if __name__ == "__main__":
    sys.exit(main())
