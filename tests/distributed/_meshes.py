"""Eight processes that stay and run the real trainer on meshes of 1, 2, 4 or 8 of them, several meshes at a time: torch is imported once for all.

    with Meshes(folder) as meshes:
        answers = meshes.run([{"name": ..., "ranks": 2, "recipe": "deepseek", "overrides": ["mesh.tp=2"], "compare": "deepseek"}, ...])

A job is a run of `parallel_recipes.py:RECIPE`. Its keys: `ranks`; `overrides`; `run` (name of its directory, else its own name); `resume`; `stop_at` (the step
after which it is asked to stop); `keep` (keep the first step's gradients under this name: one process only); `compare` (compare the first step's gradients with those
kept under this name); `call` (a function of this module, or "module:function" of one beside it, that gets the job and the folder instead of the trainer). Every job has a
process group of its own.
The answer is rank 0's with `by_rank`, or {"error": text, "kinds": names of the errors' classes}.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PROCESSES = 8
# Seconds that a rank waits for another one, and the test for a job.
TIMEOUT_S, PATIENCE_S = "300", 900.0
RECIPES = Path(__file__).parent / "parallel_recipes.py"


class Worker:
    """A process that takes jobs, one a line; started when it gets its first."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def give(self, job: Mapping[str, Any]) -> None:
        """Let it begin."""
        if self._process is None:
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "INTARSIA_TEST_DOCUMENTS": str(self._folder), "INTARSIA_TIMEOUT_S": TIMEOUT_S}
            with Path(self._folder, f"worker-{self._number}.log").open("ab") as log:
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                self._process = subprocess.Popen([sys.executable, __file__], env=environ, text=True, **pipes)
            threading.Thread(target=self._read, args=(self._process, self._answers), daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def take(self) -> dict[str, Any]:
        """Its answer."""
        try:
            answer: dict[str, Any] = json.loads(self._answers.get(timeout=PATIENCE_S))
        except queue.Empty:
            answer = {"error": "no answer in time", "kind": "late"}
        return answer

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self._answers = None, queue.Queue()

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answers.put(line)
        answers.put(json.dumps({"error": f"the process has ended with {process.wait()}", "kind": "exit"}))


class Meshes:
    """See the module's text."""

    def __init__(self, folder: Path, processes: int = PROCESSES) -> None:
        self.folder = folder
        self._workers = [Worker(folder, number) for number in range(processes)]

    def __enter__(self) -> Meshes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.end()

    def run(self, jobs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Answers by the jobs' names. Smaller meshes run first, several at a time."""
        answers: dict[str, dict[str, Any]] = {}
        for ranks in sorted({job["ranks"] for job in jobs}):
            waiting = [job for job in jobs if job["ranks"] == ranks]
            groups = [self._workers[first : first + ranks] for first in range(0, len(self._workers) - ranks + 1, ranks)]
            threads = [threading.Thread(target=self._work, args=(group, waiting, answers)) for group in groups]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return answers

    def _work(self, group: Sequence[Worker], waiting: list[Mapping[str, Any]], answers: dict[str, dict[str, Any]]) -> None:
        """Give jobs to a group of processes until there are none."""
        while True:
            try:
                job = waiting.pop(0)
            except IndexError:
                return
            start = time.monotonic()
            store = str(Path(self.folder, f"store-{uuid.uuid4().hex}"))
            for rank, worker in enumerate(group):
                worker.give({**job, "rank": rank, "store": store})
            found = [worker.take() for worker in group]
            errors = [f"rank {number}: {each['error']}\n{each.get('trace', '')}" for number, each in enumerate(found) if "error" in each]
            answer = {"error": "\n".join(errors)} if errors else {**found[0], "by_rank": [each["rank"] for each in found]}
            answers[job["name"]] = answer | {"seconds": time.monotonic() - start, "kinds": sorted({each.get("kind", "") for each in found})}
            # Where all refused alike, nothing is under way that they would wait for.
            if errors and not all(each.get("kind") == "UsageError" for each in found):
                for worker in group:
                    worker.end()


def check_gradients(ranks: Sequence[Mapping[str, Any]], tolerance: float) -> None:
    """No part of any gradient differs by more than the tolerance of the gradient's largest element, and the parts make up all of every gradient."""
    worst = sorted((error, name, rank) for rank, each in enumerate(ranks) for name, error in each["worst"])
    assert worst[-1][0] < tolerance, worst[-5:]
    for name, numel in ranks[0]["expected"].items():
        assert sum(each["numel"].get(name, 0) for each in ranks) >= numel, name


# ---------------------------------------------------------------- on a rank


def run_job(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train; see the module's text. Rank 0 tells what its events say."""
    from intarsia import logical, plugins
    from intarsia.config import resolve
    from intarsia.errors import StoppedWithCheckpoint
    from intarsia.train import trainer

    logical.reset()
    resolved = resolve(f"{RECIPES}:{job['recipe']}", list(job.get("overrides", ())))
    directory = folder / "runs" / job.get("run", job["name"])
    request = trainer.Request(resolved, plugins.current(), directory, bool(job.get("resume")), False, False)
    found: dict[str, Any] = {}
    real_build = trainer.build

    def build(built: Any, *arguments: Any) -> None:
        real_build(built, *arguments)
        finish = built.sharded.finish_gradients

        def recorded() -> None:
            finish()
            if built.run.step == 0:
                found.update(gradients(built, job, folder))
            if built.run.step + 1 == job.get("stop_at"):
                built.run.stop_reason = "the test asks for it"

        built.sharded.finish_gradients = recorded

    trainer.build = build  # type: ignore[assignment]
    try:
        with contextlib.suppress(StoppedWithCheckpoint):
            trainer.train(request)
    finally:
        trainer.build = real_build
        logical.reset()
    answer: dict[str, Any] = {"rank": found}
    if job["rank"] == 0:
        events = [json.loads(line) for line in Path(directory, "events.jsonl").read_text().splitlines()]
        answer["steps"] = {str(each["step"]): told(each) for each in events if each["event"] == "step"}
        answer["evaluation"] = next((each["loss"] for each in reversed(events) if each["event"] == "evaluation"), None)
        answer["warnings"] = [each["message"] for each in events if each["event"] == "warning"]
    return answer


def run_command(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The command line with the job's `words`: the exit code and what was printed, in `rank`."""
    from intarsia import logical
    from intarsia.cli import main

    logical.reset()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(job["words"])
    logical.reset()
    return {"rank": [code, printed.getvalue()]}


def told(event: Mapping[str, Any]) -> dict[str, float]:
    """What a step's event says of numbers."""
    return {"loss": event["loss"], "gradient_norm": event["gradient_norm"], **event["metrics"]}


def gradients(built: Any, job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Keep this process's gradients, or compare its parts with those that are kept: the worst relative to the largest element, and what was compared."""
    from intarsia.layout import slices
    from safetensors.torch import load_file, save_file

    mine = {name: parameter.grad for name, parameter in built.sharded.parameters().items() if parameter.grad is not None}
    if "keep" in job:
        save_file({name: gradient.contiguous().clone() for name, gradient in mine.items()}, folder / f"{job['keep']}.safetensors")
    if "compare" not in job:
        return {}
    import torch

    expected = load_file(folder / f"{job['compare']}.safetensors")
    worst, numel = {}, {}
    for name, gradient in mine.items():
        layout = built.table[name].layout
        whole = expected[name]
        local = whole.flatten() if layout is None else None
        if layout is not None:
            parts = [whole[slices(box)].reshape(-1) for box in layout.local(built.table.rank_in(layout))]
            local = torch.cat(parts) if parts else whole.new_empty(0)
        assert local is not None
        numel[name] = local.numel()
        if local.numel():
            error = float(
                (gradient.detach().reshape(-1).double() - local.double()).abs().max() / whole.double().abs().max().clamp(min=1e-12)
            )
            worst[name] = error
    bad = sorted(worst, key=lambda name: -worst[name])[:6]
    return {
        "worst": [[name, worst[name]] for name in bad],
        "numel": numel,
        "expected": {name: each.numel() for name, each in expected.items()},
    }


def main() -> None:
    """A rank: jobs from stdin, answers to stdout, one a line."""
    sys.path.insert(0, str(Path(__file__).parent))
    folder, stdout = Path(os.environ["INTARSIA_TEST_DOCUMENTS"]), sys.stdout
    for line in sys.stdin:
        job = json.loads(line)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = str(job["rank"] if "RANK" in name else job["ranks"])
        os.environ["INTARSIA_RENDEZVOUS"] = f"file://{job['store']}"
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                module, _, name = job.get("call", "run_job").rpartition(":")
                answer = getattr(importlib.import_module(module or "__main__"), name)(job, folder)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__, "trace": traceback.format_exc()[-2500:]}
        print(json.dumps(answer), file=stdout, flush=True)
    # Skips destructors of process groups whose peers may be gone already.
    os._exit(0)


if __name__ == "__main__":
    main()
