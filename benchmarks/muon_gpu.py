"""Newton-Schulz and Muon on GPUs: accuracy, the rate of symmetric products, and the optimizer's step. Writes one JSON.

    python benchmarks/muon_gpu.py --tune OUT.json       one GPU, about two minutes: accuracy and products only
    python benchmarks/muon_gpu.py OUT.json              two GPUs, about three minutes: the optimizer's step (`muon_step.py`)
    python benchmarks/muon_gpu.py OUT.json --device cpu --debug-sizes       does it run? (gloo)

Needs `intarsia_kernels` and `intarsia_optimizers` on the path. Random data; medians of device times by events, variants interleaved in rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7

PRODUCTS = {
    "gram of 4096 x 14336": (4, 4096, 14336, False, 0, False),
    "the same with what is lost": (4, 4096, 14336, False, 0, True),
    "gram of 14336 x 4096": (8, 4096, 14336, True, 0, False),
    "polynomial, 4096": (8, 4096, 4096, False, 1, False),
    "next gram, 4096, with what is lost": (8, 4096, 4096, False, 2, True),
    "plain, 4096": (8, 4096, 4096, False, 0, False),
    "plain, 4096, two matrices": (2, 4096, 4096, False, 0, False),
    "gram of 1024 x 4096": (8, 1024, 4096, False, 0, False),
    "polynomial, 1024": (24, 1024, 1024, False, 1, False),
    "gram of 2816 x 1024": (24, 1024, 2816, True, 0, False),
}
"""Name: batch, rows, depth, transposed, addends, with what rounding loses."""

EXECUTED = {"vendor": 1.0, "rows, 4 bands": 10 / 16, "rows, 8 bands": 36 / 64}
"""Part of the whole product's operations; the others compute half of it and one block on the diagonal for each row of blocks."""

BATCHES = {
    "14336 x 4096": (8, 14336, 4096),
    "4096 x 14336": (4, 4096, 14336),
    "4096 x 4096": (8, 4096, 4096),
    "1024 x 4096": (8, 1024, 4096),
}
"""What one of two ranks orthogonalises of 8 layers of Llama-8B width."""


# ---------------------------------------------------------------- measuring


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int, each: int) -> dict[str, list[float]]:
    """Milliseconds of every call by name: `rounds` times over all of them, `each` calls in a row of which the first is not counted."""
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            for _ in range(each):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in marks.items()}


def facts() -> dict[str, Any]:
    """Versions, device and commit."""
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "commit": commit,
    }


def row(*cells: Any) -> None:
    """One line of a table on standard output."""
    print("  " + " | ".join(f"{cell:>12.4f}" if isinstance(cell, float) else f"{cell!s:>12}" for cell in cells), flush=True)


# ---------------------------------------------------------------- accuracy


def spectra(rows: int, columns: int) -> dict[str, Tensor]:
    """Random, spiked (16 strong directions in noise), decaying over four decades, and of low rank."""
    generator = torch.Generator("cuda").manual_seed(3)
    draw = functools.partial(torch.randn, generator=generator, device="cuda")
    noise, left, right = draw(rows, columns), draw(rows, 16), draw(16, columns)
    side = min(rows, columns)
    q, _ = torch.linalg.qr(draw(rows, side))
    p, _ = torch.linalg.qr(draw(columns, side))
    return {
        "random": noise,
        "spiked": 0.02 * noise + (left * torch.logspace(1.5, -1, 16, device="cuda")) @ right,
        "decaying": (q * torch.logspace(0, -4, side, device="cuda")) @ p.mT,
        "low rank": left @ right,
    }


def accuracy() -> list[dict[str, Any]]:
    """||X - X64|| / ||X64|| after five steps: torch.optim.Muon's in bfloat16, and ours by strategy."""
    from intarsia_kernels.optimizer import newton_schulz as ours
    from intarsia_kernels.optimizer.symmetric import STRATEGIES, symmetric_product
    from intarsia_optimizers.updates import newton_schulz as plain
    from torch.optim._muon import _zeropower_via_newtonschulz

    found = []
    for rows, columns in ((1024, 3584), (3584, 1024), (2048, 7168), (2048, 2048)):
        for spectrum, matrix in spectra(rows, columns).items():
            exact = plain(matrix[None].double(), 5, COEFFICIENTS, EPS, torch.float64)[0]

            def error(x: Tensor, exact: Tensor = exact) -> float:
                return float((x.double() - exact).norm() / exact.norm())

            errors = {"torch.optim.Muon": error(_zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, EPS))}
            for name, strategy in STRATEGIES.items():
                for compensated in (False, True) if strategy.loses else (False,):
                    with contextlib.suppress(Exception):
                        how = {"product": functools.partial(symmetric_product, strategy=name), "compensated": compensated}
                        found_here = error(ours.newton_schulz(matrix[None], 5, COEFFICIENTS, EPS, torch.float16, **how)[0])
                        errors[name + ", compensated" * compensated] = found_here
            ratio = max(value for name, value in errors.items() if name != "torch.optim.Muon") / errors["torch.optim.Muon"]
            found.append({"rows": rows, "columns": columns, "spectrum": spectrum, "errors": errors, "worst_ratio": ratio})
            row(f"{rows} x {columns}", spectrum, *errors.values())
    return found


# ---------------------------------------------------------------- products


def usable(strategies: dict[str, Any], out: Tensor, arguments: tuple[Any, ...], expected: Tensor) -> dict[str, str]:
    """Why a strategy cannot be timed, by name; missing where it can."""
    reasons = {}
    for name, strategy in strategies.items():
        reason = strategy.refuses(arguments[0], out, arguments[3], arguments[-1] is not None)
        if reason is None:
            try:
                out.fill_(float("nan"))
                strategy.run(*arguments)
                difference = float((out - expected).float().norm() / expected.float().norm())
                reason = None if difference < 4e-3 else f"differs by {difference}"
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error)[:300]}"
        if reason is not None:
            reasons[name] = reason
    return reasons


def products(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds and rates by shape and strategy. `useful`: M M K operations of half the result a second; the whole product by the vendor counts twice that."""
    from intarsia_kernels.optimizer.symmetric import STRATEGIES

    found = []
    for label, (batch, rows, depth, transposed, addends, loses) in PRODUCTS.items():
        shape = (batch, depth, rows) if transposed else (batch, rows, depth)
        x = torch.randn(shape, device="cuda").mul_(0.1).half()
        if addends:
            x = (x + x.mT).contiguous()
        out = torch.empty(batch, rows, rows, dtype=torch.float16, device="cuda")
        added = [(x, 0.3), (x, 0.2)][:addends]
        arguments = (x, x, out, transposed, 0.05, added, 3.0 if addends == 1 else 0.0, torch.empty_like(out) if loses else None)
        STRATEGIES["vendor"].run(*arguments)
        reasons = usable(STRATEGIES, out, arguments, out.clone())
        calls = {name: functools.partial(strategy.run, *arguments) for name, strategy in STRATEGIES.items() if name not in reasons}
        times = interleaved(calls, rounds, 6)
        work = 2.0 * batch * rows * rows * depth
        entry = {
            "product": label,
            "batch": batch,
            "rows": rows,
            "depth": depth,
            "transposed": transposed,
            "addends": addends,
            "loses": loses,
            "refused": reasons,
            "ms": times,
        }
        found.append(entry)
        print(f"  {label}, batch {batch}", flush=True)
        for name, values in times.items():
            took = statistics.median(values)
            executed = work * EXECUTED.get(name, 0.5 * (1 + (128 if "128" in name else 256) / rows))
            row(f"{name:>16}", took, f"{work / 2 / took / 1e9:.0f} TF/s half", f"{executed / took / 1e9:.0f} executed")
        for name, reason in reasons.items():
            print(f"    {name}: {reason}", flush=True)
    return found


def whole(rounds: int) -> list[dict[str, Any]]:
    """Newton-Schulz of each batch of the large model by strategy for all its products, and by the measured choice; also P X alone."""
    from intarsia_kernels.optimizer import newton_schulz as ours
    from intarsia_kernels.optimizer.symmetric import STRATEGIES, choices, symmetric_product

    found = []
    for label, shape in BATCHES.items():
        matrices = torch.randn(shape, device="cuda").bfloat16()
        names = [name for name in ("tiles of 128", "tiles of 256") if name in STRATEGIES]
        by = {name: {"product": functools.partial(symmetric_product, strategy=name)} for name in names}
        by |= {"chosen": {}, "chosen, restarted": {"compensated": False}}
        calls = {}
        for name, how in by.items():
            call = functools.partial(ours.newton_schulz, matrices, 5, COEFFICIENTS, EPS, torch.float16, **how)
            with contextlib.suppress(Exception):
                call()
                calls[name] = call
        side = min(shape[1:])
        p = torch.randn(shape[0], side, side, device="cuda").half()
        x = matrices.half()
        calls["P X"] = functools.partial(torch.bmm, x, p) if shape[1] > shape[2] else functools.partial(torch.bmm, p, x)
        calls["norm and scale"] = functools.partial(ours._scaled, matrices, EPS)
        times = interleaved(calls, rounds, 3)
        short, long = sorted(shape[1:])
        nominal = shape[0] * 5 * (4.0 * short * short * long + 2.0 * short**3)
        found.append({"matrices": label, "batch": shape[0], "nominal_flops": nominal, "ms": times})
        print(f"  {label}, batch {shape[0]}", flush=True)
        for name, values in times.items():
            took = statistics.median(values)
            work = 2.0 * shape[0] * short * short * long if name == "P X" else nominal
            row(f"{name:>16}", took, "" if name == "norm and scale" else f"{work / took / 1e9:.0f} TF/s")
    for key, choice in choices().items():
        print(f"  {key}: {choice.strategy}", flush=True)
    found.append({"choices": [{"key": [str(part) for part in key], **vars(choice)} for key, choice in choices().items()]})
    return found


# ---------------------------------------------------------------- the command


def trial(name: str) -> None:
    """A child process: whether a strategy runs at all, so that one that hangs or breaks the device is found where it does no harm."""
    from intarsia_kernels.optimizer.symmetric import STRATEGIES

    for transposed in (False, True):
        x = torch.randn((48, 320, 512) if transposed else (48, 512, 320), device="cuda").half()
        s = torch.randn(48, 512, 512, device="cuda").half()
        s = (s + s.mT).contiguous()
        out = torch.full_like(s, float("nan"))
        expected = torch.empty_like(s)
        for addends, gamma in ([], 0.0), ([(s, 0.25), (s, 0.125)], 3.0):
            for strategy, into in (("vendor", expected), (name, out)):
                STRATEGIES[strategy].run(x, x, into, transposed, 0.5, addends, gamma, None)
            error = float((out.double() - expected.double()).norm() / expected.double().norm())
            symmetric = torch.equal(out, out.mT)
            print(
                f"  trial of {name}: transposed {transposed}, {len(addends)} addends: error {error:.1e}, symmetric {symmetric}",
                flush=True,
            )
            assert error < 2e-3


def drop_broken(limit: float) -> dict[str, str]:
    """Strategies that their trial did not survive, taken out of this process."""
    from intarsia_kernels.optimizer.symmetric import STRATEGIES

    broken = {}
    context = multiprocessing.get_context("spawn")
    children = {
        name: context.Process(target=trial, args=(name,)) for name in STRATEGIES if STRATEGIES[name].needs_triton and "bands" not in name
    }
    for child in children.values():
        child.start()
    end = time.monotonic() + limit
    for name, child in children.items():
        child.join(max(0.1, end - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
            broken[name] = "hangs"
        elif child.exitcode:
            broken[name] = f"exit status {child.exitcode}"
    for name in broken:
        del STRATEGIES[name]
    return broken


def tune(out: Path) -> None:
    """Accuracy and products on one GPU."""
    begun = time.monotonic()
    results: dict[str, Any] = {"facts": facts()}
    steps: dict[str, Callable[[], Any]] = {
        "broken": functools.partial(drop_broken, 45.0),
        "products": functools.partial(products, 4),
        "whole": functools.partial(whole, 3),
        "accuracy": accuracy,
    }
    for name, step in steps.items():
        print(f"{name} ({time.monotonic() - begun:.0f} s)", flush=True)
        results[name] = step()
        out.write_text(json.dumps(results, indent=1))
    print(f"done ({time.monotonic() - begun:.0f} s)", flush=True)


def spawn(processes: int, limit: float) -> int:
    """The step's benchmark in fresh processes; the highest exit status. Those that outlast the limit are ended."""
    with tempfile.TemporaryDirectory(prefix="muon-") as folder:
        running = []
        for rank in range(processes):
            environment = {
                "NCCL_NVLS_ENABLE": "0",
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "INTARSIA_RENDEZVOUS": f"file://{folder}/store",
            }
            running.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--worker"], env=environment))
        end = time.monotonic() + limit
        codes = []
        for process in running:
            try:
                codes.append(abs(process.wait(max(0.1, end - time.monotonic()))))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(124)
            if codes[-1]:
                # The others would wait for it.
                end = min(end, time.monotonic() + 20)
    return max(codes)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tune", action="store_true", help="Accuracy and products only.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--debug-sizes", action="store_true", help="Tiny matrices: the figures mean nothing.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--each", type=int, default=5, help="Steps of each variant in a round; the first does not count.")
    parser.add_argument("--limit-s", type=float, default=235.0, help="How long it may take.")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from muon_step import worker

        worker(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("This benchmark needs a CUDA device. To see whether it runs: --device cpu --debug-sizes", file=sys.stderr)
        return 1
    if options.tune:
        tune(options.out)
        return 0
    options.out.write_text(json.dumps({"facts": facts() if options.device == "cuda" else {}}))
    return spawn(torch.cuda.device_count() if options.device == "cuda" else 2, options.limit_s)


if __name__ == "__main__":
    sys.exit(main())
