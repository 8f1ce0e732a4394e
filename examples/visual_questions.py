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
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstart import command, done_twice, events, say, steps, train_and_kill

if TYPE_CHECKING:
    from intarsia_multimodal.exam import Score

CHECKPOINT_EVERY, KILL_AFTER = 20, 30
RIGHT, CHANCE = 0.8, 0.25


def examine(run: Path, count: int) -> tuple[Score, float]:
    """The score of the run's answers to questions on held-out scenes, and the share that one gets who does not look. Some are printed."""
    import chz
    from intarsia.config import load_saved
    from intarsia.plugins import current
    from intarsia_data.tokenizer import text_of
    from intarsia_generation import SamplingConfig, load
    from intarsia_multimodal.config import DrawnConfig
    from intarsia_multimodal.exam import grade, questions

    config = load_saved(run).recipe.data.mixture[0].source
    if not isinstance(config, DrawnConfig):
        raise SystemExit("The recipe's first source is not `drawn`: there are no held-out scenes to ask about.")
    source: Any = current().build(chz.replace(config, part="held_out", documents=count))
    asked = questions(source, range(count))
    completions = load(run, device="cpu").generate([each.prompt for each in asked], SamplingConfig(max_tokens=12, temperature=0.0))
    answers = [completion.text for completion in completions]
    for question, answer in zip(asked[:8], answers, strict=False):
        print(f"  {text_of(question.prompt[-1].content)} {answer!r} ({question.answer!r})")
    return grade(asked, answers), source.chance()


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
    settings = ["--dir", str(run), f"checkpoint.every={CHECKPOINT_EVERY}", "evaluation.every=0", *options.overrides]
    code = train_and_kill(run, [options.recipe, *settings], KILL_AFTER, limit_s=3600.0)
    say("2. Resumed from that checkpoint, to the end")
    subprocess.run(command("train", "--resume", str(run)), check=True)
    trained_s = time.monotonic() - start
    say(f"3. {options.questions} questions on scenes that it has never seen (its answer, the right one)")
    score, chance = examine(run, options.questions)

    twice, differ = done_twice((event["step"], (event["loss"], event["gradient_norm"])) for event in events(run, "step"))
    facts = {
        "right": score.accuracy,
        "right_by_kind": {kind: right / asked for kind, (right, asked) in score.by_kind.items()},
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
    learned, exact = score.accuracy >= RIGHT and chance <= CHANCE, bool(twice) and not differ
    kinds = ", ".join(f"{kind} {right / asked:.0%}" for kind, (right, asked) in sorted(score.by_kind.items()))
    print(f"  learned   {score.accuracy:.1%} of the answers are right ({kinds}); guesses would be in {chance:.1%}")
    print(f"  died      exit by signal {-code} after step {KILL_AFTER}; resumed after step {facts['resumed_after_step']}")
    print(f"  exact     steps {twice} were done twice: {'equal bit for bit' if exact else 'they DIFFER'}")
    print(f"  took      {trained_s:.0f} s of training, starts included")
    print(f"\nGo on: intarsia show {run}   intarsia config {options.recipe}")
    return 0 if learned and exact and code == -signal.SIGKILL else 1


if __name__ == "__main__":
    sys.exit(main())
