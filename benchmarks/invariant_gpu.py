"""The batch-invariant mode on one GPU, whole: Llama 3 1B, 8 rows of 4096 tokens. Writes one JSON, anew after every measurement, so that a run that is cut off keeps what it has.

    python benchmarks/invariant_gpu.py OUT.json                                # about three minutes
    python benchmarks/invariant_gpu.py OUT.json --debug-sizes --device cpu     # does it run?

Processes of their own train and generate (`invariant_worker.py`), two in the mode, with CUBLAS_WORKSPACE_CONFIG=:0:0, and one as usual, without the variable and compiled as the recipe has it:

* `loops`: push weights, generate, train, ten times, by both processes of the mode: the largest difference between log-probabilities of trainer and generator, over all trained tokens of every step, and whether
  both end with the same weights. Of kernels that may serve the mode the first that hold for a step are taken (`routes`);
* `step`: seconds of whole training steps of the mode and of the usual run in turn, by a policy's loss and by cross-entropy, and of the mode by other kernels;
* `decode`: milliseconds of a step of the generator's at batch 64 and context 4096, of both in turn, launched one by one; then both as CUDA graphs (`decode.graphs`);
* `generate`: tokens per second at batch 1, 8 and 64, launched one by one; then as CUDA graphs (`generate_graphs`).

`bars` says of each whether it was reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
STEP_BAR, DECODE_BAR = 1.15, 1.35

ROUTES: dict[str, dict[str, dict[str, str]]] = {
    "cuda": {
        "flash backward": {"attention": "attention/blocks_flash"},
        "the table's": {"attention": "attention/blocks"},
        "references": {"attention": "attention/blocks", "rms_norm": "reference", "swiglu": "reference", "rope": "reference"},
        "ascending": {"attention": "attention/blocks", "linear": "linear/ascending"},
        "flash": {"attention": "attention/unsplit"},
    },
    "cpu": {"the table's": {}, "references": {"rope": "reference"}},
}
"""Kernels of the mode that are tried in turn, over the table's. Gradients of the last one do not repeat."""
GRAPHS = {"cuda": "on", "cpu": "eager"}
"""How the generator makes its recorded steps: without a GPU they are the same, and launched."""
USUAL_DECODE: dict[str, list[dict[str, str]]] = {"cuda": [{}, {"attention": "sdpa"}], "cpu": [{}]}
"""Kernels of the usual generator: those that are chosen by themselves, and others. The fastest counts."""


class Worker:
    """A process that obeys. What it says beside its answers goes to a log."""

    def __init__(self, name: str, arguments: argparse.Namespace, invariant: bool, settings: Sequence[str]) -> None:
        self.name, self.deadline = name, arguments.deadline
        environment = {**os.environ, **(WORKSPACE if invariant else {})}
        if not invariant:
            environment.pop("CUBLAS_WORKSPACE_CONFIG", None)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        command = [sys.executable, "-u", str(ROOT / "invariant_worker.py"), arguments.recipe, *["--invariant"] * invariant]
        command += [part for setting in settings for part in ("--set", setting)]
        command += ["--pushes", str(arguments.pushes), *(["--threads", str(arguments.threads)] if arguments.threads else [])]
        self._log = arguments.output.with_suffix(f".{name}.log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._answers.put(json.loads(line[1:]))
            else:
                self._log.write(line)
                self._log.flush()
        self._answers.put(None)

    def send(self, do: str, **settings: Any) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **settings}) + "\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float, progress: Callable[[Any], None] | None = None) -> Any:
        """What came of it. RuntimeError where it failed or takes too long."""
        end = min(time.monotonic() + limit_s, self.deadline)
        while True:
            try:
                found = self._answers.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                self.end()
                raise RuntimeError(f"{self.name}: no answer in time") from None
            if found is None:
                raise RuntimeError(f"{self.name} ended; its log says why")
            if found["what"] == "progress":
                if progress is not None:
                    progress(found["value"])
            elif found["what"] == "failed":
                raise RuntimeError(f"{self.name}: {found['value']}")
            else:
                return found["value"]

    def ask(self, do: str, limit_s: float = 60.0, progress: Callable[[Any], None] | None = None, **settings: Any) -> Any:
        """Give an order and wait."""
        self.send(do, **settings)
        return self.answer(limit_s, progress)

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Record:
    """What was found, on disk at any time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._path, self._start = arguments.output, time.monotonic()
        settings = {name: value for name, value in vars(arguments).items() if isinstance(value, (str, int, float, bool, list))}
        settings.pop("deadline")
        self.found: dict[str, Any] = {"benchmark": "invariant_gpu", "commit": arguments.commit, "settings": settings, "bars": {}}

    def put(self, place: str, value: Any) -> None:
        """Set what stands at a place (`a.b`), and say so."""
        *above, last = place.split(".")
        inside = self.found
        for name in above:
            inside = inside.setdefault(name, {})
        inside[last] = value
        self.found["seconds"] = round(time.monotonic() - self._start, 1)
        self._path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        if not isinstance(value, dict) or len(json.dumps(value)) < 700:
            print(f"[{self.found['seconds']:6.1f}] {place}: {json.dumps(value)}", flush=True)

    def part(self, place: str, work: Callable[[], Any]) -> Any:
        """Do it and set it; what fails is set as its failure, and the rest goes on. What it gave, or None."""
        try:
            value = work()
        except Exception as error:
            self.put(place, {"failed": f"{type(error).__name__}: {error}"[:1500]})
            return None
        self.put(place, value)
        return value


# ---------------------------------------------------------------- the loop


def try_route(workers: Sequence[Worker], name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A step by these kernels, on both: whether log-probabilities are equal, and weights."""
    kernels = ROUTES[arguments.kind][name]
    chosen, *_ = [worker.ask("kernels", kernels=kernels) for worker in workers]
    outcomes = run_loops(workers, arguments, 1, [lambda _: None for _ in workers])
    same = len({outcome["weights"] for outcome in outcomes}) == 1
    held = all(outcome["largest_gap"] == 0.0 for outcome in outcomes)
    return {"kernels": chosen, "gap_is_0": held, "same_weights": same, "outcomes": outcomes}


def run_loops(workers: Sequence[Worker], arguments: argparse.Namespace, steps: int, tell: Sequence[Callable[[Any], None]]) -> list[Any]:
    """The loop, by all workers at once, from the first weights on."""
    for worker in workers:
        worker.send("reset")
    begun = {worker.answer(60.0)["weights"] for worker in workers}
    if len(begun) > 1:
        raise RuntimeError("the runs do not begin with the same weights")
    for worker in workers:
        worker.send("loop", steps=steps, rows=arguments.rows, row=arguments.row, decoded=arguments.decoded)
    return [worker.answer(40.0 + 20.0 * steps, each) for worker, each in zip(workers, tell, strict=True)]


def loops(workers: Sequence[Worker], arguments: argparse.Namespace, record: Record) -> str | None:
    """Find kernels that hold, then ten steps. The name of the route that held."""
    held: str | None = None
    for name in ROUTES[arguments.kind]:
        found = record.part(f"routes.{name}", lambda n=name: try_route(workers, n, arguments))  # type: ignore[misc]
        if found is not None and found["gap_is_0"] and found["same_weights"]:
            held = name
            break
    if held is None:
        record.put("bars.gap", {"reached": False, "why": "no kernels held"})
        return None
    told: list[list[Any]] = [[] for _ in workers]

    def note(number: int) -> Callable[[Any], None]:
        def noted(step: Any) -> None:
            told[number].append(step)
            record.put(f"loops.steps_{number}", told[number])

        return noted

    outcomes = record.part("loops.outcomes", lambda: run_loops(workers, arguments, arguments.steps, [note(n) for n in range(len(workers))]))
    if outcomes:
        largest, weights = max(outcome["largest_gap"] for outcome in outcomes), {outcome["weights"] for outcome in outcomes}
        tokens = outcomes[0]["tokens"]
        record.put("bars.gap", {"route": held, "steps": arguments.steps, "tokens": tokens, "largest": largest, "reached": largest == 0.0})
        record.put("bars.same_weights", {"runs": len(workers), "weights": sorted(weights), "reached": len(weights) == 1})
    return held


# ---------------------------------------------------------------- what it costs


def in_turn(calls: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Measurements of each, one after the other, in rounds; the order changes from round to round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
            found[name] += calls[name]()
    return found


def summary(found: Mapping[str, list[float]], usual: str, mode: str) -> dict[str, Any]:
    """Medians, and their ratio."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"median": medians, "ratio": medians[mode] / medians[usual], "all": dict(found)}


def steps(usual: Worker, mode: Worker, arguments: argparse.Namespace, record: Record, held: str) -> None:
    """Whole training steps."""
    shape = {"rows": arguments.rows, "row": arguments.row, "micro_batch": arguments.micro_batch}

    def seconds(worker: Worker, loss: str, repeats: int = 1) -> list[float]:
        return worker.ask("step", loss=loss, repeats=repeats, **shape)["seconds"]  # type: ignore[no-any-return]

    def measured(loss: str, rounds: int) -> dict[str, Any]:
        for worker in (mode, usual):
            seconds(worker, loss, 2)
        calls = {"usual": lambda: seconds(usual, loss), "mode": lambda: seconds(mode, loss)}
        return summary(in_turn(calls, rounds), "usual", "mode")

    mode.ask("kernels", kernels=ROUTES[arguments.kind][held])
    for loss, rounds in (("policy", arguments.rounds), ("cross_entropy", max(2, arguments.rounds // 2))):
        found = record.part(f"step.{loss}", lambda x=loss, r=rounds: measured(x, r))  # type: ignore[misc]
        if found is not None:
            name = "bars.step" if loss == "policy" else "bars.step_by_cross_entropy"
            record.put(name, {"ratio": found["ratio"], "most": STEP_BAR, "reached": found["ratio"] <= STEP_BAR, "route": held})

    def by_others() -> dict[str, Any]:
        times = {}
        for name, kernels in ROUTES[arguments.kind].items():
            mode.ask("kernels", kernels={**{op: mode_kernels[op] for op in every if op in mode_kernels}, **kernels})
            times[name] = seconds(mode, "policy", 3)[1:]
        return times

    every = {op for kernels in ROUTES[arguments.kind].values() for op in kernels}
    mode_kernels = record.found["ready"]["mode"]["kernels"]
    if arguments.deadline - time.monotonic() > arguments.others_s:
        record.part("step.by_route", by_others)
    mode.ask("kernels", kernels={**{op: mode_kernels[op] for op in every if op in mode_kernels}, **ROUTES[arguments.kind][held]})
    for name, worker in (("usual", usual), ("mode", mode)):
        record.part(f"memory.{name}", lambda w=worker: w.ask("memory"))  # type: ignore[misc]


def decode(usual: Worker, mode: Worker, arguments: argparse.Namespace, record: Record, held: str) -> None:
    """The generator's steps at one context, in turn."""
    kernels, others = ROUTES[arguments.kind][held], USUAL_DECODE[arguments.kind]
    need = arguments.decode_rounds * arguments.decode_steps * (len(others) + 1)
    for name, worker, chosen in (("usual", usual, others[-1]), ("mode", mode, kernels)):
        setup = {"batch": arguments.batches[-1], "context": arguments.row, "steps": need, "kernels": chosen}
        if record.part(f"decode.prefill_{name}", lambda w=worker, s=setup: w.ask("decode_setup", 90.0, **s)) is None:  # type: ignore[misc]
            return

    def milliseconds(worker: Worker, chosen: Mapping[str, str] | None) -> list[float]:
        return worker.ask("decode", steps=arguments.decode_steps, kernels=chosen)["ms"][1:]  # type: ignore[no-any-return]

    def measured() -> dict[str, Any]:
        calls = {f"usual, {other or 'as chosen'}": lambda o=other: milliseconds(usual, o) for other in others}  # type: ignore[misc]
        calls["mode"] = lambda: milliseconds(mode, kernels)
        found = in_turn(calls, arguments.decode_rounds)
        fastest = min((name for name in found if name != "mode"), key=lambda name: statistics.median(found[name]))
        return summary(found, fastest, "mode") | {"fastest_usual": fastest}

    found = record.part("decode.step_ms", measured)
    if found is not None:
        record.put("bars.decode", {"ratio": found["ratio"], "most": DECODE_BAR, "reached": found["ratio"] <= DECODE_BAR, "route": held})
    best = others[-1] if found is None else others[list(found["median"]).index(found["fastest_usual"])]
    decode_graphs({"usual": (usual, best), "mode": (mode, kernels)}, milliseconds, arguments, record, held)


def decode_graphs(
    sides: Mapping[str, tuple[Worker, Mapping[str, str]]],
    milliseconds: Callable[[Worker, None], list[float]],
    arguments: argparse.Namespace,
    record: Record,
    held: str,
) -> None:
    """The same steps as CUDA graphs, as the generator takes them by itself on a GPU; the first of each, which records, is not counted."""
    need = (arguments.decode_rounds + 1) * arguments.decode_steps
    for name, (worker, chosen) in sides.items():
        setup = {
            "batch": arguments.batches[-1],
            "context": arguments.row,
            "steps": need,
            "kernels": chosen,
            "graphs": GRAPHS[arguments.kind],
        }
        if record.part(f"decode.prefill_{name}_graphs", lambda w=worker, s=setup: w.ask("decode_setup", 90.0, **s)) is None:  # type: ignore[misc]
            return
        record.part(f"decode.recorded_{name}", lambda w=worker: w.ask("decode", 90.0, steps=arguments.decode_steps))  # type: ignore[misc]
    calls = {name: lambda w=worker: milliseconds(w, None) for name, (worker, _) in sides.items()}  # type: ignore[misc]
    found = record.part("decode.graphs", lambda: summary(in_turn(calls, arguments.decode_rounds), "usual", "mode"))
    if found is not None:
        ratio = found["ratio"]
        record.put("bars.decode_graphs", {"ratio": ratio, "most": DECODE_BAR, "reached": ratio <= DECODE_BAR, "route": held})


def generate(usual: Worker, mode: Worker, arguments: argparse.Namespace, record: Record, held: str) -> None:
    """Tokens per second by batch."""
    best = str(record.found.get("decode", {}).get("step_ms", {}).get("fastest_usual", ""))
    chosen = USUAL_DECODE[arguments.kind][-1 if "sdpa" in best else 0]
    for part, graphs in (("generate_graphs", GRAPHS[arguments.kind]), ("generate", "off")):
        for batch in arguments.batches:
            for name, worker, kernels in (("mode", mode, ROUTES[arguments.kind][held]), ("usual", usual, chosen)):
                sizes = {"batch": batch, "prompt": arguments.prompt, "tokens": arguments.tokens, "rounds": 1}
                order = {**sizes, "kernels": kernels, "graphs": graphs}
                record.part(f"{part}.{name}.{batch}", lambda w=worker, o=order: w.ask("generate", 40.0, **o))  # type: ignore[misc]


# ---------------------------------------------------------------- all of it


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """What both runs have over the recipe."""
    return [
        f"train.device={arguments.device}",
        "precision.compute=bfloat16",
        "loss=policy",
        "loss.algorithm=grpo",
        f"train.sequence_length={arguments.row}",
        f"train.micro_batch={arguments.loop_micro_batch}",
        f"train.global_batch={arguments.rows}",
        "optimizer=adamw",
        "optimizer.lr=1e-4",
        "schedule=constant",
        *arguments.settings,
    ]


def measure(arguments: argparse.Namespace, record: Record) -> None:
    """Everything, the most important first."""
    settings = settings_of(arguments)
    usual_settings = [*settings, *([f"compile.mode={arguments.compile}"] if arguments.compile else [])]
    workers = {
        "mode": Worker("mode", arguments, True, [*settings, "compile.mode=none"]),
        "again": Worker("again", arguments, True, [*settings, "compile.mode=none"]),
        "usual": Worker("usual", arguments, False, usual_settings),
    }
    try:
        ready = {
            name: worker
            for name, worker in workers.items()
            if record.part(f"ready.{name}", lambda w=worker: w.answer(150.0)) is not None  # type: ignore[misc]
        }
        mode, usual = ready.get("mode"), ready.get("usual")
        if usual is not None:  # While the loops run, which are not timed, the usual run compiles.
            usual.send("step", loss="policy", repeats=1, rows=arguments.micro_batch, row=arguments.row, micro_batch=arguments.micro_batch)
        if mode is None:
            return
        record.part("probe", lambda: mode.ask("probe", 60.0, rows=arguments.micro_batch, row=arguments.row))
        held = loops([ready[name] for name in ("mode", "again") if name in ready], arguments, record)
        workers["again"].end()
        if usual is None or record.part("warm", lambda: usual.answer(200.0)) is None:
            return
        costs(usual, mode, arguments, record, held or next(iter(ROUTES[arguments.kind])))
    finally:
        for worker in workers.values():
            worker.end()


def costs(usual: Worker, mode: Worker, arguments: argparse.Namespace, record: Record, route: str) -> None:
    """Steps, then decoding, for which trainers make room."""
    try:
        steps(usual, mode, arguments, record, route)
    except RuntimeError as error:
        record.put("step.ended", str(error))
    for name, worker in (("usual", usual), ("mode", mode)):
        record.part(f"push.{name}", lambda w=worker: w.ask("push"))  # type: ignore[misc]
        record.part(f"memory.{name}_free", lambda w=worker: w.ask("free_trainer"))  # type: ignore[misc]
    decode(usual, mode, arguments, record, route)
    generate(usual, mode, arguments, record, route)


def main() -> int:
    """Measure; 1 where a bar was not reached, or not measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--debug-sizes", action="store_true", help="A model and rows for a CPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--recipe", help="Default: llama3/1b.")
    parser.add_argument("--rows", type=int, default=8, help="Rows of a step.")
    parser.add_argument("--row", type=int, default=4096, help="Tokens of a row, and context that is decoded at.")
    parser.add_argument("--micro-batch", type=int, default=4, help="Rows of a forward pass of steps that are timed.")
    parser.add_argument(
        "--loop-micro-batch", type=int, default=1, help="The same of the loops, which share the device with another process."
    )
    parser.add_argument("--decoded", type=int, default=64, help="Tokens of each row that are chosen one at a time.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8, help="Rounds of steps.")
    parser.add_argument("--decode-rounds", type=int, default=4)
    parser.add_argument("--decode-steps", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--compile", help="Another compile.mode of the usual run than the recipe's.")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--limit-s", type=float, default=600.0, help="All of it.")
    parser.add_argument("--others-s", type=float, default=55.0, help="Steps by other kernels are timed where so much of the limit is left.")
    parser.add_argument(
        "--pushes", type=int, default=4, help="Pushes of a process through shared memory; then weights are copied on the device."
    )
    parser.add_argument("--commit", default="", help="What to write down as the commit.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="PATH=VALUE")
    arguments = parser.parse_args()
    if arguments.debug_sizes:
        small = {"rows": 4, "row": 64, "micro_batch": 2, "decoded": 8, "batches": [1, 2, 4], "prompt": 16, "tokens": 8, "rounds": 2}
        vars(arguments).update(small | {"steps": 3, "decode_rounds": 2, "decode_steps": 3})
    arguments.recipe = arguments.recipe or ("llama3/debug" if arguments.debug_sizes else "llama3/1b")
    arguments.kind, arguments.deadline = arguments.device, time.monotonic() + arguments.limit_s
    record = Record(arguments)
    # Ended from outside it still ends its workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        measure(arguments, record)
    except RuntimeError as error:
        record.put("ended", str(error))
    bars = record.found["bars"]
    wanted = ("gap", "same_weights", "step", "decode")
    return int(not all(bars.get(name, {}).get("reached") for name in wanted))


if __name__ == "__main__":
    sys.exit(main())
