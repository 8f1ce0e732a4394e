"""Benchmarks on the CPU, as ratios against an opponent in the same run. `nox -s bench`, or: python benchmarks/run.py [--pairs 5] [--only trainer commands]

* trainer: `intarsia train` on `recipe.py:paired` against `bare_loop.py`, the same model, loss chunking, optimizer and thread count, in turn:
  tokens per second (median step after warm-up), tokens per CPU-second of the whole training, peak memory;
* commands: wall time of `intarsia --help`, `plugins list`, `config llama3/8b`, and from `intarsia train` to the first step.

Prints one JSON object and writes it to benchmarks/results/. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENS = 4 * 512
TORCHTITAN_TOKENS_PER_CPU_S = 1586.0
"""torchtitan 0.3.0, patched to run on a CPU at all, with torch 2.13 on a two-core machine: the figure to compare tokens per CPU-second with."""


def cpu_seconds(command: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """(user + system seconds, wall seconds, output) of a finished command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - start, done.stdout


def ours(folder: Path, steps: int, warmup: int) -> dict[str, float]:
    """One training by the trainer: figures from its event log."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    environment = {**os.environ, "INTARSIA_BENCH_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "intarsia", "train", f"{HERE / 'recipe.py'}:paired", "--dir", str(run), "--quiet"]
    cpu_seconds([*command, f"train.steps={steps}", f"data.cache={folder / 'cache'}"], environment)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [event["seconds_s"] for event in events if event["event"] == "step"][warmup:]
    last = [event for event in events if event["event"] == "step"][-1]
    return {"tokens_per_s": TOKENS / statistics.median(seconds), "peak_bytes": last["memory_bytes"]}


def bare(steps: int, warmup: int) -> dict[str, float]:
    """One training by the bare loop."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    _, _, output = cpu_seconds([sys.executable, str(HERE / "bare_loop.py"), "--steps", str(steps), "--warmup", str(warmup)], environment)
    return json.loads(output.splitlines()[-1])


def marginal_cpu(folder: Path, short: int, long: int) -> tuple[float, float]:
    """Tokens per CPU-second of both: everything that the longer of two trainings costs more, start-up cancelled."""
    environment = {**os.environ, "INTARSIA_BENCH_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    figures = []
    for command, steps in (
        (
            [sys.executable, "-m", "intarsia", "train", f"{HERE / 'recipe.py'}:paired", "--quiet", f"data.cache={folder / 'cache'}"],
            "train.steps={}",
        ),
        ([sys.executable, str(HERE / "bare_loop.py"), "--warmup", "1"], "--steps={}"),
    ):
        spent = []
        for count in (short, long):
            where = ["--dir", str(folder / f"cpu-{count}")] if "train" in command else []
            shutil.rmtree(folder / f"cpu-{count}", ignore_errors=True)
            spent.append(cpu_seconds([*command, *where, steps.format(count)], environment)[0])
        figures.append((long - short) * TOKENS / (spent[1] - spent[0]))
    return figures[0], figures[1]


def trainer(pairs: int, steps: int = 20, warmup: int = 5) -> dict[str, Any]:
    """The paired runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours(folder, 3, 1)  # tokenise, and warm the file system
        runs = [(ours(folder, steps, warmup), bare(steps, warmup)) for _ in range(pairs)]
        cpu = [marginal_cpu(folder, 5, 25) for _ in range(max(1, pairs // 2))]
    speed = [mine["tokens_per_s"] / theirs["tokens_per_s"] for mine, theirs in runs]
    memory = [mine["peak_bytes"] / theirs["peak_bytes"] for mine, theirs in runs]
    mine_cpu = statistics.median(mine for mine, _ in cpu)
    return {
        "tokens_per_s_over_bare": statistics.median(speed),
        "peak_memory_over_bare": statistics.median(memory),
        "tokens_per_cpu_s": mine_cpu,
        "tokens_per_cpu_s_over_bare": statistics.median(mine / theirs for mine, theirs in cpu),
        "tokens_per_cpu_s_over_torchtitan_0.3.0": mine_cpu / TORCHTITAN_TOKENS_PER_CPU_S,
        "raw": {"pairs": runs, "cpu": cpu},
    }


def commands(runs: int) -> dict[str, Any]:
    """Wall seconds of the commands, median; and from `intarsia train` to the first step's event."""
    program = shutil.which("intarsia", path=str(Path(sys.executable).parent)) or "intarsia"
    figures: dict[str, Any] = {}
    for name, arguments in (("help", ["--help"]), ("plugins list", ["plugins", "list"]), ("config llama3/8b", ["config", "llama3/8b"])):
        figures[name] = statistics.median(cpu_seconds([program, *arguments], dict(os.environ))[1] for _ in range(runs + 1))
    with tempfile.TemporaryDirectory() as folder:
        waits = []
        for number in range(runs + 1):
            run, start = Path(folder) / str(number), time.time()
            cpu_seconds(
                [
                    program,
                    "train",
                    "llama3/debug",
                    "--dir",
                    str(run),
                    "--quiet",
                    "train.steps=1",
                    "evaluation.every=0",
                    f"data.cache={folder}/cache",
                ],
                dict(os.environ),
            )
            events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
            waits.append(next(event["time_s"] for event in events if event["event"] == "step") - start)
        figures["to the first step"] = statistics.median(waits[1:])
    return figures


def main() -> None:
    """Run, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=("trainer", "commands"), default=("trainer", "commands"))
    options = parser.parse_args()
    import torch

    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "cpu_capability": torch.backends.cpu.get_cpu_capability()},
    }
    if "trainer" in options.only:
        result["trainer"] = trainer(options.pairs)
    if "commands" in options.only:
        result["commands_s"] = commands(options.pairs)
    path = HERE / "results" / f"cpu-{'-'.join(options.only)}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
