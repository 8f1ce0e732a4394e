"""Training a published model on GPUs by the command line: tokens per second, MFU and peak memory, as JSON.

    python benchmarks/train_gpu.py                                    # Llama 3 1B, compiled, whole rows of one document
    python benchmarks/train_gpu.py --data stdlib --profile            # packed documents; time by GPU kernel
    python benchmarks/train_gpu.py --processes 8 compile.mode=none kernels.attention=flex
    python benchmarks/train_gpu.py --recipe qwen3_5/2b --steps 14 --warmup 5 sharder.reshard=never compile.mode=local recompute.mode=none

It runs `intarsia train RECIPE` for some steps, with every further PATH=VALUE, and reads the run's events.jsonl; a run that is cut off by `--limit-s` counts as far as it came. The figures are of the
steps after warm-up: the median step. MFU counts `flops_per_token` of the model (backward twice forward, nothing for recomputation, causal
attention over the whole row), so rows hold one document by default; packed documents do less attention than is counted.
The byte tokenizer's ids stand in for text: the model keeps its rows of embedding and head. There are no images.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TRACED = 2
"""Steps that a profile covers, at the end of the run and outside the figures."""


def long_text(folder: Path, characters: int = 16_000_000) -> Path:
    """A file that is one document, so that every row is whole: random words of printable characters. Made once."""
    path = folder / "long.txt"
    if path.exists():
        return path
    draw = random.Random(0)
    words = ["".join(chr(draw.randrange(33, 127)) for _ in range(draw.randrange(1, 12))) for _ in range(50_000)]
    with path.open("w", encoding="ascii") as file:
        written = 0
        while written < characters:
            written += file.write(" ".join(draw.choices(words, k=5000)) + " ")
    return path


def top_kernels(trace: Path, count: int) -> dict[str, Any]:
    """Milliseconds on the GPU by kernel name, largest first, of a trace in Chrome's format; and of all kernels, and of the span they cover."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    total: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for event in device:
        name = re.sub(r"\s+", " ", event["name"])[:160]
        total[name] += event["dur"] / 1e3
        calls[name] += 1
    span = (max(event["ts"] + event["dur"] for event in device) - min(event["ts"] for event in device)) / 1e3
    rows = [{"ms": round(ms, 3), "calls": calls[name], "kernel": name} for name, ms in total.most_common(count)]
    return {"kernels_ms": round(sum(total.values()), 3), "span_ms": round(span, 3), "top": rows}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run and its figures."""
    steps = arguments.steps + (TRACED if arguments.profile else 0)
    settings = [
        f"train.steps={steps}",
        f"train.sequence_length={arguments.sequence}",
        f"train.micro_batch={arguments.micro_batch}",
        f"train.global_batch={arguments.global_batch}",
        "train.log_every=1",
        "evaluation.every=0",
        "checkpoint.every=0",
        "schedule.warmup_steps=10",
        f"data.cache={folder / 'cache'}",
    ]
    if arguments.data == "whole":
        settings += ["data.held_out=0.0", "data.mixture.0.source=text", f'data.mixture.0.source.paths=["{long_text(folder)}"]']
    if arguments.profile:
        settings.append(f"profile.steps={list(range(arguments.steps, steps))}")
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = ["intarsia", "train", arguments.recipe, "--dir", str(run), "--quiet", *settings, *arguments.settings]
    if arguments.processes > 1:
        command += ["--processes", str(arguments.processes)]
    begin = time.perf_counter()
    error = finished(command, arguments.limit_s)
    found: dict[str, Any] = {"command": " ".join(command).replace(str(folder), "FOLDER")}
    if error:
        found["error"] = error[-4000:]
    # What a run that was cut off has logged counts as well.
    with contextlib.suppress(*((OSError, StopIteration, ValueError, KeyError) if error else ())):
        found |= figures(run, arguments.steps, arguments.warmup) | {"data": arguments.data}
        if arguments.profile:
            found["profile"] = top_kernels(run / "traces" / f"step-{steps - 1:06}-rank-0000.json", arguments.top)
    return found | {"wall_s": round(time.perf_counter() - begin, 1)}


def finished(command: list[str], limit_s: float) -> str:
    """Run it to its end, or until its time is over: what it wrote where it failed, "" else."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # A launcher has to end its ranks, which have sessions of their own; then whatever of the run is left.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=10)
                return f"{limit_s:.0f} s were over\n{output}"
        return f"{limit_s:.0f} s were over, and its processes did not end"
    return f"exit code {process.returncode}\n{output}" if process.returncode else ""


def figures(run: Path, steps: int, warmup: int) -> dict[str, Any]:
    """What a run's events say of its first `steps` steps: medians of those behind `warmup`, if it came so far."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    start = next(event for event in events if event["event"] == "run_start")
    logged = [event for event in events if event["event"] == "step"][:steps]
    resolved = json.loads((run / "resolved.json").read_text(encoding="utf-8"))
    found = {
        "device": start["device"],
        "world": start["world"],
        "versions": start["versions"],
        "kernels": {path: fact["value"] for path, fact in resolved.get("decisions", {}).items() if path.startswith("kernels.")},
        "peak_memory_bytes": max((event["memory_bytes"] or 0 for event in logged), default=0),
        "steps_s": [round(event["seconds_s"], 5) for event in logged],
        "losses": [event["loss"] for event in logged],
    }
    kept = logged[warmup:]
    if kept:
        seconds, tokens = statistics.median(event["seconds_s"] for event in kept), kept[-1]["tokens"]
        mfus = [event["mfu"] for event in kept if event["mfu"] is not None]
        found |= {"tokens_per_step": tokens, "step_s": seconds, "tokens_per_s": tokens / seconds}
        found["mfu"] = statistics.median(mfus) if mfus else None
    return found


def main() -> int:
    """Run and print; 1 if the run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="llama3/1b")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=20, help="Steps that do not count.")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=8, help="Rows of one step over all processes.")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--data", choices=("whole", "stdlib"), default="whole")
    parser.add_argument("--profile", action="store_true", help="Trace the last steps and add the time by GPU kernel.")
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="How long the run may take, its start and compilation included.")
    parser.add_argument("--out", type=Path, help="Write the JSON there as well.")
    parser.add_argument("--folder", type=Path, help="Where the run and its data go; default: a temporary folder.")
    parser.add_argument("settings", nargs="*", metavar="PATH=VALUE", help="Further settings of the recipe.")
    arguments = parser.parse_args()
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        found = measure(arguments, arguments.folder.resolve())
    else:
        with tempfile.TemporaryDirectory() as name:
            found = measure(arguments, Path(name))
    print(json.dumps(found))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
