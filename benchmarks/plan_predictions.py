"""What `intarsia plan` says of runs of `parallel_gpu.py`, written down before they are measured; and how near it came.

    python benchmarks/plan_predictions.py predict benchmarks/results/plan-predictions.json --commit COMMIT
    python benchmarks/plan_predictions.py predict benchmarks/results/plan-predictions.json pp2-interleaved ep2 --commit COMMIT
    python benchmarks/plan_predictions.py predict benchmarks/results/plan-predictions-alone.json --alone --commit COMMIT
    python benchmarks/plan_predictions.py compare benchmarks/results/plan-predictions.json MEASURED.json

`predict` needs no GPU. `compare` reads what `parallel_gpu.py` has written, and puts measured figures and ratios (predicted over measured) beside the predictions, which it leaves as they are. Predicted is
the first rank, whose memory the run records.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent

# The four runs that were named first: two GPUs each. Four of one GPU are named in a file of their own (`--alone`).
NAMED = ("dp2", "tp2", "cp2-ring", "pp2-1f1b")
PAIRS = (("pp2-interleaved", "pp2-1f1b"),)
"""Whose steps are held against one another, as planned and as measured."""
MEMORY, TIME = 0.05, 0.15


def predict(output: Path, commit: str, further: list[str], alone: bool = False) -> int:
    """Plan every named run, or those of one GPU, on H200; or `further` ones beside those that the file has, which stay as they are."""
    from intarsia import plugins
    from intarsia.config import resolve
    from intarsia.mesh import check_mesh
    from intarsia_planner.devices import find
    from intarsia_planner.plan import make_plan
    from parallel_gpu import ALONE, EVERY, processes_of

    device = find("h200")
    record: dict[str, Any] = {
        "benchmark": "plan_predictions",
        "commit": commit,
        "device": device.title,
        "wanted": {"peak_memory_bytes": MEMORY, "step_s": TIME},
        "runs": {},
    }
    if further:
        record = json.loads(output.read_text(encoding="utf-8"))
    for name in [name for name in further if name not in record["runs"]] if further else ALONE if alone else NAMED:
        recipe, settings = EVERY[name]
        chosen = resolve(f"{ROOT / 'parallel_recipes.py'}:{recipe}", settings, []).recipe
        plan = make_plan(chosen, check_mesh(chosen.mesh, processes_of(name)), device, plugins.current())
        first = plan.stages[0]
        record["runs"][name] = {
            "recipe": f"benchmarks/parallel_recipes.py:{recipe}",
            "settings": settings,
            "predicted": {
                "step_s": plan.step,
                "tokens_per_s": plan.tokens / plan.step,
                "mfu": plan.mfu,
                "peak_memory_bytes": first.held.peak,
                "moment": first.held.moment,
            },
            "memory_bytes": _numbers(first.held),
            "seconds": _numbers(first.spent),
        }
        if further:
            record["runs"][name]["predicted_at"] = commit
        print(f"{name}: {plan.step:.3f} s, {first.held.peak / 1e9:.2f} GB")
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _numbers(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def compare(predictions: Path, measured: Path) -> int:
    """Predicted over measured; 1 if a named run is missing or further off than wanted."""
    record = json.loads(predictions.read_text(encoding="utf-8"))
    found = json.loads(measured.read_text(encoding="utf-8"))
    record["measured_commit"] = found.get("commit", "")
    failed = False
    for name, run in record["runs"].items():
        variant = found["variants"].get(name, {})
        for stale in ("measured", "ratio"):
            run.pop(stale, None)
        # A run that was ended after its steps has measured them; one that was ended before has not.
        if "step_s" not in variant:
            run["not_measured"] = variant.get("error", "not run").split("\n")[0]
            print(f"{name}: not measured ({run['not_measured']})")
            failed = True
            continue
        run.pop("not_measured", None)
        run["measured"] = {each: variant[each] for each in ("step_s", "peak_memory_bytes", "tokens_per_s", "mfu", "steps_s")}
        if "commit" in variant:  # One that was measured later than the file's others.
            run["measured"]["commit"] = variant["commit"]
        run["ratio"] = {each: run["predicted"][each] / variant[each] for each in record["wanted"]}
        good = {each: abs(ratio - 1) <= record["wanted"][each] for each, ratio in run["ratio"].items()}
        failed |= not all(good.values())
        print(name, ", ".join(f"{each}: {ratio:.3f}{'' if good[each] else ' (too far)'}" for each, ratio in run["ratio"].items()))
    for one, other in PAIRS:
        both = [record["runs"].get(name, {}) for name in (one, other)]
        ratios = {
            what: both[0][what]["step_s"] / both[1][what]["step_s"]
            for what in ("predicted", "measured")
            if all(what in run for run in both)
        }
        if ratios:
            record.setdefault("pairs", {})[f"{one} / {other}"] = ratios
            print(f"step of {one} / {other}:", ", ".join(f"{what} {ratio:.3f}" for what, ratio in ratios.items()))
    predictions.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(failed)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    first = actions.add_parser("predict")
    first.add_argument("output", type=Path)
    first.add_argument(
        "names", nargs="*", help="Further variants of parallel_gpu.py, to be added to the file. Default: a new file of the four named ones."
    )
    first.add_argument("--alone", action="store_true", help="A new file of the named ones of one GPU instead.")
    first.add_argument("--commit", default="", help="What the predictions were made with.")
    second = actions.add_parser("compare")
    second.add_argument("predictions", type=Path)
    second.add_argument("measured", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "compare":
        return compare(arguments.predictions, arguments.measured)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("INTARSIA_BENCH_FOLDER", folder)
        return predict(arguments.output, arguments.commit, arguments.names, arguments.alone)


if __name__ == "__main__":
    sys.exit(main())
