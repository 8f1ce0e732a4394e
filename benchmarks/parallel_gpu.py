"""Tensor, context, expert and pipeline parallelism on GPUs: tokens per second and exposed communication. Writes one JSON.

    python benchmarks/parallel_gpu.py OUT.json                                       # two GPUs, every variant
    python benchmarks/parallel_gpu.py OUT.json tp2 pp2-1f1b                          # some of them
    python benchmarks/parallel_gpu.py OUT.json --device cpu --debug-sizes            # does it run? (gloo)

Each variant is `intarsia train` on a recipe of `parallel_recipes.py` as two processes, its mesh and settings as below; figures are of the median step
after warm-up, and of a traced step: how long communication ran while nothing computed. The file is written after each variant, so that a run that is
cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flexshard_measure import exposure

ROOT = Path(__file__).resolve().parent

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "dp2": ("wide", []),
    "tp2": ("wide", ["mesh.tp=2"]),
    "cp2-ring": ("wide", ["mesh.cp=2", "parallel=declared", "parallel.context=ring"]),
    "cp2-gather": ("wide", ["mesh.cp=2", "parallel=declared", "parallel.context=gather"]),
    "cp2-ulysses": ("wide", ["mesh.cp=2", "parallel=declared", "parallel.context=ulysses"]),
    "pp2-1f1b": ("wide", ["mesh.pp=2", "engine=pipeline", "engine.schedule=1f1b"]),
    "pp2-interleaved": ("wide", ["mesh.pp=2", "engine=pipeline", "engine.schedule=interleaved", "engine.schedule.virtual=2"]),
    "moe-dp2": ("experts", []),
    "ep2": ("experts", ["mesh.ep=2"]),
}
"""Name: recipe, settings."""

COMMUNICATION = ("nccl", "copy_engine", "memcpy ptop", "symm")
WARMUP = 4


def exposed(trace: Path) -> dict[str, float]:
    """Milliseconds of one traced step by what runs."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    spans = [
        (event["ts"], event["ts"] + event["dur"], any(word in event["name"].lower() for word in COMMUNICATION))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return {f"{what}_ms": value / 1e3 for what, value in exposure(spans).items()} if spans else {}


def run_variant(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run of `intarsia train` and its figures."""
    recipe, settings = VARIANTS[name]
    steps = arguments.steps
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    command = [
        "intarsia",
        "train",
        f"{ROOT / 'parallel_recipes.py'}:{recipe}{'_debug' * arguments.debug_sizes}",
        "--dir",
        str(run),
        "--quiet",
    ]
    command += ["--processes", str(arguments.processes), f"train.device={arguments.device}", f"train.steps={steps}"]
    command += [f"data.cache={folder / 'cache'}", f"profile.steps=[{steps - 1}]", *settings, *arguments.settings]
    environment = {**os.environ, "INTARSIA_BENCH_FOLDER": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, env=environment, timeout=arguments.limit_s
    )
    shown = " ".join(command).replace(str(folder), "FOLDER").replace(f"{ROOT}/", "benchmarks/")
    if done.returncode:
        return {"command": shown, "returncode": done.returncode, "error": (done.stdout + done.stderr)[-3000:]}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    first = next(event for event in events if event["event"] == "run_start")
    logged = [event for event in events if event["event"] == "step"][: steps - 1]
    seconds = statistics.median(event["seconds_s"] for event in logged[WARMUP:])
    return {
        "command": shown,
        "device": first["device"],
        "mesh": first["mesh"],
        "versions": first["versions"],
        "step_s": seconds,
        "tokens_per_s": logged[-1]["tokens"] / seconds,
        "mfu": logged[-1]["mfu"],
        "peak_memory_bytes": max(event["memory_bytes"] or 0 for event in logged),
        "steps_s": [round(event["seconds_s"], 5) for event in logged],
        "losses": [event["loss"] for event in logged],
        "profile": exposed(next((run / "traces").glob("step-*-rank-0000.json"))),
        "wall_s": round(time.perf_counter() - start, 1),
    }


def main() -> int:
    """Run the variants; 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"Any of {', '.join(VARIANTS)}; default: all.")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--debug-sizes", action="store_true")
    parser.add_argument("--limit-s", type=float, default=150.0, help="How long a variant may take.")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="Further settings of every variant."
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    record: dict[str, Any] = {"benchmark": "parallel_gpu", "debug_sizes": arguments.debug_sizes, "variants": {}}
    with tempfile.TemporaryDirectory() as name:
        for variant in arguments.variants or VARIANTS:
            try:
                entry = run_variant(variant, arguments, Path(name))
            except subprocess.TimeoutExpired as error:
                entry = {"error": f"did not end within {error.timeout:.0f} s"}
            record["variants"][variant] = entry
            shown = entry["error"][-300:] if "error" in entry else f"{entry['tokens_per_s']:.0f} tokens/s, {entry['profile']}"
            print(f"{variant}: {shown}", flush=True)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in entry for entry in record["variants"].values()))


if __name__ == "__main__":
    sys.exit(main())
