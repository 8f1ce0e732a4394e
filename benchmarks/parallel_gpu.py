"""Tensor, context, expert and pipeline parallelism on GPUs: tokens per second and exposed communication. Writes one JSON.

    python benchmarks/parallel_gpu.py OUT.json                                       # two GPUs, every variant
    python benchmarks/parallel_gpu.py OUT.json tp2 pp2-1f1b                          # some of them
    python benchmarks/parallel_gpu.py OUT.json --device cpu --debug-sizes            # does it run? (gloo)

Each variant is `intarsia train` on a recipe of `parallel_recipes.py` as two processes, its mesh and settings as below; figures are of the median step
after warm-up, and of a traced step (of each rank): how long communication ran while nothing computed. The file is written after each variant, so that a run that is
cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from exposure import exposure
from llama3_1b_gpu import top_kernels

ROOT = Path(__file__).resolve().parent

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "dp2": ("wide", []),
    "tp2": ("wide", ["mesh.tp=2"]),
    "cp2-ring": ("wide", ["mesh.cp=2", "parallel=declared", "parallel.context=ring"]),
    "cp2-gather": ("wide", ["mesh.cp=2", "parallel=declared", "parallel.context=gather"]),
    "cp2-ulysses": ("wide", ["mesh.cp=2", "parallel=declared", "parallel.context=ulysses"]),
    "pp2-1f1b": ("wide", ["mesh.pp=2", "engine=pipeline", "engine.schedule=1f1b"]),
    "pp2-interleaved": ("wide", ["mesh.pp=2", "engine=pipeline", "engine.schedule=interleaved", "engine.schedule.virtual_stages=2"]),
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
    folder.mkdir(parents=True, exist_ok=True)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    start = time.perf_counter()
    error = finished(command, environment, arguments.limit_s)
    entry: dict[str, Any] = {"command": " ".join(command).replace(str(folder), "FOLDER").replace(f"{ROOT}/", "benchmarks/")}
    if error:
        entry["error"] = error[-6000:]
    # What a run that was cut off has logged counts as well.
    with contextlib.suppress(*((OSError, StopIteration, ValueError, KeyError) if error else ())):
        entry |= figures(run, steps)
    return entry | {"wall_s": round(time.perf_counter() - start, 1)}


def finished(command: list[str], environment: dict[str, str], limit_s: float) -> str:
    """Run it to its end; what it wrote where it failed or took too long, "" else. Ranks are told to say where they are before they are ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        ranks = children(process.pid)
        for number, patience_s in ((signal.SIGABRT, 3.0), (signal.SIGKILL, 10.0)):
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                text, _ = process.communicate(timeout=patience_s)
                return f"did not end within {limit_s:.0f} s\n{text}"
        process.kill()
        return f"did not end within {limit_s:.0f} s, and was killed"
    return f"exit code {process.returncode}\n{text}" if process.returncode else ""


def children(process: int) -> list[int]:
    """The ranks that a launcher has started: they have sessions of their own, and would outlive it."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]) == process:
                found.append(int(status.parent.name))
    return found


def figures(run: Path, steps: int) -> dict[str, Any]:
    """What a run's events and its trace say."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    first = next(event for event in events if event["event"] == "run_start")
    logged = [event for event in events if event["event"] == "step"][: steps - 1]
    found: dict[str, Any] = {name: first[name] for name in ("device", "mesh", "versions")}
    found |= {"steps_s": [round(event["seconds_s"], 5) for event in logged], "losses": [event["loss"] for event in logged]}
    found["peak_memory_bytes"] = max((event["memory_bytes"] or 0 for event in logged), default=0)
    if len(logged) > WARMUP:
        seconds = statistics.median(event["seconds_s"] for event in logged[WARMUP:])
        found |= {"step_s": seconds, "tokens_per_s": logged[-1]["tokens"] / seconds, "mfu": logged[-1]["mfu"]}
    traces = sorted((run / "traces").glob("step-*-rank-*.json"))
    return found | {"profile": [exposed(trace) for trace in traces], "kernels": longest(traces[0]) if traces else []}


def longest(trace: Path) -> list[dict[str, Any]]:
    """The kernels that take most of a traced step."""
    try:
        return list(top_kernels(trace, 14)["top"])
    except ValueError:  # There is none.
        return []


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
    parser.add_argument("--folder", type=Path, help="Where text, tokens and runs are kept for other calls; a temporary one by default.")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="Further settings of every variant."
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    record: dict[str, Any] = {"benchmark": "parallel_gpu", "debug_sizes": arguments.debug_sizes, "variants": {}}
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for variant in arguments.variants or VARIANTS:
            entry = run_variant(variant, arguments, folder)
            record["variants"][variant] = entry
            told = (
                f"{entry['tokens_per_s']:.0f} tokens/s, {entry['profile']}" if "tokens_per_s" in entry else f"steps {entry.get('steps_s')}"
            )
            shown = f"{entry['error'][-300:]} ({told})" if "error" in entry else told
            print(f"{variant}: {shown}", flush=True)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in entry for entry in record["variants"].values()))


if __name__ == "__main__":
    sys.exit(main())
