"""Float8 linear layers on a GPU at the sizes of Llama 3 8B: errors, and microseconds of every part, as JSON. About a minute.

    PYTHONPATH=core:kernels python benchmarks/fp8_linear_gpu.py [--tokens 512 8192] [--sweep] [--out FILE]

`products`: one matrix product by implementation. `layers`: forward and backward of each linear layer, bfloat16 against `scaled_linear`. `memory`: kernels that only move bytes,
with GB/s. `block`: a compiled function with a block's seven linear layers, forward and backward. Everything is timed as a CUDA graph of many calls that go round so many
weights that none is left in the cache; medians of 20 replays. `--sweep` times all of the Triton kernel's configurations.
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
import torch.nn.functional as F
from intarsia.ops.scaled_reference import dequantise, quantise
from intarsia.ops.scaled_reference import scaled_linear as reference
from intarsia_kernels.fp8 import products, tiles
from intarsia_kernels.fp8.linear import scaled_linear
from torch import Tensor

TILE = (128, 128)
# Outputs, inputs, and how many of them a block has.
SHAPES = {"q and o": (4096, 4096, 2), "k and v": (1024, 4096, 2), "w1 and w3": (14336, 4096, 2), "w2": (4096, 14336, 1)}
COLD_BYTES = 256 * 2**20
DTYPE = torch.bfloat16


def microseconds(calls: list[Callable[[], Any]], replays: int = 20) -> float:
    """Median time of one call, from a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for number in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    return 1000 * statistics.median(times) / len(calls)


def relative(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def weights(outputs: int, inputs: int) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """So many bfloat16 weights that they do not fit the cache, and the same in float8."""
    count = max(2, -(-COLD_BYTES // (outputs * inputs)))
    wide = [torch.randn(outputs, inputs, device="cuda", dtype=DTYPE) * 0.02 for _ in range(count)]
    return wide, [quantise(weight, TILE) for weight in wide]


def time_products(tokens: int, outputs: int, inputs: int, sweep: bool) -> dict[str, Any]:
    """y = x W^T and dx = dy W by every implementation; errors against the product of the very numbers that float8 stands for."""
    wide, narrow = weights(outputs, inputs)
    x, grad = torch.randn(tokens, inputs, device="cuda", dtype=DTYPE), torch.randn(tokens, outputs, device="cuda", dtype=DTYPE)
    found: dict[str, Any] = {
        "forward bf16": microseconds([lambda w=w: F.linear(x, w) for w in wide]),
        "input gradient bf16": microseconds([lambda w=w: grad @ w for w in wide]),
        "weight gradient bf16": microseconds([lambda: grad.t() @ x] * 4),
    }
    (x8, x_scales), (grad8, grad_scales) = tiles.quantise_rows(x), tiles.quantise_rows(grad)
    found["quantise x"] = microseconds([lambda: tiles.quantise_rows(x)] * 8)
    found["transpose"] = microseconds([lambda q=q: tiles.transpose(q) for q, _ in narrow])
    found["transpose by torch"] = microseconds([lambda q=q: q.view(torch.uint8).t().contiguous() for q, _ in narrow])
    turned = [(tiles.transpose(q), s.t().contiguous()) for q, s in narrow]
    exact_x, exact_grad = dequantise(x8, x_scales.t(), (1, 128), torch.float32), dequantise(grad8, grad_scales.t(), (1, 128), torch.float32)
    exact_w = dequantise(*narrow[0], TILE, torch.float32)
    exact = exact_x @ exact_w.t(), exact_grad @ exact_w

    def both(name: str, run: Callable[..., Tensor]) -> None:
        for what, (a, s), ws, wanted in (
            ("forward", (x8, x_scales), narrow, exact[0]),
            ("input gradient", (grad8, grad_scales), turned, exact[1]),
        ):
            try:
                error = relative(run(a, s, *ws[0], DTYPE, tokens), wanted)
                found[f"{what} {name}"] = microseconds([lambda w=w, t=t, a=a, s=s: run(a, s, w, t, DTYPE, tokens) for w, t in ws])
                found[f"{what} {name}, error"] = error
            except Exception as problem:
                found[f"{what} {name}"] = f"{type(problem).__name__}: {str(problem)[:160]}"

    if products.has_torch_product(x.device):
        both("torch", products.torch_product)
    for config in products.CONFIGS if sweep else products.CONFIGS[:1] + products.CONFIGS[3:5]:
        both(f"triton {config}", lambda *arguments, config=config: products.triton_product(*arguments, config))
    config = products.CONFIGS[0]
    try:
        run = [
            lambda q=q, s=s: products.triton_product(grad8, grad_scales, q, s.t().contiguous(), DTYPE, tokens, config, is_transposed=True)
            for q, s in narrow
        ]
        found["input gradient triton, W read transposed, error"] = relative(run[0](), exact[1])
        found["input gradient triton, W read transposed"] = microseconds(run)
    except Exception as problem:
        found["input gradient triton, W read transposed"] = f"{type(problem).__name__}: {str(problem)[:160]}"
    out = torch.empty_like(wide[0])
    found["dequantise"] = microseconds([lambda q=q, s=s: tiles.dequantise_tiles(q, s, TILE, out) for q, s in narrow])
    return found


def time_layers(tokens: int, outputs: int, inputs: int) -> dict[str, Any]:
    """Forward and backward of one linear layer; errors against the reference of the operator."""
    wide, narrow = weights(outputs, inputs)
    x = torch.randn(tokens, inputs, device="cuda", dtype=DTYPE, requires_grad=True)
    grad = torch.randn(tokens, outputs, device="cuda", dtype=DTYPE)
    handle = torch.zeros((), device="cuda", dtype=DTYPE).expand(outputs, inputs).detach().requires_grad_()

    def float8(function: Callable[..., Tensor], q: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = function(x, handle, q, s)
        return y, *torch.autograd.grad(y, (x, handle), grad)

    def plain(w: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, w)
        return y, *torch.autograd.grad(y, (x, w), grad)

    wide = [w.requires_grad_() for w in wide]
    errors = map(relative, float8(scaled_linear, *narrow[0]), float8(reference, *narrow[0]))
    against = map(relative, float8(scaled_linear, *narrow[0]), plain(wide[0]))
    return {
        "bf16": microseconds([lambda w=w: plain(w) for w in wide]),
        "float8": microseconds([lambda q=q, s=s: float8(scaled_linear, q, s) for q, s in narrow]),
        "error": dict(zip(("output", "input gradient", "weight gradient"), errors, strict=True)),
        "error against bf16": dict(zip(("output", "input gradient", "weight gradient"), against, strict=True)),
    }


def time_memory() -> dict[str, Any]:
    """Quantising half of a block's matrices as one rank does, and the largest matrix in float8 back to bfloat16. Bits against the reference."""
    found: dict[str, Any] = {}
    boxes, values_at, bytes_at, scales_at = [], 0, 0, 0
    shapes = [(outputs // 2, inputs) for outputs, inputs, count in SHAPES.values() for _ in range(count)]
    data = sum(outputs * inputs for outputs, inputs in shapes)
    for outputs, inputs in shapes:
        boxes.append((values_at, bytes_at, data // 4 + scales_at, outputs, inputs))
        values_at, bytes_at, scales_at = values_at + outputs * inputs, bytes_at + outputs * inputs, scales_at + outputs * inputs // 128**2
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(data, device="cuda", dtype=dtype)
        wire = torch.empty(data + 4 * scales_at, device="cuda", dtype=torch.uint8)
        for power_of_two in (False, True):
            tiles.quantise_tiles(values, wire, tuple(boxes), TILE, power_of_two, DTYPE)
            payload, scales = quantise(values[: shapes[0][0] * shapes[0][1]].view(shapes[0]).to(DTYPE), TILE, power_of_two)
            same = torch.equal(wire[: payload.numel()].view(payload.shape), payload.view(torch.uint8))
            same &= torch.equal(wire[data : data + 4 * scales.numel()].view(torch.float32).view(scales.shape), scales)
            found[f"bits from {dtype}{', powers of two' if power_of_two else ''}"] = same
        took = microseconds([lambda v=values, w=wire: tiles.quantise_tiles(v, w, tuple(boxes), TILE, False, DTYPE)] * 4)
        found[f"quantise {data} from {dtype}"] = {"us": took, "GB/s": data * (dtype.itemsize + 1) / took / 1e3}
    return found


def time_block(tokens: int) -> dict[str, Any]:
    """Seven linear layers as a block has them, compiled: bfloat16 against float8. The activation that several layers read is quantised once."""
    sizes = [SHAPES[name][:2] for name in ("q and o", "k and v", "k and v", "q and o", "w1 and w3", "w1 and w3", "w2")]
    wide = [(torch.randn(size, device="cuda", dtype=DTYPE) * 0.02).requires_grad_() for size in sizes]
    narrow = [quantise(weight.detach(), TILE) for weight in wide]
    handles = [torch.zeros((), device="cuda", dtype=DTYPE).expand(size).detach().requires_grad_() for size in sizes]
    x = torch.randn(tokens, 4096, device="cuda", dtype=DTYPE, requires_grad=True)
    grad = torch.randn_like(x)

    def block(x: Tensor, layers: list[Callable[[Tensor], Tensor]]) -> Tensor:
        q, k, v = (layer(x) for layer in layers[:3])
        h = x + layers[3](q * F.silu(torch.cat((k, v) * 2, -1)))
        return h + layers[6](F.silu(layers[4](h)) * layers[5](h))

    def plain(x: Tensor, wide: list[Tensor]) -> Tensor:
        return block(x, [lambda x, w=w: F.linear(x, w) for w in wide])

    def float8(x: Tensor, handles: list[Tensor], narrow: list[tuple[Tensor, Tensor]]) -> Tensor:
        return block(x, [lambda x, h=h, q=q, s=s: scaled_linear(x, h, q, s) for h, (q, s) in zip(handles, narrow, strict=True)])

    found: dict[str, Any] = {}
    for name, function, leaves, others in (("bf16", plain, wide, ()), ("float8", float8, handles, (narrow,))):
        compiled = torch.compile(function, fullgraph=True)

        def run(compiled: Any = compiled, leaves: Any = leaves, others: Any = others) -> Any:
            return torch.autograd.grad(compiled(x, leaves, *others), [x, *leaves], grad)

        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
        torch.cuda.synchronize()
        kernels = {event.key[:60]: [event.count, event.self_device_time_total] for event in profile.key_averages()}
        found[name] = {"us": microseconds([run] * 2), "kernels": kernels}
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    begin = time.monotonic()
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "has torch product": products.has_torch_product(torch.device("cuda", torch.cuda.current_device())),
    }
    parts: dict[str, Callable[[], Any]] = {"memory": time_memory}
    for tokens in arguments.tokens:
        for name, (outputs, inputs, _) in SHAPES.items():
            parts[f"products, {tokens} tokens, {name}"] = lambda t=tokens, o=outputs, i=inputs: time_products(t, o, i, arguments.sweep)
            parts[f"layers, {tokens} tokens, {name}"] = lambda t=tokens, o=outputs, i=inputs: time_layers(t, o, i)
        parts[f"block, {tokens} tokens"] = lambda t=tokens: time_block(t)
    for name, part in parts.items():
        try:
            facts[name] = part()
        except Exception as problem:
            facts[name] = f"{type(problem).__name__}: {str(problem)[:400]}"
        torch.cuda.empty_cache()
        print(f"{time.monotonic() - begin:6.1f} s  {name}: {json.dumps(facts[name])}", flush=True)
    facts["seconds"] = time.monotonic() - begin
    if arguments.out:
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
