"""A mixture-of-experts layer on a GPU against the grouped products in it, forward and backward, as JSON.

    python benchmarks/moe_layer_gpu.py                    # DeepSeek-V2-Lite's layer: width 2048, 64 experts of 1408, 6 to a token, 16,384 tokens, bfloat16
    python benchmarks/moe_layer_gpu.py --debug-sizes      # seconds on a CPU, float32

`layer` is one forward and backward of the whole layer without its shared expert: router, permutation, experts, combination, gradients of input and all parameters. `products` are
the nine grouped products in it alone (three forward, each with its input's and its weight's gradient), on the same counts, by the kernel that the layer uses. Rates count the FLOPs
of the experts' products only: `ratio` = the layer's rate / the products' rate. The two are timed by turns; times are medians of CUDA events, raw ones are in the output.
Each pass begins with an empty queue, so that what the host needs before the first long kernel counts. `variants` leave some of that out, for both alike where it can be: `row`, five passes one after the
other; `graph`, forward and backward as one CUDA graph (the local dispatcher's shapes are fixed, and nothing waits for the device); `compiled`, the layer under torch.compile as in a compiled block
(against the products as written); `compiled_graph`, that as a graph. One that fails says why. `host_ms` is how long the host is busy with a pass.
`pieces` are the layer's other parts, each timed alone, with the bytes that they must move. `kernels` is the layer's profile, `gaps` the longest times in it when no kernel ran, and before which.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from intarsia import ops, plugins
from intarsia.device import capabilities, describe
from intarsia_models_common.build import Scope
from intarsia_models_common.moe import products as references
from intarsia_models_common.moe.block import MoE
from intarsia_models_common.moe.config import (
    ForcedBalancedRouterConfig,
    GroupLimitedRouterConfig,
    MoEConfig,
    RouterConfig,
    SoftmaxRouterConfig,
)
from intarsia_models_common.moe.dispatch import sort_pairs
from intarsia_models_common.moe.operators import COMBINE, GROUPED_LINEAR, PERMUTE, ROUTER_LINEAR
from timing import CUDA, by_turns
from torch import Tensor, nn

FURTHER = ("row", "graph", "compiled", "compiled_graph") if CUDA else ("row",)


def routers(experts: int, top_k: int) -> dict[str, RouterConfig]:
    """Random routing, DeepSeek-V3's router, and perfect balance."""
    return {
        "softmax": SoftmaxRouterConfig(experts=experts, top_k=top_k),
        "group_limited": GroupLimitedRouterConfig(experts=experts, top_k=top_k, groups=8, top_groups=4, bias_rate=1e-3),
        "forced_balanced": ForcedBalancedRouterConfig(experts=experts, top_k=top_k),
    }


def build(router: RouterConfig, dim: int, hidden: int, dtype: torch.dtype, device: str) -> MoE:
    """The layer, its experts in `dtype` and its router in float32."""
    scope = Scope(name="layers.0.feed_forward", dim=dim, layer=0, layers=1, rope_interleaved=False, std=0.02, output_std=0.02)
    with torch.device(device):
        layer = MoE(MoEConfig(router=router, hidden=hidden), scope)
        for name, parameter in layer.named_parameters():
            if not name.startswith("router"):
                parameter.data = parameter.data.to(dtype)
            nn.init.normal_(parameter, std=0.02)
    return layer


def layer_pass(layer: MoE, x_BSD: Tensor, grad_BSD: Tensor) -> Callable[[], None]:
    """Forward and backward; gradients are new ones, as in a step's only micro-batch."""

    def run() -> None:
        x_BSD.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x_BSD).backward(grad_BSD)

    return run


def graphed(run: Callable[[], Any]) -> Callable[[], None]:
    """The same as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(kept: Any = kept) -> None:  # Results live as long as the graph.
        graph.replay()

    return replay


def gradients(layer: nn.Module, x_BSD: Tensor, grad_BSD: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward, gradients handed out and not kept: what a graph can hold."""
    leaves = [x_BSD, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x_BSD), leaves, grad_BSD)


def in_a_row(run: Callable[[], Any], count: int = 5) -> Callable[[], None]:
    """`count` passes."""

    def several() -> None:
        for _ in range(count):
            run()

    return several


def variants(
    names: list[str], layer: MoE, x_BSD: Tensor, grad_BSD: Tensor, products: Callable[[], None], rounds: int, flops: float
) -> dict[str, dict[str, Any]]:
    """Each by turns with the products, both per pass."""
    plain, found = gradients(layer, x_BSD, grad_BSD), {}

    def made(name: str) -> tuple[Callable[[], Any], Callable[[], Any], int]:
        if name == "row":
            return in_a_row(plain), in_a_row(products), 5
        if name == "graph":
            return graphed(plain), graphed(products), 1
        whole = gradients(torch.compile(layer, dynamic=False), x_BSD, grad_BSD)  # type: ignore[arg-type]
        whole()
        return (graphed(whole), graphed(products), 1) if name == "compiled_graph" else (whole, products, 1)

    for name in names:
        try:
            run, alone, passes = made(name)
            times = by_turns({"layer": run, "products": alone}, rounds)
        except Exception as error:  # Whatever a variant dies of, the others are measured.
            found[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            continue
        middle = {key: statistics.median(each) / passes for key, each in times.items()}
        found[name] = {
            "layer_ms": middle["layer"],
            "products_ms": middle["products"],
            "layer_tflops_per_s": flops / middle["layer"] / 1e9,
            "ratio": middle["products"] / middle["layer"],
            "raw_ms": times,
        }
    return found


def host_milliseconds(run: Callable[[], Any], rounds: int) -> float:
    """Until a pass is queued, with a queue that is empty before."""
    taken = []
    for _ in range(rounds):
        if CUDA:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken)


def product_pass(layer: MoE, x_MD: Tensor, counts_E: Tensor) -> Callable[[], None]:
    """The nine products alone."""
    kernel: Any = GROUPED_LINEAR.choice.function
    product, gradient, groups = references.product, references.weight_gradient, counts_E
    if kernel is not None:  # Where groups end is counted once, and no part of the products.
        module: Any = sys.modules[kernel.__module__]
        product, gradient, groups = module._product, module._weight_gradient, module.ends_of(counts_E)
    w1, w3, w2 = (parameter.detach() for parameter in (layer.experts.w1, layer.experts.w3, layer.experts.w2))
    h_MF = product(x_MD, w1, groups)

    def run() -> None:
        product(x_MD, w1, groups), product(x_MD, w3, groups), product(h_MF, w2, groups)
        product(x_MD, w2.transpose(1, 2), groups), gradient(x_MD, h_MF, groups)
        for weight in (w1, w3):
            product(h_MF, weight.transpose(1, 2), groups), gradient(h_MF, x_MD, groups)

    return run


def pieces(layer: MoE, x_ND: Tensor, hidden: int, rounds: int) -> list[dict[str, Any]]:
    """Everything but the products, each alone, forward and with backward, and the least bytes that they move."""
    x_ND = x_ND.detach().requires_grad_()
    routed = layer.router(x_ND)
    order = sort_pairs(routed.experts_NK, layer.router.settings.experts)
    rows_MD = PERMUTE(x_ND, order.pairs_M, order.places_NK).detach().requires_grad_()
    weights_NK = routed.weights_NK.detach().requires_grad_()
    gate_MF, up_MF = (torch.randn(rows_MD.shape[0], hidden, device=x_ND.device, dtype=x_ND.dtype, requires_grad=True) for _ in range(2))
    tokens, rows, wide = x_ND.nbytes, rows_MD.nbytes, gate_MF.nbytes
    cases: dict[str, tuple[Callable[[], Tensor], list[Tensor], int, int]] = {
        "router_linear": (lambda: ROUTER_LINEAR(x_ND, layer.router.weight), [x_ND, layer.router.weight], tokens, 2 * tokens),
        "router": (lambda: layer.router(x_ND).weights_NK, [x_ND, layer.router.weight], tokens, 2 * tokens),
        "sort": (lambda: sort_pairs(routed.experts_NK, layer.router.settings.experts).places_NK, [], 0, 0),
        "permute": (lambda: PERMUTE(x_ND, order.pairs_M, order.places_NK), [x_ND], tokens + rows, rows + tokens),
        "swiglu": (lambda: ops.swiglu(gate_MF, up_MF), [gate_MF, up_MF], 3 * wide, 5 * wide),
        "combine": (
            lambda: COMBINE(rows_MD, weights_NK, order.pairs_M, order.places_NK),
            [rows_MD, weights_NK],
            rows + tokens,
            2 * rows + tokens,
        ),
    }
    found = []
    for name, (call, leaves, forward_bytes, backward_bytes) in cases.items():
        calls: dict[str, Callable[[], Any]] = {"forward": call}
        if leaves:
            grad = torch.randn_like(call())
            calls["both"] = lambda call=call, leaves=leaves, grad=grad: torch.autograd.grad(call(), leaves, grad)
        times = {key: statistics.median(each) for key, each in by_turns(calls, rounds).items()}
        total = times.get("both", times["forward"])
        moved = forward_bytes + (backward_bytes if leaves else 0)
        found.append(
            {"what": name, **{f"{key}_ms": value for key, value in times.items()}, "bytes": moved, "gb_per_s": moved / total / 1e6}
        )
    return found


def profile(run: Callable[[], None], passes: int) -> dict[str, Any]:
    """Time on the device by kernel for one pass, the longest first, all of them together, and the longest gaps between them."""
    if not CUDA:
        return {}
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as taken:
        for _ in range(passes):
            torch.cuda.synchronize()
            run()
        torch.cuda.synchronize()
    rows = [event for event in taken.key_averages() if event.self_device_time_total > 0 and str(event.device_type).endswith("CUDA")]
    rows.sort(key=lambda event: -event.self_device_time_total)
    kernels = [{"kernel": row.key[:120], "calls": row.count / passes, "ms": row.self_device_time_total / passes / 1e3} for row in rows]
    return {
        "kernels_ms": sum(row["ms"] for row in kernels),
        "launches": sum(row["calls"] for row in kernels),
        "kernels": kernels[:30],
        "gaps": gaps([event for event in taken.events() if str(event.device_type).endswith("CUDA")]),
    }


def gaps(events: list[Any]) -> list[dict[str, Any]]:
    """The twelve longest times without a kernel over all profiled passes, those between two passes among them."""
    events.sort(key=lambda event: event.time_range.start)
    found, end, last = [], None, ""
    for event in events:
        if end is not None and event.time_range.start > end:
            found.append({"ms": (event.time_range.start - end) / 1e3, "after": last[:80], "before": event.name[:80]})
        if end is None or event.time_range.end > end:
            end, last = event.time_range.end, event.name
    return sorted(found, key=lambda gap: -gap["ms"])[:12]


def measure(
    name: str, router: RouterConfig, sizes: dict[str, int], rounds: int, device: str, dtype: torch.dtype, further: list[str]
) -> dict[str, Any]:
    """One router's figures."""
    torch.manual_seed(0)
    layer = build(router, sizes["dim"], sizes["hidden"], dtype, device)
    x_BSD = torch.randn(sizes["rows"], sizes["tokens"] // sizes["rows"], sizes["dim"], device=device, dtype=dtype, requires_grad=True)
    grad_BSD = torch.randn_like(x_BSD)
    with torch.no_grad():
        order = sort_pairs(layer.router(x_BSD.flatten(0, 1)).experts_NK, sizes["experts"])
        rows_MD = PERMUTE(x_BSD.flatten(0, 1), order.pairs_M, order.places_NK)
        products = product_pass(layer, rows_MD, order.counts_E)
    run = layer_pass(layer, x_BSD, grad_BSD)
    with torch.no_grad():
        products()
    run()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        run()
    peak = torch.cuda.max_memory_allocated() if CUDA else None

    @torch.no_grad()
    def alone() -> None:
        products()

    times = by_turns({"layer": run, "products": alone}, rounds)
    middle = {key: statistics.median(each) for key, each in times.items()}
    flops = 3 * 2 * 3 * sizes["tokens"] * sizes["top_k"] * sizes["dim"] * sizes["hidden"]
    return {
        "router": name,
        "load": {"least": int(order.counts_E.min()), "most": int(order.counts_E.max())},
        "layer_ms": middle["layer"],
        "products_ms": middle["products"],
        "layer_tflops_per_s": flops / middle["layer"] / 1e9,
        "products_tflops_per_s": flops / middle["products"] / 1e9,
        "ratio": middle["products"] / middle["layer"],
        "peak_bytes": peak,
        "raw_ms": times,
        "host_ms": host_milliseconds(run, rounds),
        "variants": variants(further, layer, x_BSD, grad_BSD, alone, rounds, flops),
        "pieces": pieces(layer, x_BSD.flatten(0, 1), sizes["hidden"], max(3, rounds // 2)),
        **profile(run, 5),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debug-sizes", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--router", action="append", choices=["softmax", "group_limited", "forced_balanced"], help="only this one (may be repeated)"
    )
    parser.add_argument(
        "--variant",
        action="append",
        choices=["none", *FURTHER],
        help="only this one beside the layer as written (may be repeated); default: all",
    )
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="OP=NAME",
        help="another kernel than the automatic one, say grouped_linear=reference",
    )
    parser.add_argument("--out", help="write the JSON there as well")
    arguments = parser.parse_args()
    sizes = {"dim": 2048, "hidden": 1408, "experts": 64, "top_k": 6, "tokens": 16384, "rows": 4}
    if arguments.debug_sizes:
        sizes = {"dim": 64, "hidden": 32, "experts": 16, "top_k": 2, "tokens": 256, "rows": 4}
    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    name = str(dtype).removeprefix("torch.")
    chosen = dict(pair.split("=", 1) for pair in arguments.kernel)
    selection = ops.select(chosen, plugins.current(), capabilities(), name)
    ops.install(selection)
    result: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
        "device": describe(torch.device(device)),
        "dtype": name,
        "sizes": sizes,
        "kernels": selection.facts(),
        "results": [],
    }
    further = [each for each in arguments.variant or FURTHER if each != "none"]
    for router_name, router in routers(sizes["experts"], sizes["top_k"]).items():
        if arguments.router and router_name not in arguments.router:
            continue
        result["results"].append(measure(router_name, router, sizes, arguments.rounds if CUDA else 3, device, dtype, further))
        if arguments.out:  # After each, so that a run that is cut off keeps what it has.
            Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
