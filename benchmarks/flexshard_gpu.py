"""FlexShard against PyTorch's `fully_shard`, interleaved in one process for each GPU. One JSON file for each section.

    python benchmarks/flexshard_gpu.py FOLDER                                # every section, on all GPUs
    python benchmarks/flexshard_gpu.py FOLDER large small-graph              # two of them
    python benchmarks/flexshard_gpu.py FOLDER large --ours prefetch=2        # with other settings of FlexShard
    python benchmarks/flexshard_gpu.py FOLDER small-graph --stand-in 2       # one GPU as rank 0 of two, without the other
    python benchmarks/flexshard_gpu.py FOLDER --device cpu --debug-sizes     # does it run? (gloo, two processes)
    python benchmarks/flexshard_table.py FOLDER                              # the figures

Sections:

* `large`, `small-eager`, `small-compiled`: `fully_shard` (plain and best wrapping), FlexShard over the process group, FlexShard over the copy engines;
* `small-graph`: the best `fully_shard`, and FlexShard's whole step as a CUDA graph, over both;
* `one`: FlexShard on two GPUs against itself on one, both GPUs running their own; then `fully_shard` on one;
* `fp8`: FP8 against bfloat16 gathers, captured; `fp8-loss`: 200 steps of FP8, of bfloat16 twice, and of bfloat16 from another seed;
* `host`: CPU time for each bucket's unshard and reduce; `bytes`: what collectives move against what they must;
* `offload`: shards and optimizer state in the host's memory.

A file is written after each variant and each round, so a run that is cut off keeps what it has (`"complete": false`). A variant that fails has an `error`
in its place. Times are of `--rounds` rounds of `--steps` steps in turn; the first step of a round does not count.

With `--stand-in N` one process does all that rank 0 of N does, over torch's fake process group, whose collectives copy inside of this GPU's memory: a
rank's memory, its computing and the host's work without what the network takes of either. Losses mean nothing, nor do times beside those of real ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("large", "small-eager", "small-compiled", "small-graph", "one", "fp8", "fp8-loss", "host", "bytes", "offload")
TRANSPORT = "copy_engine"
LOSS_STEPS = 200


# ---------------------------------------------------------------- one process


class Section:
    """One section in one process of the world: builds variants, measures them, and writes the file on rank 0."""

    def __init__(self, name: str, arguments: argparse.Namespace, world: Any, alone: Any) -> None:
        self.name, self.arguments, self.world, self.alone, self.device = name, arguments, world, alone, world.device
        self.record: dict[str, Any] = {
            "benchmark": "flexshard_gpu",
            "section": name,
            "complete": False,
            "debug_sizes": arguments.debug_sizes,
            "world": world.size,
            "stand_in": bool(arguments.stand_in),
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "changes": dict(arguments.ours),
            **facts(arguments, self.device),
            "variants": {},
        }
        self.path = Path(arguments.folder) / f"{name}.json"
        # Ranks whose memory a copy engine reaches.
        self.has_transport = self.device.type == "cuda" and not arguments.stand_in

    def save(self) -> None:
        """Write what there is."""
        if self.world.rank == 0:
            unfinished = self.path.with_suffix(".part")
            unfinished.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(self.path)

    def setup(self, size: str, compiled: bool, lr: float | None = None) -> Any:
        """The `Setup` of a model of this name."""
        import dataclasses

        from flexshard_model import DEBUG_SIZES, SIZES
        from flexshard_variants import ADAMW, Setup, opponent_settings

        chosen = (DEBUG_SIZES if self.arguments.debug_sizes else SIZES)[size]
        self.record["model"] = dataclasses.asdict(chosen)
        self.record["opponent"] = opponent_settings(compiled)
        # Where memory is all gradients, or the update a large part of the step, backward updates as it goes.
        return Setup(chosen, self.world, self.alone, compiled, lr or ADAMW["lr"], dict(self.arguments.ours), early=size in ("small", "fp8"))

    def batch(self, setup: Any) -> Any:
        """This process's batch."""
        from flexshard_model import random_batch

        return random_batch(setup.size, self.device, 7 + self.world.rank)

    def prepare(self, makers: Mapping[str, Callable[[], Any]], batch: Any, captured: Sequence[str] = ()) -> dict[str, Any]:
        """Build each variant, record its first losses and its memory. Those named in `captured` are made into graphs."""
        from flexshard_measure import measure_memory, occupied, reserved_growth, synchronise, traffic
        from flexshard_variants import Captured, Ours

        found: dict[str, Any] = {}
        for name, make in makers.items():
            entry = self.record["variants"].setdefault(name, {})
            begin = time.perf_counter()
            gc.collect()
            before = occupied(self.device)
            with self.guard(name), reserved_growth(self.device, entry):
                variant = make()
                if isinstance(variant, Ours):
                    entry["settings"] = variant.settings
                losses = [float(variant.step(batch)) for _ in range(4)]
                if not self.record["stand_in"]:
                    entry["losses"] = losses
                if isinstance(variant, Ours):
                    entry["traffic"] = traffic(variant, batch, self.device)
                if name in captured:
                    variant = Captured(variant, batch)
                    entry["captured"] = True
                measure_memory(variant, batch, before, self.device, entry)
                synchronise(self.device)
                found[name] = variant
            entry["build_s"] = round(time.perf_counter() - begin, 1)
            variant = None
            self.save()
            if "error" in entry:
                self.say(f"{name} FAILED: {entry['error'][:300]}")
            self.say(
                f"{name}: losses {entry.get('losses')}, peak {entry.get('peak_allocated_bytes', 0) / 2**30:.2f} GiB, {entry['build_s']} s"
            )
        return found

    @contextlib.contextmanager
    def guard(self, name: str) -> Any:
        """A failure belongs to the variant: it is recorded, and the section goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.record["variants"][name]["error"] = f"{type(error).__name__}: {error}"[:2000]

    def race(self, variants: Mapping[str, Any], batch: Any, rounds: int | None = None) -> None:
        """See `flexshard_measure.race`."""
        from flexshard_measure import race

        race(variants, batch, rounds or self.arguments.rounds, self.arguments.steps, self.world, self.record["variants"], self.save)

    def profile(self, variants: Mapping[str, Any], batch: Any, names: Sequence[str]) -> None:
        """Traces of these variants, on a GPU."""
        from flexshard_measure import profile

        for name in names:
            if name in variants and self.device.type == "cuda" and not self.arguments.no_profile:
                with self.guard(name):
                    self.record["variants"][name]["profile"] = profile(variants[name], batch, self.world)
                self.save()

    def say(self, text: str) -> None:
        """A line of progress."""
        if self.world.rank == 0:
            print(f"[{self.name}] {text}", flush=True)

    def finish(self) -> None:
        """The file is complete."""
        self.record["complete"] = True
        self.save()


def facts(arguments: argparse.Namespace, device: Any) -> dict[str, Any]:
    """What ran where."""
    import torch

    is_cuda = device.type == "cuda"
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if is_cuda:
        versions |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        with contextlib.suppress(ImportError):
            import triton

            versions["triton"] = triton.__version__
    return {
        "commit": arguments.commit,
        "command": arguments.command,
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu",
        "peer_access": is_cuda and torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1),
        "kernel": platform.release(),
        "environment": {
            key: os.environ[key]
            for key in sorted(os.environ)
            if key.startswith(("NCCL_", "TORCH_", "CUDA_", "OMP_", "INTARSIA_")) and key != "INTARSIA_RENDEZVOUS"
        },
        "versions": versions,
    }


def compare(section: Section, size: str, compiled: bool) -> None:
    """`large`, `small-eager` and `small-compiled`."""
    from flexshard_variants import FullyShard, Ours

    setup = section.setup(size, compiled)
    batch = section.batch(setup)
    makers: dict[str, Callable[[], Any]] = {
        "fsdp-plain": lambda: FullyShard(setup, best=False),
        "fsdp-best": lambda: FullyShard(setup, best=True),
        "ours": lambda: Ours(setup),
    }
    if section.has_transport:
        makers["ours-copy-engine"] = lambda: Ours(setup, TRANSPORT)
    variants = section.prepare(makers, batch)
    section.race(variants, batch)
    section.profile(variants, batch, ("fsdp-best", "ours", "ours-copy-engine"))


def graph(section: Section) -> None:
    """`small-graph`. Without a GPU the steps are not captured."""
    from flexshard_variants import FullyShard, Ours

    setup = section.setup("small", True)
    batch = section.batch(setup)
    is_cuda = section.device.type == "cuda"
    makers: dict[str, Callable[[], Any]] = {"fsdp-best": lambda: FullyShard(setup, best=True), "ours-captured": lambda: Ours(setup)}
    if section.has_transport:
        makers["ours-copy-engine-captured"] = lambda: Ours(setup, TRANSPORT)
    variants = section.prepare(makers, batch, captured=tuple(makers)[1:] if is_cuda else ())
    section.race(variants, batch)
    section.profile(variants, batch, tuple(makers)[1:])


def one(section: Section) -> None:
    """`one`: each GPU runs its own copy where a variant is of one process."""
    from flexshard_variants import FullyShard, Ours

    setup = section.setup("large", True)
    batch = section.batch(setup)
    makers: dict[str, Callable[[], Any]] = {"ours-one": lambda: Ours(setup, alone=True)}
    if section.world.size > 1:
        makers["ours"] = lambda: Ours(setup)
        if section.has_transport:
            makers["ours-copy-engine"] = lambda: Ours(setup, TRANSPORT)
    variants = section.prepare(makers, batch)
    section.race(variants, batch)
    variants.clear()
    variants = section.prepare({"fsdp-one": lambda: FullyShard(setup, best=True, alone=True)}, batch)
    section.race(variants, batch, max(section.arguments.rounds // 2, 1))


def fp8(section: Section) -> None:
    """`fp8`: the models of one transport at a time, those that are compared."""
    import dataclasses

    from flexshard_variants import Ours

    setup = section.setup("fp8", True)
    batch = section.batch(setup)
    # A ring of four buffers of float8 has the bytes of one of two of bfloat16.
    ahead = dataclasses.replace(setup, changes={**setup.changes, "prefetch": 3})
    is_cuda = section.device.type == "cuda"
    for transport in (None, TRANSPORT) if section.has_transport else (None,):
        suffix = "-copy-engine" if transport else ""
        makers: dict[str, Callable[[], Any]] = {
            f"{label}{suffix}": lambda payload=payload, transport=transport: Ours(setup, transport, payload)  # type: ignore[misc]
            for label, payload in (("bf16", "plain"), ("fp8", "fp8"))
        }
        makers[f"fp8-ahead{suffix}"] = lambda transport=transport: Ours(ahead, transport, "fp8")  # type: ignore[misc]
        variants = section.prepare(makers, batch, captured=tuple(makers) if is_cuda else ())
        section.race(variants, batch)
        section.profile(variants, batch, tuple(makers))
        variants.clear()


def fp8_loss(section: Section) -> None:
    """`fp8-loss`: the same batches in the same order for all; losses averaged over the processes."""
    import torch
    from flexshard_model import learnable_batches
    from flexshard_variants import Ours

    setup = section.setup("curve", False, lr=1e-3)
    steps = 20 if section.arguments.debug_sizes else LOSS_STEPS
    batches = learnable_batches(setup.size, section.device, steps, section.world.rank)
    runs: dict[str, dict[str, Any]] = {"bf16": {}, "bf16-again": {}, "bf16-other-seed": {"seed": 1}, "fp8": {"payload": "fp8"}}
    for name, options in runs.items():
        entry = section.record["variants"].setdefault(name, {})
        begin = time.perf_counter()
        with section.guard(name):
            variant = Ours(setup, **options)
            losses = torch.stack([variant.step(batch).clone() for batch in batches]).double() / section.world.size
            entry["losses"] = [round(value, 6) for value in section.world.all_reduce(losses, "sum", "losses").tolist()]
            del variant
        gc.collect()
        section.say(f"{name}: {entry.get('losses', [])[::40]}, {time.perf_counter() - begin:.1f} s")
        section.save()


def host(section: Section) -> None:
    """`host`: the small model, eager and compiled; copy engines also without graphs for their copies, as they were measured before."""
    from flexshard_measure import host_time
    from flexshard_variants import Ours
    from intarsia_comms.copy_engine import Pulled

    transports = ((None, True), (TRANSPORT, True), (TRANSPORT, False)) if section.has_transport else ((None, True),)
    for compiled in (False, True):
        setup = section.setup("small", compiled)
        batch = section.batch(setup)
        for transport, recorded in transports:
            Pulled.is_recordable = recorded
            name = f"{'compiled' if compiled else 'eager'}{'-copy-engine' if transport else ''}{'' if recorded else '-as-calls'}"
            variants = section.prepare({name: lambda setup=setup, transport=transport: Ours(setup, transport)}, batch)  # type: ignore[misc]
            if name in variants:
                section.race(variants, batch, 2)
                with section.guard(name):
                    section.record["variants"][name]["host"] = host_time(variants[name], batch, section.device)
            variants.clear()


def bytes_moved(section: Section) -> None:
    """`bytes`: whole matrices on their owners, and flat cuts: traffic of one step, and the bytes that the shards' sizes demand."""
    from flexshard_variants import Ours

    setup = section.setup("small", False)
    batch = section.batch(setup)
    for name, owned in (("flat", False), ("owned", True)):
        variants = section.prepare({name: lambda owned=owned: Ours(setup, owned=owned)}, batch)  # type: ignore[misc]
        if name in variants:
            pair = [section.record["variants"][name]["traffic"], variants[name].true_bytes()]
            section.record["variants"][name]["by_rank"] = section.world.gather_json(pair, "traffic")
        variants.clear()


def offload(section: Section) -> None:
    """`offload`: the small model with shards and optimizer state in the host's memory, updated there, against the device's."""
    import dataclasses

    from flexshard_variants import Ours

    setup = dataclasses.replace(section.setup("small", True), early=False)
    away = dataclasses.replace(setup, changes={**setup.changes, "offload": "cpu"}, offload="cpu")
    batch = section.batch(setup)
    variants = section.prepare({"device": lambda: Ours(setup), "host": lambda: Ours(away)}, batch)
    section.race(variants, batch, 1)


RUNS: dict[str, Callable[[Section], None]] = {
    "large": lambda section: compare(section, "large", True),
    "small-eager": lambda section: compare(section, "small", False),
    "small-compiled": lambda section: compare(section, "small", True),
    "small-graph": graph,
    "one": one,
    "fp8": fp8,
    "fp8-loss": fp8_loss,
    "host": host,
    "bytes": bytes_moved,
    "offload": offload,
}


def stand_in(device: Any, arguments: argparse.Namespace) -> Any:
    """Rank 0 of `--stand-in` ranks, of which the others are missing."""
    import torch
    from intarsia.comm import ProcessGroupCommunicator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=arguments.stand_in)
    group = torch.distributed.group.WORLD
    assert group is not None
    # Nobody is waited for, and the fake group takes no limit.
    ProcessGroupCommunicator.set_timeout = lambda self, timeout_s: setattr(self, "timeout_s", timeout_s)  # type: ignore[method-assign]
    return ProcessGroupCommunicator(group, device, timeout_s=arguments.timeout_s)


def work(arguments: argparse.Namespace) -> None:
    """One process of the world."""
    import torch
    import torch._dynamo
    from intarsia.comm import SelfCommunicator, init_world

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
    world = stand_in(device, arguments) if arguments.stand_in else init_world(device, arguments.timeout_s)
    if size == 1 and not arguments.stand_in:
        # FlexShard needs no process group here, fully_shard does.
        store = torch.distributed.FileStore(str(Path(os.environ["BENCHMARK_STORE"]) / "alone"), 1)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    for limit in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 64)
    name = arguments.sections[0]
    section = Section(name, arguments, world, SelfCommunicator(device))
    section.save()
    RUNS[name](section)
    section.finish()
    world.barrier("done")
    sys.stdout.flush()
    sys.stderr.flush()
    # Graphs and communicators are not worth an orderly end.
    os._exit(0)


# ---------------------------------------------------------------- starting them


def spawn(arguments: argparse.Namespace, section: str) -> int:
    """Run one section in fresh processes; the highest exit code. Those that outlast the limit are ended."""
    processes = arguments.processes
    with tempfile.TemporaryDirectory(prefix="flexshard-") as folder:
        running = []
        for rank in range(processes):
            environment = {
                "NCCL_NVLS_ENABLE": "0",
                "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "INTARSIA_RENDEZVOUS": f"file://{folder}/store",
                "BENCHMARK_STORE": folder,
            }
            running.append(subprocess.Popen([sys.executable, __file__, *forwarded(arguments, section), "--worker"], env=environment))
        end = time.monotonic() + arguments.limit_s
        codes = []
        for process in running:
            try:
                codes.append(abs(process.wait(max(0.1, end - time.monotonic()))))
            except subprocess.TimeoutExpired:
                print(f"[{section}] did not end within {arguments.limit_s:g} s", flush=True)
                process.kill()
                codes.append(process.wait() and 124)
            if codes[-1]:
                # The others would wait for it.
                end = min(end, time.monotonic() + 20)
    return max(codes)


def forwarded(arguments: argparse.Namespace, section: str) -> list[str]:
    """The options for a worker."""
    options = [
        str(arguments.folder),
        section,
        "--device",
        arguments.device,
        "--rounds",
        str(arguments.rounds),
        "--steps",
        str(arguments.steps),
    ]
    options += ["--timeout-s", str(arguments.timeout_s), "--commit", arguments.commit, "--command", arguments.command]
    options += ["--stand-in", str(arguments.stand_in)] + ["--debug-sizes"] * arguments.debug_sizes + ["--no-profile"] * arguments.no_profile
    for key, value in arguments.ours:
        options += ["--ours", f"{key}={json.dumps(value)}"]
    return options


def setting(text: str) -> tuple[str, Any]:
    """FIELD=VALUE, the value as JSON or else as it stands."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def current_commit() -> str:
    """The repository's, with a mark where files differ from it; unknown outside of a clone."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Run the sections; the number of those that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="Where the sections' files go.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"Any of {', '.join(SECTIONS)}; default: all.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, help="Default: one for each GPU; two on a CPU.")
    parser.add_argument("--stand-in", type=int, default=0, metavar="N", help="One process as rank 0 of N, the others missing.")
    parser.add_argument("--debug-sizes", action="store_true", help="Tiny models: the figures mean nothing.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6, help="Steps of each variant in a round; the first does not count.")
    parser.add_argument("--no-profile", action="store_true", help="No traces.")
    parser.add_argument("--ours", type=setting, action="append", default=[], metavar="FIELD=VALUE", help="A setting of FlexShardConfig.")
    parser.add_argument("--timeout-s", type=float, default=90.0, help="How long processes wait for each other.")
    parser.add_argument("--limit-s", type=float, default=240.0, help="How long a section may take.")
    parser.add_argument("--commit", default="", help="What to record where this is no clone.")
    parser.add_argument("--command", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if arguments.worker:
        work(arguments)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    arguments.commit = arguments.commit or current_commit()
    arguments.command = " ".join(
        ["python", "benchmarks/flexshard_gpu.py", *("FOLDER" if each == str(arguments.folder) else each for each in sys.argv[1:])]
    )
    if arguments.stand_in:
        arguments.processes = 1
    if arguments.processes is None:
        import torch

        arguments.processes = torch.cuda.device_count() if arguments.device == "cuda" else 2
    if arguments.processes < 1:
        print("There is no GPU. To see whether the benchmark runs: --device cpu --debug-sizes", file=sys.stderr)
        return 2
    failed = 0
    for section in arguments.sections or SECTIONS:
        begin = time.monotonic()
        code = spawn(arguments, section)
        print(f"[{section}] {'done' if not code else f'failed with {code}'} in {time.monotonic() - begin:.0f} s", flush=True)
        failed += bool(code)
    return failed


if __name__ == "__main__":
    sys.exit(main())
