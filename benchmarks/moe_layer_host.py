"""What the host does for a pass of a mixture-of-experts layer by the kernels of a GPU, counted without one, as JSON. It needs Triton (any Linux machine can install it).

    python benchmarks/moe_layer_host.py --rounds 300

A layer of few tokens runs forward and backward on the CPU with the kernels that an H200 would choose. Triton compiles for sm_90 and goes through all of its launching code; only the last call, into the driver,
is left out, as are torch's grouped products. So results are rubbish, and what the host does between launches is real; what PyTorch's own operators cost on a GPU's queue, against a few numbers on a CPU, is not in it.

`launches` counts kernels of one pass: those of Triton, and PyTorch's operators that are no views, each as many as it launches on a GPU (LAUNCHES). `first_ms` is the host's time until rows are on their way to their
experts, the first kernel that takes long: a GPU with an empty queue waits for that. `pass_ms` is the time of the whole pass. Times are the thread's own (others' work on the machine is not in them): medians, and the least.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from intarsia import ops, plugins
from intarsia_kernels.moe import products, router
from moe_layer_gpu import build, layer_pass, routers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

SIZES = {"dim": 128, "hidden": 64, "experts": 64, "top_k": 6, "tokens": 64}
PRESENT = ("cpu", "cuda", "sm80", "sm89", "sm90", "bf16", "triton")
FIRST = "_spread"
"""The kernel that takes rows to their experts."""
LAUNCHES = {
    "aten::sort": 7,
    "aten::topk": 2,
    "aten::cumsum": 2,
    "aten::sum": 1,
    "aten::mm": 1,
    "grouped_mm": 2,
    "aten::_local_scalar_dense": 0,
}
"""What operators launch on an H200 where it is not one kernel (from a profile there)."""
NO_KERNEL = (
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "view",
        "_unsafe_view",
        "view_as",
        "reshape",
        "flatten",
        "unflatten",
        "t",
        "transpose",
    ),
    *(
        "permute",
        "expand",
        "expand_as",
        "as_strided",
        "slice",
        "select",
        "narrow",
        "split",
        "unbind",
        "unsqueeze",
        "squeeze",
        "alias",
        "detach",
    ),
    *("detach_", "resize_", "lift_fresh", "result_type", "resolve_conj", "is_nonzero", "to", "item", "requires_grad_"),
    "_has_compatible_shallow_copy_type",
)
"""PyTorch's operators that look at a tensor otherwise, or make room."""


class Driver:
    """As much of a driver as launching asks for: an H200 that takes every kernel and runs none."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

        @staticmethod
        def load_binary(*_: Any) -> tuple[int, int, int, int, int]:
            return 0, 0, 32, 0, 1024

    class launcher_cls:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, *_: Any) -> None:
            pass

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Watch:
    """What was launched, in order, with the thread's time."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []
        run = jit.JITFunction.run

        def watched(function: Any, *arguments: Any, **named: Any) -> Any:
            found = run(function, *arguments, **named)
            self.launched.append((function.fn.__name__, time.thread_time_ns()))
            return found

        jit.JITFunction.run = watched

    def note(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """`made`, noted as a launch."""

        def call(*arguments: Any, **named: Any) -> Any:
            found = made(*arguments, **named)
            self.launched.append((name, time.thread_time_ns()))
            return found

        return call


def grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """What torch's grouped product would write into."""
    return a.new_empty(offs.shape[0], a.shape[0], b.shape[1]) if b.dim() == 2 else a.new_empty(a.shape[0], b.shape[2])


def install() -> Watch:
    """Kernels as on an H200, none of which runs."""
    driver.set_active(Driver())
    watch = Watch()
    products._grouped_mm = watch.note("grouped_mm", grouped_shape)
    router._multiply = watch.note("wide_product", lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32))
    ops.install(ops.select({}, plugins.current(), PRESENT, "bfloat16"))
    return watch


@contextlib.contextmanager
def operators(counted: Counter[str]) -> Iterator[None]:
    """Count PyTorch's operators that launch a kernel: those within which no other is called, and which are no views."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as taken:
        yield
    for event in taken.events():
        name = event.name.removeprefix("aten::")
        inner = [
            child for child in event.cpu_children if child.name.startswith("aten::") and child.name.removeprefix("aten::") not in NO_KERNEL
        ]
        if event.name.startswith("aten::") and name not in NO_KERNEL and (not inner or event.name in LAUNCHES) and not within(event):
            counted[event.name] += 1


def within(event: Any) -> bool:
    """Whether an operator that is counted as a whole calls this one."""
    while (event := event.cpu_parent) is not None:
        if event.name in LAUNCHES:
            return True
    return False


def launches(watch: Watch, run: Callable[[], None]) -> dict[str, int]:
    """Kernels of one pass by name."""
    counted: Counter[str] = Counter()
    watch.launched.clear()
    with operators(counted):
        run()
    counted.update(name for name, _ in watch.launched)
    return {name: number * LAUNCHES.get(name, 1) for name, number in counted.most_common() if LAUNCHES.get(name, 1)}


def first_launches(watch: Watch, layer: torch.nn.Module, x_BSD: torch.Tensor) -> int:
    """Kernels before the first that takes long."""

    class Enough(Exception):
        pass

    run, before = jit.JITFunction.run, len(watch.launched)

    def until(function: Any, *arguments: Any, **named: Any) -> Any:
        if function.fn.__name__ == FIRST:
            raise Enough
        return run(function, *arguments, **named)

    jit.JITFunction.run = until
    counted: Counter[str] = Counter()
    try:
        with operators(counted), contextlib.suppress(Enough):
            layer(x_BSD)
    finally:
        jit.JITFunction.run = run
    counted.update(name for name, _ in watch.launched[before:])
    return sum(number * LAUNCHES.get(name, 1) for name, number in counted.items())


def times(watch: Watch, run: Callable[[], None], rounds: int) -> dict[str, float]:
    """The thread's milliseconds."""
    firsts, whole = [], []
    for number in range(rounds + 20):
        watch.launched.clear()
        begin = time.thread_time_ns()
        run()
        end = time.thread_time_ns()
        if number >= 20:
            whole.append((end - begin) / 1e6)
            firsts.append((next(at for name, at in watch.launched if name == FIRST) - begin) / 1e6)
    return {
        "first_ms": statistics.median(firsts),
        "first_least_ms": min(firsts),
        "pass_ms": statistics.median(whole),
        "pass_least_ms": min(whole),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument(
        "--router", action="append", choices=["softmax", "group_limited", "forced_balanced"], help="only this one (may be repeated)"
    )
    parser.add_argument("--out", help="write the JSON there as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    watch, found = install(), []
    for name, config in routers(SIZES["experts"], SIZES["top_k"]).items():
        if name not in (arguments.router or [name]):
            continue
        layer = build(config, SIZES["dim"], SIZES["hidden"], torch.bfloat16, "cpu")
        x_BSD = torch.randn(1, SIZES["tokens"], SIZES["dim"], dtype=torch.bfloat16, requires_grad=True)
        run = layer_pass(layer, x_BSD, torch.randn_like(x_BSD))
        run()
        counted = launches(watch, run)
        first = first_launches(watch, layer, x_BSD)
        found.append(
            {
                "router": name,
                "launches": sum(counted.values()),
                "first_launches": first,
                **times(watch, run, arguments.rounds),
                "by_name": counted,
            }
        )
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    text = json.dumps({"benchmark": "moe_layer_host", "versions": versions, "sizes": SIZES, "results": found}, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
