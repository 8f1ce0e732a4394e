"""Muon's step on several processes: as FSDP alone makes one do it, and on owned matrices. `muon_gpu.py` starts the processes.

* `fsdp, ...`: every rank holds a band of rows of each matrix. For each matrix: momentum on the band, an all-gather of the direction (float32 through a DTensor, or cast to
  bfloat16 first), torch.optim.Muon's Newton-Schulz of the whole matrix on every rank, an update of the band.
* `owned, ...`: Intarsia's optimizer `muon` on whole matrices that the placement `owned` gave to ranks by the cost of Newton-Schulz; as installed (`owned`), as a CUDA
  graph (`owned, graph`), and without kernels (`owned, no kernels`).

Only matrices; the rest is AdamW's in either case. Values, gradients, learning rate and decay are equal, so that the results can be compared.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS, STEPS = 1e-7, 5
LR, DECAY, MOMENTUM = 2e-3, 0.1, 0.95
CHECKED = 3
"""Steps after which results are compared."""

BATCH_ELEMENTS = 2**29
"""Of the optimizer's setting of that name: eight of the largest matrices at a time."""

# Newer torch renames it and warns of the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder's matrices: those of `layers` blocks."""

    layers: int
    dim: int
    kv_dim: int
    hidden: int

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns by name."""
        one = {
            "wq": (self.dim, self.dim),
            "wk": (self.kv_dim, self.dim),
            "wv": (self.kv_dim, self.dim),
            "wo": (self.dim, self.dim),
            "w1": (self.hidden, self.dim),
            "w3": (self.hidden, self.dim),
            "w2": (self.dim, self.hidden),
        }
        return {f"layers.{layer}.{name}": shape for layer in range(self.layers) for name, shape in one.items()}


SIZES = {"large": Size(8, 4096, 1024, 14336), "small": Size(24, 1024, 512, 2816)}
DEBUG_SIZES = {"large": Size(2, 64, 32, 128), "small": Size(3, 32, 16, 64)}


def flops(shape: tuple[int, ...]) -> float:
    """Of Newton-Schulz as it is usually written."""
    short, long = sorted(shape)
    return STEPS * (4.0 * short * short * long + 2.0 * short**3)


def drawn(number: int, shape: tuple[int, ...], kind: int, device: torch.device) -> Tensor:
    """Matrix `number`'s values (kind 0) or gradient (kind 1), the same on every rank. Gradients have some strong directions, as real ones do."""
    generator = torch.Generator(device).manual_seed(1000 * kind + number)
    matrix = torch.randn(shape, generator=generator, device=device).mul_(0.02)
    if kind:
        left = torch.randn(shape[0], 8, generator=generator, device=device)
        matrix.addmm_(left, torch.randn(8, shape[1], generator=generator, device=device), alpha=0.01)
    return matrix


# ---------------------------------------------------------------- the opponent


class Bands:
    """FSDP-only Muon: bands of rows, whole directions by all-gather, everything computed on every rank."""

    def __init__(self, shapes: dict[str, tuple[int, int]], world: Any, gather: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.optim._muon import _zeropower_via_newtonschulz

        self.orthogonal = _zeropower_via_newtonschulz
        self.gather, self.world = gather, world
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        self.names = list(shapes)
        self.values, self.gradients, self.momenta = [], [], []
        for number, shape in enumerate(shapes.values()):
            band = slice(world.rank * (shape[0] // world.size), (world.rank + 1) * (shape[0] // world.size))
            self.values.append(drawn(number, shape, 0, world.device)[band].clone())
            self.gradients.append(drawn(number, shape, 1, world.device)[band].clone())
            self.momenta.append(torch.zeros_like(self.values[-1]))

    def whole(self, band: Tensor) -> Tensor:
        """The direction's matrix."""
        if self.gather == "float32":
            from torch.distributed.tensor import DTensor, Shard

            return DTensor.from_local(band, self.mesh, [Shard(0)], run_check=False).full_tensor()
        out = torch.empty(band.shape[0] * self.world.size, band.shape[1], dtype=torch.bfloat16, device=band.device)
        all_gather(out, band.bfloat16())
        return out

    @torch.no_grad()
    def step(self) -> None:
        """One update of all matrices."""
        for value, momentum, gradient in zip(self.values, self.momenta, self.gradients, strict=True):
            momentum.lerp_(gradient, 1 - MOMENTUM)
            full = self.whole(gradient.lerp(momentum, MOMENTUM))
            update = self.orthogonal(full, COEFFICIENTS, STEPS, EPS)
            rows = value.shape[0]
            scale = max(1.0, full.shape[0] / full.shape[1]) ** 0.5
            value.mul_(1 - LR * DECAY)
            value.add_(update[self.world.rank * rows : (self.world.rank + 1) * rows], alpha=-LR * scale)


# ---------------------------------------------------------------- ours


class Owned:
    """Intarsia's Muon: each rank has some matrices whole, one buffer for each layer."""

    def __init__(self, shapes: dict[str, tuple[int, int]], world: Any, **settings: Any) -> None:
        from intarsia.contracts import Init, OptimizerGroup
        from intarsia.layout import Layout, Member
        from intarsia.mesh import Mesh
        from intarsia.parameters import ParameterInfo, ParameterTable
        from intarsia_flexshard.assign import newton_schulz_cost
        from intarsia_optimizers.config import MuonConfig
        from intarsia_optimizers.muon import build
        from intarsia_placements.owned import OwnedPlacement

        table = ParameterTable()
        table.mesh = Mesh({"dp_shard": world.size}, world)
        numbers = {name: number for number, name in enumerate(shapes)}
        loads = [0.0] * world.size
        self.parameters: dict[str, nn.Parameter] = {}
        layers: dict[str, list[str]] = {}
        for name in shapes:
            layers.setdefault(name.rsplit(".", 1)[0], []).append(name)
        for names in layers.values():
            members = [Member(name, shapes[name], cost=newton_schulz_cost(shapes[name])) for name in names]
            partition = OwnedPlacement().partition_balanced(members, world.size, loads)
            mine = []
            for member, regions in zip(members, partition.regions, strict=True):
                info = ParameterInfo(member.name, member.shape, "float32", Init("zeros"))
                info.layout = Layout.whole(member.shape).cut("dp_shard", regions)
                table.add(info)
                loads = [load + member.cost * bool(region) for load, region in zip(loads, regions, strict=True)]
                mine.append(bool(regions[world.rank]))
            sizes = [member.numel * here for member, here in zip(members, mine, strict=True)]
            values, gradients = (torch.empty(sum(sizes), device=world.device) for _ in range(2))
            for member, here, value, gradient in zip(members, mine, values.split(sizes), gradients.split(sizes), strict=True):
                shape = member.shape if here else (0,)
                parameter = self.parameters[member.name] = nn.Parameter(value.view(shape))
                parameter.grad = gradient.view(shape)
                if here:
                    parameter.data.copy_(drawn(numbers[member.name], member.shape, 0, world.device))
                    parameter.grad.copy_(drawn(numbers[member.name], member.shape, 1, world.device))
        config = MuonConfig(lr=LR, weight_decay=DECAY, momentum=MOMENTUM, batch_elements=BATCH_ELEMENTS, **settings)
        self.optimizer = build(config, [OptimizerGroup("all", self.parameters)], table, world)
        self.facts = self.optimizer.facts() | {"loads": loads}

    def step(self) -> None:
        """One update of this rank's matrices."""
        self.optimizer.step(1.0)


class Graph:
    """Another variant's step as a CUDA graph."""

    def __init__(self, variant: Owned) -> None:
        self.variant = variant
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            variant.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            variant.step()

    def step(self) -> None:
        """Replay it."""
        self.graph.replay()


# ---------------------------------------------------------------- measuring


def timed(step: Callable[[], None], world: Any) -> Callable[[], float]:
    """Begin `step` on all ranks at once; what is returned waits for it and gives its milliseconds here."""
    aligned = torch.zeros(1, device=world.device)
    dist.all_reduce(aligned)
    if world.device.type != "cuda":
        begin = time.perf_counter()
        step()
        took = (time.perf_counter() - begin) * 1e3
        return lambda: took
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()

    def wait() -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return wait


def rounds_of(variants: dict[str, Any], world: Any, rounds: int, each: int) -> dict[str, list[float]]:
    """Milliseconds of each step by variant, the slower rank's: `rounds` times over all of them, `each` steps in a row of which the first is not counted."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            waits = [timed(variant.step, world) for _ in range(each)]
            found[name] += [wait() for wait in waits][1:]
    slowest = {}
    for name, times in found.items():
        of_all = torch.tensor(times, dtype=torch.float64, device=world.device)
        dist.all_reduce(of_all, dist.ReduceOp.MAX)
        slowest[name] = of_all.tolist()
    return slowest


def trace(variant: Any, world: Any) -> dict[str, Any]:
    """One step under the profiler: collectives that were called and that ran, and the kernels that took longest."""
    from torch.profiler import ProfilerActivity, profile

    cuda = world.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    dist.barrier()
    with profile(activities=activities) as profiler:
        variant.step()
        if cuda:
            torch.cuda.synchronize()
    from torch.autograd import DeviceType

    calls = kernels = 0
    took: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for event in profiler.events():
        on_device = event.device_type != DeviceType.CPU
        calls += not on_device and event.name.startswith(("c10d::", "_c10d_functional::")) and "wait_tensor" not in event.name
        kernels += on_device and "nccl" in event.name.lower()
        if on_device and not event.name.startswith(("nccl:", "ProfilerStep")):
            took[event.name] += event.time_range.elapsed_us()
            count[event.name] += 1
    longest = [{"kernel": name[:120], "calls": count[name], "ms": us / 1e3} for name, us in took.most_common(14)]
    return {"collective_calls": calls, "collective_kernels": kernels, "kernels": sum(count.values()), "longest": longest}


# ---------------------------------------------------------------- comparing results


def compared(ours: Owned, bands: Bands, shapes: dict[str, tuple[int, int]], world: Any) -> dict[str, Any]:
    """After equally many steps of each: against torch.optim.Muon in one process, one matrix of each shape; and against the opponent's bands, all of them."""
    report: dict[str, Any] = {"steps": CHECKED, "torch.optim.Muon": {}}
    seen: set[tuple[int, int]] = set()
    difference, moved = 0.0, 0.0
    for number, (name, shape) in enumerate(shapes.items()):
        full = torch.empty(shape, device=world.device)
        all_gather(full, bands.values[number])
        parameter = ours.parameters[name]
        if not parameter.numel():
            continue
        difference = max(difference, float((parameter.detach() - full).abs().max()))
        start = drawn(number, shape, 0, world.device)
        moved = max(moved, float((parameter.detach() - start).abs().max()))
        if shape not in seen:
            seen.add(shape)
            report["torch.optim.Muon"][f"{shape[0]} x {shape[1]}"] = _against_torch(parameter.detach(), number, shape, start, world.device)
    report["largest_difference_from_fsdp"], report["largest_change"] = difference, moved
    every = [None] * world.size
    dist.all_gather_object(every, report)
    return {f"rank {rank}": of_rank for rank, of_rank in enumerate(every)}


def _against_torch(value: Tensor, number: int, shape: tuple[int, int], start: Tensor, device: torch.device) -> dict[str, float]:
    """Largest difference between our parameter and torch.optim.Muon's, and both errors of the first update against float64."""
    from intarsia_optimizers.kernels import choose_kernel
    from intarsia_optimizers.updates import newton_schulz
    from torch.optim._muon import _zeropower_via_newtonschulz

    parameter = nn.Parameter(start.clone())
    parameter.grad = drawn(number, shape, 1, device)
    single = torch.optim.Muon(
        [parameter], lr=LR, weight_decay=DECAY, momentum=MOMENTUM, ns_coefficients=COEFFICIENTS, eps=EPS, ns_steps=STEPS
    )
    for _ in range(CHECKED):
        single.step()
    direction = parameter.grad
    exact = newton_schulz(direction[None].double(), STEPS, COEFFICIENTS, EPS, torch.float64)[0]
    kernel = choose_kernel("newton_schulz", "newton_schulz_kernel", "auto", newton_schulz, device, torch.bfloat16)
    mine = kernel(direction[None].bfloat16(), STEPS, COEFFICIENTS, EPS, torch.bfloat16)[0]
    theirs = _zeropower_via_newtonschulz(direction, COEFFICIENTS, STEPS, EPS)
    return {
        "largest_difference": float((value - parameter.detach()).abs().max()),
        "error": float((mine.double() - exact).norm() / exact.norm()),
        "error_of_torch": float((theirs.double() - exact).norm() / exact.norm()),
    }


# ---------------------------------------------------------------- one size


@contextlib.contextmanager
def guarded(record: dict[str, Any], name: str) -> Iterator[None]:
    """Keep what goes wrong with a variant in its place. Only for what fails on all ranks alike."""
    try:
        yield
    except Exception as error:
        record[name] = {"error": f"{type(error).__name__}: {str(error)[:600]}"}


def run_size(size: Size, world: Any, rounds: int, each: int, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything of one size. `save` is called with what there is after each part."""
    shapes = size.shapes()
    record: dict[str, Any] = {"size": dataclasses.asdict(size), "flops": sum(map(flops, shapes.values())), "variants": {}}
    record["settings"] = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "steps": STEPS, "batch_elements": BATCH_ELEMENTS}
    cuda = world.device.type == "cuda"
    makers: dict[str, Callable[[], Any]] = {
        "fsdp, float32": lambda: Bands(shapes, world, "float32"),
        "fsdp, bfloat16": lambda: Bands(shapes, world, "bfloat16"),
        "owned, no kernels": lambda: Owned(shapes, world, newton_schulz_kernel="reference"),
        "owned": lambda: Owned(shapes, world),
    }
    variants: dict[str, Any] = {}
    for name, make in makers.items():
        with guarded(record["variants"], name):
            variant = make()
            for _ in range(CHECKED):
                variant.step()
            variants[name] = variant
            record["variants"][name] = {"facts": getattr(variant, "facts", None)}
    if {"owned", "fsdp, float32"} <= set(variants):
        with guarded(record, "compared"):
            record["compared"] = compared(variants["owned"], variants["fsdp, float32"], shapes, world)
    for name, variant in variants.items():
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        variant.step()
        record["variants"][name]["step_bytes"] = torch.cuda.max_memory_allocated() - before if cuda else 0
        with guarded(record["variants"][name], "trace"):
            record["variants"][name]["trace"] = trace(variant, world)
    if cuda and "owned" in variants:
        with guarded(record["variants"], "owned, graph"):
            variants["owned, graph"] = Graph(Owned(shapes, world))
            record["variants"]["owned, graph"] = {"trace": trace(variants["owned, graph"], world)}
    save(record)
    for name, times in rounds_of(variants, world, rounds, each).items():
        record["variants"][name]["ms"] = times
    if cuda:
        with contextlib.suppress(ImportError):
            from intarsia_kernels.optimizer.symmetric import choices

            record["choices"] = [{"key": [str(part) for part in key], **vars(choice)} for key, choice in choices().items()]
    save(record)
    return record


def worker(options: Any) -> None:
    """One process: both sizes, rank 0 writes."""
    import os

    from intarsia.comm import init_world

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    world = init_world(device)
    results = json.loads(Path(options.out).read_text())

    for name, size in (DEBUG_SIZES if options.debug_sizes else SIZES).items():

        def save(record: dict[str, Any], name: str = name) -> None:
            results[name] = record
            if rank == 0:
                Path(options.out).write_text(json.dumps(results, indent=1))

        begin = time.monotonic()
        record = run_size(size, world, options.rounds, options.each, save)
        if rank == 0:
            print(f"{name} ({time.monotonic() - begin:.0f} s)", flush=True)
            show(record)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    world.barrier("done")
    print("", end="", flush=True)
    # Graphs and communicators are not worth an orderly end.
    os._exit(0)


def show(record: dict[str, Any]) -> None:
    """The figures as a table, and the bars."""
    import statistics

    base = record["variants"].get("fsdp, float32", {}).get("ms")
    for name, entry in record["variants"].items():
        if "error" in entry:
            print(f"  {name:>20}: {entry['error']}", flush=True)
            continue
        took = statistics.median(entry["ms"])
        change = f"{100 * (took / statistics.median(base) - 1):+.1f} %" if base else ""
        traced = entry.get("trace", {})
        counts = (
            ""
            if "collective_calls" not in traced
            else f"{traced['collective_calls']} collective calls, {traced['collective_kernels']} kernels"
        )
        print(f"  {name:>20} | {took:9.2f} ms | {change:>8} | {len(entry['ms'])} steps | {counts}", flush=True)
    for rank, found in record.get("compared", {}).items():
        print(f"  {rank}: {json.dumps(found)}", flush=True)
    for entry in record["variants"].get("owned", {}).get("trace", {}).get("longest", []):
        print(f"    {entry['ms']:8.3f} ms  {entry['calls']:4d}  {entry['kernel'][:90]}", flush=True)
