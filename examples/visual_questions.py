"""A small model learns to see: it answers questions on drawn images, is killed while it learns, and comes back exactly.

    python examples/visual_questions.py [--recipe qwen3_5/debug] [--directory runs/visual-questions] [--questions 400] [PATH=VALUE ...]

Three acts, through the command line and the library that you would use yourself:

1. train the recipe on questions with drawn images, and kill everything (SIGKILL) in the middle;
2. resume it from its last checkpoint and let it run to the end: the steps that were done before the kill and are done again must be the same, bit for bit;
3. ask it about scenes that it has never seen, and let it write its answers, greedily.

What is claimed at the end is read from the run's `events.jsonl` and from the answers. Exit code 1 when a claim does not hold.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quickstart import command, events, run_until, say, steps

CHECKPOINT_EVERY, KILL_AFTER = 20, 30
RIGHT, CHANCE = 0.8, 0.25


def repeated(run: Path) -> tuple[list[int], list[int]]:
    """The steps that were done twice, and those of them that differ."""
    first: dict[int, tuple[float, float]] = {}
    twice, differ = [], []
    for event in events(run, "step"):
        values = (event["loss"], event["gradient_norm"])
        if event["step"] in first:
            twice.append(event["step"])
            differ += [event["step"]] if first[event["step"]] != values else []
        first.setdefault(event["step"], values)
    return twice, differ


def examine(run: Path, questions: int) -> tuple[dict[str, tuple[int, int]], float]:
    """Right answers and questions by kind, on held-out scenes, and the share that one gets who does not look. Some are printed."""
    import chz
    from intarsia.config import load_saved
    from intarsia.plugins import current
    from intarsia_generation import SamplingConfig, load
    from intarsia_multimodal.config import DrawnConfig

    config = load_saved(run).recipe.data.mixture[0].source
    if not isinstance(config, DrawnConfig):
        raise SystemExit("The recipe's first source is not `drawn`: there are no held-out scenes to ask about.")
    source: Any = current().build(chz.replace(config, part="held_out", documents=questions))
    documents = [source[index] for index in range(len(source))]
    generator = load(run, device="cpu")
    completions = generator.generate([each.messages[:-1] for each in documents], SamplingConfig(max_tokens=12, temperature=0.0))
    right: collections.Counter[str] = collections.Counter()
    asked: collections.Counter[str] = collections.Counter()
    for index, (document, completion) in enumerate(zip(documents, completions, strict=True)):
        question, expected = (message.content for message in document.messages[-2:])
        kind = source.kind_of(index)
        asked[kind] += 1
        right[kind] += completion.text == expected
        if index < 8:
            print(f"  {[part for part in question if isinstance(part, str)][-1]} {completion.text!r} ({expected!r})")
    return {kind: (right[kind], asked[kind]) for kind in asked}, source.chance()


def main() -> int:
    """Play the acts; print and save the proof."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="qwen3_5/debug", help="what to train")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/visual-questions"), help="where the run goes; an earlier one there is replaced"
    )
    parser.add_argument("--questions", type=int, default=400, help="how many held-out questions are asked")
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE", help="overrides of the recipe")
    options = parser.parse_args()
    start, run = time.monotonic(), options.directory / "run"
    shutil.rmtree(run, ignore_errors=True)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")

    say(f"1. A small model learns to answer questions on images; everything is killed (SIGKILL) after step {KILL_AFTER}")
    code = run_until(
        command(
            "train", options.recipe, "--dir", str(run), f"checkpoint.every={CHECKPOINT_EVERY}", "evaluation.every=0", *options.overrides
        ),
        lambda: steps(run) >= KILL_AFTER and bool(events(run, "checkpoint")),
        signal.SIGKILL,
        limit_s=3600.0,
    )
    print(f"the process died of signal {-code}; its newest checkpoint holds step {events(run, 'checkpoint')[-1]['step']}")
    say("2. Resumed from that checkpoint, to the end")
    subprocess.run(command("train", "--resume", str(run)), check=True)
    trained_s = time.monotonic() - start
    say(f"3. {options.questions} questions on scenes that it has never seen (its answer, the right one)")
    found, chance = examine(run, options.questions)

    twice, differ = repeated(run)
    share = sum(right for right, _ in found.values()) / sum(asked for _, asked in found.values())
    facts = {
        "right": share,
        "right_by_kind": {kind: right / asked for kind, (right, asked) in found.items()},
        "chance": chance,
        "exit_code_of_the_kill": code,
        "resumed_after_step": events(run, "resume")[0]["step"],
        "steps": steps(run),
        "steps_done_twice": twice,
        "steps_that_differ": differ,
        "training_s": round(trained_s, 1),
        "seconds_s": round(time.monotonic() - start, 1),
    }
    (options.directory / "proof.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    say("What the event log and the answers prove")
    learned, exact = share >= RIGHT and chance <= CHANCE, bool(twice) and not differ
    kinds = ", ".join(f"{kind} {right / asked:.0%}" for kind, (right, asked) in sorted(found.items()))
    print(f"  learned   {share:.1%} of the answers are right ({kinds}); guesses would be in {chance:.1%}")
    print(f"  died      exit by signal {-code} after step {KILL_AFTER}; resumed after step {facts['resumed_after_step']}")
    print(f"  exact     steps {twice} were done twice: {'equal bit for bit' if exact else 'they DIFFER'}")
    print(f"  took      {trained_s:.0f} s of training, starts included")
    print(f"\nGo on: intarsia show {run}   intarsia config {options.recipe}")
    return 0 if learned and exact and code == -signal.SIGKILL else 1


if __name__ == "__main__":
    sys.exit(main())
