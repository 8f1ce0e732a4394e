"""What FlexShard costs the host for one bucket, counted on a CPU: no GPU, one process, tiny tensors.

    python benchmarks/flexshard_host_cpu.py                    # microseconds and calls for each bucket, by hook
    python benchmarks/flexshard_host_cpu.py --json FILE        # the same as JSON
    python benchmarks/flexshard_host_cpu.py --functions 30     # and where the time goes, by function

The runtime takes the path that it takes on CUDA, with doubles for streams, events and graphs that only count, on one rank of a group of two whose other rank does not exist. So the figures are
the host's time without the driver's: what Python and torch's tensor calls take, and how often the driver is called. The model is the small one of `flexshard_gpu.py` with tiny
matrices: 24 blocks of seven, their norms in one bucket, embedding and head. *microseconds* are those of the hooks that `flexshard_gpu.py host` times, the update inside of backward left out: of each call in a step the fastest of `--steps` steps, so
that what else the machine does is mostly left out too. *calls* of functions, Python's and C's, as far as Python's profiler sees them, depend on the code alone.

Variants: `handed-on`: backward updates each bucket behind its reduction, and the optimizer adds what ranks sent itself; `kept`: gradients stay for an update behind backward; each over the process
group and over copy engines, whose calls are recorded graphs by then.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import json
import platform
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VARIANTS = ("handed-on", "kept", "handed-on-copy-engine", "kept-copy-engine")
WARM = 4
device_calls: collections.Counter[str] = collections.Counter()
"""What the doubles were asked for."""


# ---------------------------------------------------------------- doubles of the device


class Event:
    """Counts; is over at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        """As `torch.cuda.Event`."""

    def record(self, stream: Any = None) -> None:
        """As `torch.cuda.Event.record`."""
        device_calls["event recorded"] += 1

    def wait(self, stream: Any = None) -> None:
        """As `torch.cuda.Event.wait`."""
        device_calls["event waited for"] += 1

    def query(self) -> bool:
        """Over."""
        return True

    def synchronize(self) -> None:
        """Over."""


class Stream:
    """Counts."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.stream_id, self.device_index, self.device_type = id(self), 0, 1

    def wait_event(self, event: Any) -> None:
        """As `torch.cuda.Stream.wait_event`."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """As `torch.cuda.Stream.wait_stream`."""
        event = Event()
        event.record(stream)
        event.wait(self)


class Graph:
    """Counts."""

    def capture_begin(self, **settings: Any) -> None:
        """Nothing is captured."""

    def capture_end(self) -> None:
        """Nothing was captured."""

    def replay(self) -> None:
        """As `torch.cuda.CUDAGraph.replay`."""
        device_calls["graph launched"] += 1

    def reset(self) -> None:
        """Nothing to free."""


def install_doubles() -> None:
    """Let `torch.cuda` give the doubles, in this process, and the runtime take its path for CUDA."""
    from intarsia_flexshard import reduction, runtime
    from intarsia_flexshard.lanes import Lanes

    compute, current = Stream(), torch.cuda

    def set_stream(stream: Any) -> None:
        choose(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    def choose(stream_id: int, device_index: int, device_type: int) -> None:
        device_calls["stream chosen"] += 1

    doubles = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "set_stream": set_stream,
        "current_stream": lambda device=None: compute,
    }
    doubles |= {
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, double in doubles.items():
        setattr(current, name, double)
    runtime.Lanes = lambda device: Lanes(torch.device("cuda"))  # type: ignore[misc,assignment]

    def prepare_add(parts: Sequence[torch.Tensor], scale: float) -> Callable[[torch.Tensor], None]:
        def add(out: torch.Tensor) -> None:
            device_calls["sum"] += 1

        return add

    reduction.best_sums = lambda device_type: (reduction.add_scaled, prepare_add)  # type: ignore[assignment]


class Backend:
    """A process group's, whose calls do nothing."""

    def _allgather_base(self, *arguments: Any) -> None:
        device_calls["collective called"] += 1

    alltoall_base = alltoall = broadcast = _allgather_base


def communicator() -> Any:
    """Rank 0 of two."""
    from intarsia.comm import FakeCommunicator
    from intarsia.comm.prepared import GroupGather, GroupReduce

    class Reduce(GroupReduce):
        """Combines at once, as on CUDA."""

        def start(self, out: torch.Tensor) -> None:
            self._launch()
            self._combine(self._parts, out)

    class Half(FakeCommunicator):
        """One of two ranks, with prepared collectives as a process group has them."""

        def split(self, groups: Sequence[Sequence[int]], name: str) -> Any:
            """See `Communicator.split`."""
            mine = next(list(group) for group in groups if self.rank in group)
            return Half(mine.index(self.rank), len(mine), self.device, name)

        def duplicate(self, name: str, transport: Any = None) -> Any:
            """See `Communicator.duplicate`."""
            made = Half(self.rank, self.size, self.device, name)
            made.transport = transport
            return made

        def _before(self, record: dict[str, Any]) -> None:
            record["number"] = record.get("number", 0) + 1

        def watch_event(self, event: Any, record: dict[str, Any]) -> None:
            """As a process group: a deque of copies."""
            watched.append((event, self, dict(record), time.monotonic()))

        def _prepare_gather(self, local: Any, full: Any, counts: list[int], what: str) -> Any:
            return GroupGather(self, Backend(), local, full, counts, what, False)  # type: ignore[arg-type]

        def _prepare_reduce(self, full: Any, counts: list[int], what: str, combine: Any, scratch: Any) -> Any:
            return Reduce(self, Backend(), full, counts, what, combine, scratch, False)  # type: ignore[arg-type]

    watched: collections.deque[Any] = collections.deque(maxlen=64)
    return Half(0, 2)


class Memory:
    """Blocks for `CopyEngine`: both ranks' memory is this process's."""

    def fault(self, comm: Any) -> None:
        """None."""

    def facts(self, comm: Any) -> dict[str, Any]:
        """None."""
        return {}

    def unreachable(self, facts: Any, rank: int) -> None:
        """Nobody."""

    def usable(self, size: int) -> int:
        """All."""
        return size

    footprint = usable

    def block(self, comm: Any, size: int) -> Any:
        """Two views, and a barrier that counts."""

        def barrier(channel: int) -> None:
            device_calls["barrier"] += 1

        return SimpleNamespace(views=[torch.zeros(size, dtype=torch.uint8) for _ in range(comm.size)], barrier=barrier)


class TakesSums:
    """An optimizer that adds what ranks have sent itself, and costs nothing."""

    takes_sums = True

    def step(self, factor: Any, names: Sequence[str]) -> None:
        """Nothing changes."""

    def step_quantising(self, factor: Any, names: Sequence[str], wires: Sequence[Any], sums: Any = None) -> list[Any]:
        """Nothing changes."""
        return []


# ---------------------------------------------------------------- a variant


class Variant:
    """The sharded model and its step."""

    def __init__(self, name: str) -> None:
        from flexshard_model import Llama, Size, rotary_tables
        from intarsia.config import MeshConfig
        from intarsia.mesh import Mesh, check_mesh
        from intarsia.parameters import ParameterTable
        from intarsia.plugins import current
        from intarsia_comms.copy_engine import CopyEngine
        from intarsia_flexshard.config import BucketConfig, FlexShardConfig
        from intarsia_flexshard.runtime import FlexShard
        from intarsia_placements.config import Flat

        size = Size(64, 32, 2, 1, 32, layers=24, tokens=4)
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model = Llama(size)
        buckets = [BucketConfig(name=each, match=(f"{each}*",)) for each in ("embedding", "head.weight")]
        buckets.append(BucketConfig(name="vectors", match=("*norm.weight",), reshard="never"))
        config = FlexShardConfig(placement=Flat(), buckets=tuple(buckets), master="split", reduce_op="average")
        table, comm = ParameterTable.from_model(self.model, "float32", "bfloat16", "float32"), communicator()
        mesh = Mesh(check_mesh(MeshConfig(), comm.size), comm)
        self.is_early, self.is_copied = name.startswith("handed-on"), name.endswith("copy-engine")
        plugins: Any = current()
        if self.is_copied:
            engine = CopyEngine(Memory())
            duplicate = type(comm).duplicate
            type(comm).duplicate = lambda self, name, transport=None: duplicate(self, name, engine)
        self.sharded = FlexShard(config, plugins).shard(self.model, table, mesh, comm)
        self.tables = rotary_tables(size, torch.device("cpu"), torch.bfloat16)
        ids = torch.randint(64, (1, 5))
        self.batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.optimizer: Any = TakesSums()

    def step(self) -> None:
        """As `Ours.step` of `flexshard_variants`."""
        with self.sharded.update_in_backward(self.optimizer, 1.0) if self.is_early else contextlib.nullcontext():
            self.model(*self.batch, *self.tables).backward()
            self.sharded.finish_gradients(wait=False)
        self.sharded.update(self.optimizer, 1.0)
        self.sharded.zero_gradients()

    def warm(self) -> None:
        """The first steps, in which memory is made and collectives are recorded."""
        for _ in range(WARM):
            self.step()
            for bucket in self.sharded.buckets if self.is_copied else ():
                for call in (bucket.gather, *[plan.call for plan in bucket.reduction._plans.values()]):  # type: ignore[union-attr]
                    if hasattr(call, "pairs"):  # What a copy engine has on CUDA.
                        call.event = Event()


# ---------------------------------------------------------------- measuring


HOOKS = ("forward begins", "forward ends", "backward enters", "backward leaves", "update")


class Clock:
    """Wraps FlexShard's hooks, as `flexshard_measure.HostClock` does: `calls` has the name and the nanoseconds of each, those of hooks inside left out."""

    def __init__(self, sharded: Any) -> None:
        self.calls: list[tuple[str, int]] = []
        self.inside: list[int] = []
        self.before: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None
        for _, module in sharded.modules():
            for hooks, name in ((module._forward_pre_hooks, HOOKS[0]), (module._forward_hooks, HOOKS[1])):
                for number, hook in hooks.items():
                    if not hasattr(hook, "timed"):
                        hooks[number] = self._timed(hook, name)
        sharded._enter = self._timed(sharded._enter, HOOKS[2])
        sharded._leave_known = self._timed(sharded._leave_known, HOOKS[3])
        sharded._update_early = self._timed(sharded._update_early, HOOKS[4])

    def _timed(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self.inside.append(0)
            if self.before is not None and name != HOOKS[4]:
                self.before()
            begin = time.perf_counter_ns()
            try:
                return hook(*arguments)
            finally:
                spent = time.perf_counter_ns() - begin
                if self.after is not None and name != HOOKS[4]:
                    self.after()
                self.calls.append((name, spent - self.inside.pop()))
                if self.inside:
                    self.inside[-1] += spent

        timed.timed = True  # type: ignore[attr-defined]
        return timed


@contextlib.contextmanager
def counting(clock: Clock, found: collections.Counter[str]) -> Iterator[None]:
    """Count calls of functions inside of the hooks."""

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename != __file__:
            found["Python functions" if event == "call" else "C functions"] += 1

    clock.before, clock.after = lambda: sys.setprofile(count), lambda: sys.setprofile(None)
    try:
        yield
    finally:
        clock.before = clock.after = None


def measure(variant: Variant, steps: int) -> tuple[dict[str, Any], Clock]:
    """Figures of one variant, for each bucket."""
    variant.warm()
    buckets, clock = len(variant.sharded.buckets), Clock(variant.sharded)
    rounds: list[list[tuple[str, int]]] = []
    for _ in range(steps):
        clock.calls = []
        variant.step()
        rounds.append(clock.calls)
    times: collections.Counter[str] = collections.Counter()
    for same in zip(*rounds, strict=True):
        times[same[0][0]] += min(spent for _, spent in same)
    device_calls.clear()
    calls: collections.Counter[str] = collections.Counter()
    with counting(clock, calls):
        variant.step()
    return {
        "buckets": buckets,
        "microseconds": round(sum(times[name] for name in HOOKS[:-1]) / buckets / 1e3, 2),
        "microseconds_by_hook": {name: round(times[name] / buckets / 1e3, 2) for name in HOOKS},
        "calls": {name: round(value / buckets, 2) for name, value in sorted(calls.items())},
        "device_calls_of_the_step": {name: round(value / buckets, 2) for name, value in sorted(device_calls.items())},
    }, clock


def show_functions(variant: Variant, clock: Clock, steps: int, rows: int) -> None:
    """Where the hooks' time goes."""
    profile = cProfile.Profile()
    clock.before, clock.after = profile.enable, profile.disable
    for _ in range(steps):
        variant.step()
    clock.before = clock.after = None
    pstats.Stats(profile).sort_stats("tottime").print_stats(rows)


def main() -> int:
    """Measure the variants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"Any of {', '.join(VARIANTS)}; default: all.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, help="Where to write the figures.")
    parser.add_argument("--functions", type=int, default=0, help="How many functions to list.")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    torch.set_num_threads(1)
    install_doubles()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    record: dict[str, Any] = {"benchmark": "flexshard_host_cpu", "versions": versions, "steps": arguments.steps, "variants": {}}
    for name in arguments.variants or VARIANTS:
        variant = Variant(name)
        found, clock = measure(variant, arguments.steps)
        record["variants"][name] = found
        print(f"{name}: {json.dumps(found, indent=1)}")
        if arguments.functions:
            show_functions(variant, clock, arguments.steps, arguments.functions)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
