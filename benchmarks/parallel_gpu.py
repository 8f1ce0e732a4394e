"""Tensor, context, expert and pipeline parallelism on GPUs: tokens per second and exposed communication; and one GPU by itself. Writes one JSON.

    python benchmarks/parallel_gpu.py OUT.json                                       # two GPUs, every variant
    python benchmarks/parallel_gpu.py OUT.json tp2 pp2-1f1b                          # some of them
    python benchmarks/parallel_gpu.py OUT.json --alone                               # those of one GPU
    python benchmarks/parallel_gpu.py OUT.json --device cpu --debug-sizes            # does it run? (gloo)

    python benchmarks/parallel_gpu.py OUT.json --inductor-cache FOLDER --warm        # compiles all variants at once, a step each, and times nothing
    python benchmarks/parallel_gpu.py OUT.json --inductor-cache FOLDER --limit-s 40  # then: 40 s for each from its first step on
    python benchmarks/parallel_gpu.py OUT.json cp2-ring --compile none               # as written: no minute of compiling, but other figures

Each variant is `intarsia train` on a recipe of `parallel_recipes.py` as two processes (one where it is in `ALONE`), its mesh and settings as below; figures are of the median step
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exposure import exposure
from train_gpu import top_kernels

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
"""Name: recipe, settings. On two GPUs."""
ALONE: dict[str, tuple[str, list[str]]] = {
    "alone": ("wide", []),
    "alone-recomputed": ("wide", ["recompute.mode=blocks", "train.micro_batch=2"]),
    "alone-muon": ("wide", ["optimizer=muon"]),
    "alone-experts": ("experts", []),
}
"""The same on one."""
EVERY = {**VARIANTS, **ALONE}

COMMUNICATION = ("nccl", "copy_engine", "memcpy ptop", "symm")
WARMUP = 4
TEARDOWN_S = 12.0
"""How long processes may take to leave once a run has ended."""


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
    steps, run = arguments.steps, folder / name
    shutil.rmtree(run, ignore_errors=True)
    command = command_of(name, arguments, folder, run, [f"train.steps={steps}", f"profile.steps=[{steps - 1}]"])
    start = time.perf_counter()
    error, left = finished(command, environment_of(arguments, folder), run, arguments)
    entry: dict[str, Any] = {"command": told_of(command, folder)}
    if error:
        entry["error"] = error[-6000:]
    if left:
        entry["teardown"] = left
    # What a run that was cut off has logged counts as well.
    with contextlib.suppress(*((OSError, StopIteration, ValueError, KeyError) if error else ())):
        entry |= figures(run, steps)
    return entry | {"wall_s": round(time.perf_counter() - start, 1)}


def warm(names: list[str], arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One step of each variant, several at a time, for the sake of what they leave in the compiler's caches: seconds of each, or what went wrong."""

    def one(name: str) -> tuple[str, Any]:
        run, start = folder / f"warm-{name}", time.perf_counter()
        shutil.rmtree(run, ignore_errors=True)
        command = command_of(name, arguments, folder, run, ["train.steps=1"])
        error, _ = finished(command, environment_of(arguments, folder), run, arguments)
        taken = round(time.perf_counter() - start, 1)
        print(f"warm {name}: {taken} s{error and ', ' + error[-300:]}", flush=True)
        return name, {"error": error[-6000:], "wall_s": taken} if error else {"wall_s": taken}

    with ThreadPoolExecutor(arguments.warm) as pool:
        return dict(pool.map(one, names))


def command_of(name: str, arguments: argparse.Namespace, folder: Path, run: Path, lengths: list[str]) -> list[str]:
    """What trains a variant."""
    recipe, settings = EVERY[name]
    recipe = f"{ROOT / 'parallel_recipes.py'}:{recipe}{'_debug' * arguments.debug_sizes}"
    command = ["intarsia", "train", recipe, "--dir", str(run), "--quiet", "--processes", str(processes_of(name, arguments.processes))]
    command += [f"train.device={arguments.device}", *lengths, f"data.cache={folder / 'cache'}", *settings]
    return command + [f"compile.mode={arguments.compile}"] * bool(arguments.compile) + arguments.settings


def processes_of(name: str, many: int = 2) -> int:
    """How many a variant runs as."""
    return 1 if name in ALONE else many


def told_of(command: list[str], folder: Path) -> str:
    """The command without this machine's folders."""
    return " ".join(command).replace(str(folder), "FOLDER").replace(f"{ROOT}/", "benchmarks/")


def environment_of(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The run's environment. Ranks find what another run has compiled, for the same shapes and device, in the cache's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "INTARSIA_BENCH_FOLDER": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    if arguments.inductor_cache:
        cache = arguments.inductor_cache.resolve()
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    return environment


def finished(command: list[str], environment: dict[str, str], run: Path, arguments: argparse.Namespace) -> tuple[str, str]:
    """Run it to its end: what it wrote where it failed or took too long, "" else; and what was to say of its teardown, "" else.

    Until the first step is logged the limit is that for compiling, from then on the other one. Once the run has said that it ended, processes that do not leave are ended.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:

        def text() -> str:
            output.seek(0)
            return output.read()

        process = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=subprocess.STDOUT, env=environment)
        state, deadline, limit = "its first step was logged", time.monotonic() + arguments.first_step_limit_s, arguments.first_step_limit_s
        while process.poll() is None:
            time.sleep(0.2)
            logged = events_of(run)
            if state.startswith("its first") and '"event": "step"' in logged:
                state, limit = "it ended", arguments.limit_s
                deadline = time.monotonic() + limit
            if state == "it ended" and '"event": "run_end"' in logged and '"outcome": "failed"' not in logged:
                state, limit = "", TEARDOWN_S
                deadline = time.monotonic() + limit
            if time.monotonic() > deadline:
                end(process)
                said = f"{limit:.0f} s were over before {state}\n{text()}"
                return (said, "") if state else ("", f"all was written; processes that had not left after {limit:.0f} s were ended")
        return (f"exit code {process.returncode}\n{text()}" if process.returncode else ""), ""


def events_of(run: Path) -> str:
    """What a run has logged; "" before it has."""
    try:
        return (run / "events.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def end(process: subprocess.Popen[Any]) -> None:
    """End a launcher and its ranks, which are told to say where they are first."""
    ranks = children(process.pid)
    for number, patience_s in ((signal.SIGABRT, 3.0), (signal.SIGKILL, 10.0)):
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
    process.kill()


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
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"Any of {', '.join(EVERY)}; default: all of two GPUs.")
    parser.add_argument("--alone", action="store_true", help="Every variant of one GPU.")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--debug-sizes", action="store_true")
    parser.add_argument("--limit-s", type=float, default=90.0, help="How long a variant may take from its first step's end on.")
    parser.add_argument("--first-step-limit-s", type=float, default=180.0, help="How long it may take until then: start, data, compiling.")
    parser.add_argument("--compile", metavar="MODE", help="Another compile.mode than the recipe's (local): none runs as written.")
    parser.add_argument("--inductor-cache", type=Path, metavar="FOLDER", help="Where compiled code is kept for other variants and calls.")
    parser.add_argument(
        "--warm",
        type=int,
        nargs="?",
        const=2,
        metavar="N",
        help="Train one step of each variant, N at a time (2), to fill the compiler's caches, and time nothing. The device must hold N of them.",
    )
    parser.add_argument("--folder", type=Path, help="Where text, tokens and runs are kept for other calls; a temporary one by default.")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="Further settings of every variant."
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.variants if name not in EVERY]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}; there are {', '.join(EVERY)}")
    variants = [*arguments.variants, *(ALONE if arguments.alone else ())] or list(VARIANTS)
    record: dict[str, Any] = {"benchmark": "parallel_gpu", "debug_sizes": arguments.debug_sizes, "variants": {}}
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.warm:
            record["warm"] = warm(variants, arguments, folder)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            return int(any("error" in entry for entry in record["warm"].values()))
        for variant in variants:
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
