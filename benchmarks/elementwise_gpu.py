"""Settings of the optimizer kernels on one GPU: AdamW and sums by variant (GB/s), Newton-Schulz by bits that are dropped, and what a launch costs the host.

    python benchmarks/elementwise_gpu.py [OUT.json]         under a minute
    python benchmarks/elementwise_gpu.py --only adamw add   some parts of it: adamw, add, host, products, newton

Every figure of a product is that of a chip at its limit of power: a variant runs for a while, and only the second half counts. Variants are compiled by several processes before.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES = (109_051_904, 262_144_000)
"""Elements: a block of Llama-8B's width on two ranks, and about the embedding's half."""

# Elements of a program, warps, neighbours of a thread, what the cache is told.
ADAMW = [
    (2048, 8, 4, ""),
    (1024, 4, 4, ""),
    (1024, 8, 4, ""),
    (2048, 4, 4, ""),
    (4096, 8, 4, ""),
    (512, 4, 4, ""),
    (2048, 8, 4, "evict_first"),
    (1024, 4, 4, "evict_first"),
    (1024, 8, 4, "evict_first"),
    (4096, 8, 4, "evict_first"),
    (2048, 8, 8, ""),
    (512, 4, 4, "evict_first"),
]
ADD = [
    (2048, 4, 4, ""),
    (2048, 8, 4, ""),
    (1024, 4, 4, ""),
    (4096, 8, 4, ""),
    (4096, 4, 4, ""),
    (8192, 8, 4, ""),
    (2048, 4, 8, ""),
    (2048, 8, 8, ""),
    (4096, 8, 8, ""),
    (2048, 4, 4, "evict_first"),
    (4096, 8, 4, "evict_first"),
    (2048, 8, 8, "evict_first"),
]
SHAPES = {"14336 x 4096": (8, 14336, 4096), "4096 x 14336": (4, 4096, 14336), "4096 x 4096": (8, 4096, 4096)}
DROPPED = [(0, 0), (1, 1), (2, 1), (2, 2)]
COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7
TILES = {
    "128, 3 stages": (128, 64, 3, 4),
    "256, 3 stages": (256, 64, 3, 8),
    "128, 4 stages": (128, 64, 4, 4),
    "256, 4 stages": (256, 64, 4, 8),
    "256, depth 128": (256, 128, 2, 8),
}
"""Columns, depth, stages, warps."""


def sustained(calls: dict[str, Callable[[], Any]], seconds: float, rounds: int = 2) -> dict[str, list[float]]:
    """Milliseconds of a call by name, one for each round: `seconds` of calls in a row of which the second half counts."""
    found: dict[str, list[float]] = {name: [] for name in calls}

    def block(call: Callable[[], Any], count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    for _ in range(rounds):
        for name, call in calls.items():
            call()
            count = max(2, int(seconds * 500 / max(block(call, 2), 1e-3)))
            block(call, count)
            found[name].append(block(call, count))
    return found


def show(label: str, times: list[float], rate: str) -> None:
    print(f"    {label:>34} | {statistics.median(times):9.4f} ms | {rate}", flush=True)


# ---------------------------------------------------------------- streams


def adamw_of(size: int, settings: tuple[int, int, int, str], split: bool, state: torch.dtype) -> Callable[[], None]:
    """One AdamW of `size` elements by a variant of the kernel."""
    from intarsia_kernels.optimizer import adamw

    block, warps, contiguous, evict = settings
    value = torch.zeros(size, dtype=torch.bfloat16 if split else torch.float32, device="cuda")
    low = torch.zeros(size, dtype=torch.int16, device="cuda") if split else value
    mean, square = (torch.zeros(size, dtype=state, device="cuda") for _ in range(2))
    gradient, step = torch.full((size,), 0.01, device="cuda"), torch.ones((), device="cuda")
    numbers = adamw.numbers(0.9, 0.95, 1e-8, 0.1)

    def run() -> None:
        adamw._adamw[(-(-size // block),)](
            value, low, mean, square, *[gradient] * 8, step, 1e-3, size, 1.0, *numbers, split, False, 1, block, contiguous, evict, num_warps=warps
        )  # fmt: skip

    return run


def add_of(size: int, settings: tuple[int, int, int, str], parts: int) -> Callable[[], None]:
    """One sum of `parts` bfloat16 contributions by a variant of the kernel."""
    from intarsia_kernels.optimizer import sum as sums

    block, warps, contiguous, evict = settings
    given = [torch.ones(size, dtype=torch.bfloat16, device="cuda") for _ in range(parts)]
    out = torch.empty(size, device="cuda")
    eight = [*given, *[given[0]] * (8 - parts)]

    def run() -> None:
        sums._add[(-(-size // block),)](*eight, out, size, 0.5, parts, block, contiguous, evict, num_warps=warps)

    return run


def streams(kind: str) -> list[dict[str, Any]]:
    """Rates of all variants; a copy of float32 for comparison."""
    found = []
    cases: list[tuple[str, int, Callable[..., Callable[[], None]]]] = [
        ("adamw, float32, 28 bytes", 28, functools.partial(adamw_of, split=False, state=torch.float32)),
        ("adamw, split, bfloat16 state, 20 bytes", 20, functools.partial(adamw_of, split=True, state=torch.bfloat16)),
    ]
    if kind == "add":
        cases = [("two parts, 8 bytes", 8, functools.partial(add_of, parts=2))]
    for label, width, make in cases:
        for size in SIZES if width != 20 else SIZES[:1]:
            print(f"  {label}, {size} elements", flush=True)
            times: dict[str, list[float]] = {}
            for settings in ADAMW if kind == "adamw" else ADD:
                times |= sustained({" ".join(map(str, settings)): make(size, settings)}, 0.03, 3)
            source = torch.zeros(size, device="cuda")
            times |= sustained({"copy (8 bytes)": functools.partial(torch.empty_like(source).copy_, source)}, 0.03, 3)
            for name, each in times.items():
                bytes_moved = size * (8 if "copy" in name else width)
                show(name, each, f"{bytes_moved / statistics.median(each) / 1e6:6.0f} GB/s")
            found.append({"what": label, "size": size, "ms": times})
    return found


def host() -> dict[str, float]:
    """Microseconds of the host for one call of small size."""
    from intarsia_kernels.optimizer.adamw import fused_adamw
    from intarsia_kernels.optimizer.sum import add_parts, prepare_add

    parts = [torch.ones(4096, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    out, step = torch.empty(4096, device="cuda"), torch.ones((), device="cuda")
    four = [torch.zeros(4096, device="cuda") for _ in range(4)]
    ready = prepare_add(parts, 0.5)
    calls: dict[str, Callable[[], Any]] = {
        "add_parts": lambda: add_parts(parts, out, 0.5),
        "prepare_add": lambda: ready(out),
        "fused_adamw": lambda: fused_adamw(four[0], None, *four[1:], step, 1e-3, (0.9, 0.95), 1e-8, 0.1),
    }
    found = {}
    for name, call in calls.items():
        for count in (20, 2000):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for number in range(count):
                call()
                if number % 200 == 199:
                    torch.cuda.synchronize()
            found[name] = (time.perf_counter() - begin) / count * 1e6
        print(f"    {name:>34} | {found[name]:6.1f} us", flush=True)
    assert torch.equal(out, torch.ones_like(out))
    return found


# ---------------------------------------------------------------- Newton-Schulz


def narrowed(x: Tensor, bits: int) -> Tensor:
    """float16 with so many significant bits (of 11), to nearest."""
    from intarsia_kernels.optimizer.reference import rounded

    return rounded(x.float(), 11 - bits).half() if bits < 11 else x


def tiles_of(x: Tensor, out: Tensor, tile: tuple[int, int, int, int], transposed: bool = False) -> Callable[[], None]:
    """The plain symmetric product by tiles."""
    from intarsia_kernels.optimizer import tiles

    columns, depth, stages, warps = tile

    def run() -> None:
        tiles.DEPTH = depth
        tiles.product(x, x, out, transposed, 0.05, [], 0.0, None, columns=columns, stages=stages, warps=warps)
        tiles.DEPTH = 64

    return run


def products() -> list[dict[str, Any]]:
    """A symmetric product and P X by the bits of their operands; tiles by their settings."""
    full = torch.randn(8, 4096, 4096, device="cuda").mul_(0.1).half()
    out = torch.empty_like(full)
    calls: dict[str, Callable[[], Any]] = {}
    for bits in (11, 10, 9, 8):
        calls[f"tiles of 256, {bits} bits"] = tiles_of(narrowed(full, bits), out, TILES["256, 3 stages"])
    calls["tiles of 256, bfloat16"] = tiles_of(full.bfloat16(), torch.empty_like(out, dtype=torch.bfloat16), TILES["256, 3 stages"])
    for name, tile in TILES.items():
        try:
            tiles_of(full, out, tile)()
            calls[name] = tiles_of(full, out, tile)
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    work = dict.fromkeys(calls, 8 * 4096.0**3)
    x, p = torch.randn(4, 14336, 4096, device="cuda").half(), full[:4]
    into = torch.empty_like(x)
    for of_x, of_p in ((11, 11), (8, 11), (8, 10), (8, 9), (8, 8)):
        calls[f"X P, X of {of_x} bits, P of {of_p}"] = functools.partial(torch.bmm, narrowed(x, of_x), narrowed(p, of_p), out=into)
    calls["X P, bfloat16"] = functools.partial(torch.bmm, x.bfloat16(), p.bfloat16(), out=torch.empty_like(x, dtype=torch.bfloat16))
    of_four = torch.empty(4, 4096, 4096, dtype=torch.float16, device="cuda")
    for bits in (11, 8):
        calls[f"gram of 14336 x 4096, {bits} bits"] = tiles_of(narrowed(x, bits), of_four, TILES["256, 3 stages"], True)
    work |= {name: 4 * 4096.0**2 * 14336 * (2 if "P" in name else 1) for name in calls if name not in work}
    times = sustained(calls, 0.16)
    for name, each in times.items():
        show(name, each, f"{work[name] / statistics.median(each) / 1e9:6.0f} TF/s" + ("" if "X P" in name else " half"))
    return [{"ms": times, "work": work}]


def newton_of(shape: tuple[int, int, int], dropped: tuple[int, int], strategy: str = "tiles of 256") -> Callable[[], Tensor]:
    """Newton-Schulz with so many bits dropped."""
    from intarsia_kernels.optimizer.newton_schulz import newton_schulz
    from intarsia_kernels.optimizer.symmetric import symmetric_product

    matrices = torch.randn(shape, device="cuda").mul_(0.02).bfloat16()
    product = functools.partial(symmetric_product, strategy=strategy)
    return lambda: newton_schulz(matrices, 5, COEFFICIENTS, EPS, torch.bfloat16, product=product, dropped=dropped)


def newton() -> list[dict[str, Any]]:
    """Newton-Schulz by shape, tiles and dropped bits (near square, else): at the limit of power, variants in turn, and the first call after a rest."""
    found = []
    for label, shape in SHAPES.items():
        print(f"  {label}, batch {shape[0]}", flush=True)
        calls = {f"256, {dropped}": newton_of(shape, dropped) for dropped in DROPPED}
        calls["128, (0, 0)"] = newton_of(shape, (0, 0), "tiles of 128")
        rested = {}
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            time.sleep(0.2)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            rested[name] = start.elapsed_time(end)
        # One of each again and again, as power follows what ran before: differences of few per cent are seen only so.
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        for turn in range(24):
            for name in list(calls) if turn % 2 else reversed(calls):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                calls[name]()
                end.record()
                marks[name].append((start, end))
        torch.cuda.synchronize()
        times = {name: [start.elapsed_time(end) for start, end in pairs][4:] for name, pairs in marks.items()}
        for name, each in times.items():
            quarter = statistics.quantiles(each, n=4)
            show(name, each, f"quarters {quarter[0]:8.4f} to {quarter[2]:8.4f}, rested {rested[name]:8.4f} ms")
        found.append({"shape": label, "ms": times, "rested": rested})
    call = newton_of(SHAPES["14336 x 4096"], (0, 0))
    for _ in range(40):
        call()
    query = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_event_reasons.active,clocks_event_reasons.sw_power_cap"
    said = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, check=False).stdout
    torch.cuda.synchronize()
    print("  while it computes:", said.replace("\n", "\n    "), flush=True)
    found.append({"nvidia-smi": said})
    return found


# ---------------------------------------------------------------- the command


def compile_part(part: int, of: int, chosen: list[str]) -> None:
    """A child process: compile its share of the variants on small tensors, for the cache on disk."""
    jobs: list[Callable[[], Callable[[], Any]]] = []
    if "adamw" in chosen:
        for settings, (split, state) in itertools.product(ADAMW, ((False, torch.float32), (True, torch.bfloat16))):
            jobs.append(functools.partial(adamw_of, 2**16, settings, split, state))
    if "add" in chosen:
        jobs += [functools.partial(add_of, 2**16, settings, 2) for settings in ADD]
    if "newton" in chosen:
        jobs += [functools.partial(newton_of, (1, *shape[1:]), dropped) for shape in SHAPES.values() for dropped in DROPPED]
    if "products" in chosen:
        x = torch.zeros(2, 4096, 4096, dtype=torch.float16, device="cuda")
        jobs += [functools.partial(tiles_of, x, torch.empty_like(x), tile) for tile in TILES.values()]
    for job in jobs[part::of]:
        try:
            job()()
        except Exception as error:
            print(f"  {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.cuda.synchronize()


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?")
    every = ("newton", "products", "adamw", "add", "host")
    parser.add_argument("--only", nargs="+", choices=every, default=list(every))
    parser.add_argument("--processes", type=int, default=12, help="That compile.")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.", file=sys.stderr)
        return 1
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    count = options.processes
    children = [context.Process(target=compile_part, args=(part, count, options.only)) for part in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(max(0.1, begun + 60 - time.monotonic()))
        if child.is_alive():
            child.kill()
    parts: dict[str, Callable[[], Any]] = {
        "newton": newton,
        "products": products,
        "adamw": functools.partial(streams, "adamw"),
        "add": functools.partial(streams, "add"),
        "host": host,
    }
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in options.only:
        print(f"{name} ({time.monotonic() - begun:.0f} s)", flush=True)
        try:
            results[name] = parts[name]()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"  {results[name]['error'][:600]}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()
    print(f"done ({time.monotonic() - begun:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
