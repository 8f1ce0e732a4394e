"""Float8 linear layers on a GPU at the sizes of Llama 3 8B: errors, and microseconds of every part, as JSON. About a minute.

    PYTHONPATH=core:kernels python benchmarks/fp8_linear_gpu.py [--tokens 512 8192 ...] [--sweep] [--out FILE]

`memory`: kernels that only move bytes, with GB/s. `update`: AdamW of split masters, with quantising apart and in one kernel. `block`: a compiled function with a block's seven linear
layers, forward and backward. `products`: one matrix product by implementation. `layers`: forward and backward of each linear layer, bfloat16 against `scaled_linear`. Everything is
timed as a CUDA graph of many calls that go round so many weights that none is left in the cache; medians of 20 replays. `--sweep` times all of the Triton kernels' configurations.
The file is written after each part; one that fails leaves the others alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from intarsia_float8.format import dequantise, quantise
from intarsia_kernels.fp8 import products, tiles
from intarsia_kernels.fp8.linear import scaled_linear
from intarsia_kernels.optimizer import quantised_adamw
from intarsia_kernels.optimizer.adamw import fused_adamw
from intarsia_models_common.scaled_linear import reference
from torch import Tensor

TILE = (128, 128)
# Outputs, inputs, and how many of them a block has.
SHAPES = {"q and o": (4096, 4096, 2), "k and v": (1024, 4096, 2), "w1 and w3": (14336, 4096, 2), "w2": (4096, 14336, 1)}
COLD_BYTES = 256 * 2**20
DTYPE = torch.bfloat16


# Numbers from a generator that no graph knows: where a capture fails, the default one is of no use any more.
RANDOM: dict[str, torch.Generator] = {}


def randn(*size: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Normal numbers on the device."""
    if "cuda" not in RANDOM:
        RANDOM["cuda"] = torch.Generator("cuda").manual_seed(0)
    return torch.randn(*size, device="cuda", dtype=dtype, generator=RANDOM["cuda"])


def microseconds(calls: list[Callable[[], Any]], replays: int = 20) -> float:
    """Median time of one call, from a graph of all of them, captured on the current stream: leaves belong to the stream that first uses them."""
    calls[0]()
    calls[-1]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
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
    wide = [randn(outputs, inputs) * 0.02 for _ in range(count)]
    return wide, [quantise(weight, TILE) for weight in wide]


def time_products(tokens: int, outputs: int, inputs: int, sweep: bool) -> dict[str, Any]:
    """y = x W^T and dx = dy W by every implementation; errors against the product of the very numbers that float8 stands for."""
    wide, narrow = weights(outputs, inputs)
    x, grad = randn(tokens, inputs), randn(tokens, outputs)
    found: dict[str, Any] = {
        "forward bf16": microseconds([lambda w=w: F.linear(x, w) for w in wide]),
        "input gradient bf16": microseconds([lambda w=w: grad @ w for w in wide]),
        "weight gradient bf16": microseconds([lambda: grad.t() @ x] * 4),
    }
    (x8, x_scales), (grad8, grad_scales) = tiles.quantise_rows(x), tiles.quantise_rows(grad)
    found["quantise x"] = microseconds([lambda: tiles.quantise_rows(x)] * 8)
    found["transpose"] = microseconds([lambda q=q, s=s: tiles.transpose(q, s) for q, s in narrow])
    found["transpose by torch"] = microseconds([lambda q=q: q.view(torch.uint8).t().contiguous() for q, _ in narrow])
    turned = [tiles.transpose(q, s) for q, s in narrow]
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
    out = torch.empty_like(wide[0])
    found["dequantise"] = microseconds([lambda q=q, s=s: tiles.dequantise_tiles(q, s, TILE, out) for q, s in narrow])
    return found


def time_layers(tokens: int, outputs: int, inputs: int) -> dict[str, Any]:
    """Forward and backward of one linear layer; errors against the reference of the operator."""
    wide, narrow = weights(outputs, inputs)
    x, grad = randn(tokens, inputs).requires_grad_(), randn(tokens, outputs)
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


def half_a_block() -> tuple[tuple[tuple[int, int, int, int, int], ...], int, int, tuple[int, int]]:
    """What one of two ranks quantises of a block: boxes, elements, bytes on the wire, and the first box's shape."""
    boxes, values_at, scales_at = [], 0, 0
    shapes = [(outputs // 2, inputs) for outputs, inputs, count in SHAPES.values() for _ in range(count)]
    data = sum(outputs * inputs for outputs, inputs in shapes)
    for outputs, inputs in shapes:
        boxes.append((values_at, values_at, data // 4 + scales_at, outputs, inputs))
        values_at, scales_at = values_at + outputs * inputs, scales_at + outputs * inputs // 128**2
    return tuple(boxes), data, data + 4 * scales_at, shapes[0]


def time_memory() -> dict[str, Any]:
    """Quantising half of a block's matrices as one rank does. Bits against the reference."""
    found: dict[str, Any] = {}
    boxes, data, size, shape = half_a_block()
    for dtype in (torch.bfloat16, torch.float32):
        values, wire = randn(data, dtype=dtype), torch.empty(size, device="cuda", dtype=torch.uint8)
        for power_of_two in (False, True):
            tiles.quantise_tiles(values, wire, boxes, TILE, power_of_two, DTYPE)
            payload, scales = quantise(values[: shape[0] * shape[1]].view(shape).to(DTYPE), TILE, power_of_two)
            same = torch.equal(wire[: payload.numel()].view(payload.shape), payload.view(torch.uint8))
            same &= torch.equal(wire[data : data + 4 * scales.numel()].view(torch.float32).view(scales.shape), scales)
            found[f"bits from {dtype}{', powers of two' if power_of_two else ''}"] = same
        chosen = tiles.WARPS
        for warps in (4, 8, 16):
            tiles.WARPS = warps
            took = microseconds([lambda v=values, w=wire: tiles.quantise_tiles(v, w, boxes, TILE, False, DTYPE)] * 4)
            found[f"quantise {data} from {dtype}, {warps} warps"] = {"us": took, "GB/s": data * (dtype.itemsize + 1) / took / 1e3}
        tiles.WARPS = chosen
    return found


def time_update() -> dict[str, Any]:
    """AdamW of the same half, split masters: alone, with quantising behind it, and in one kernel, whose wire must have the same bits."""
    boxes, data, size, _ = half_a_block()
    wires = [torch.zeros(size, device="cuda", dtype=torch.uint8) for _ in range(2)]
    high, low = randn(data), torch.zeros(data, device="cuda", dtype=torch.int16)
    mean, square, gradient = (randn(data, dtype=torch.float32) for _ in range(3))
    square.square_()
    step = torch.ones((), device="cuda")
    given = (low, mean, square, gradient, step, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    copies = [tensor.clone() for tensor in (high, low, mean, square)]
    fused_adamw(high, *given)
    tiles.quantise_tiles(high, wires[0], boxes, TILE, False, DTYPE)
    one = [tensor.clone() for tensor in (high, low, mean, square)]
    for tensor, copy in zip((high, low, mean, square), copies, strict=True):
        tensor.copy_(copy)
    quantised_adamw.adamw_quantised(high, *given, wires[1], boxes, TILE, False, DTYPE)
    found: dict[str, Any] = {
        "equal masters and state": [torch.equal(a, b) for a, b in zip((high, low, mean, square), one, strict=True)],
        "the wire is what quantising the new values gives": False,
        "largest difference of high halves": float((high.float() - one[0].float()).abs().max()),
    }
    tiles.quantise_tiles(high, wires[0], boxes, TILE, False, DTYPE)
    found["the wire is what quantising the new values gives"] = torch.equal(*wires)
    del copies, one
    took = {
        "AdamW": microseconds([lambda: fused_adamw(high, *given)] * 4),
        "quantise": microseconds([lambda: tiles.quantise_tiles(high, wires[0], boxes, TILE, False, DTYPE)] * 4),
    }
    chosen = quantised_adamw.BLOCK, quantised_adamw.STAGES
    for block, stages in ((2048, 1), (4096, 1), (1024, 2), (1024, 3), (1024, 4), (2048, 2), (2048, 3)):
        quantised_adamw.BLOCK, quantised_adamw.STAGES = block, stages
        run = functools.partial(quantised_adamw.adamw_quantised, high, *given, wires[1], boxes, TILE, False, DTYPE)
        took[f"AdamW that quantises, {block} at a time, {stages} stages"] = microseconds([run] * 4)
    quantised_adamw.BLOCK, quantised_adamw.STAGES = chosen
    least = min(value for name, value in took.items() if "quantises" in name)
    return {
        **found,
        "us": took,
        "AdamW GB/s": data * 28 / took["AdamW"] / 1e3,
        "with quantising GB/s": data * 29 / least / 1e3,
    }


def time_block(tokens: int) -> dict[str, Any]:
    """Seven linear layers as a block has them, compiled: bfloat16 against float8. The activation that several layers read is quantised once."""
    sizes = [SHAPES[name][:2] for name in ("q and o", "k and v", "k and v", "q and o", "w1 and w3", "w1 and w3", "w2")]
    wide = [(randn(*size) * 0.02).requires_grad_() for size in sizes]
    narrow = [quantise(weight.detach(), TILE) for weight in wide]
    handles = [torch.zeros((), device="cuda", dtype=DTYPE).expand(size).detach().requires_grad_() for size in sizes]
    x, grad = randn(tokens, 4096).requires_grad_(), randn(tokens, 4096)

    def block(x: Tensor, layers: list[Callable[[Tensor], Tensor]]) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:])
        q, k, v = (layer(normed) for layer in layers[:3])
        h = x + layers[3](q * F.silu(torch.cat((k, v) * 2, -1)))
        normed = F.rms_norm(h, h.shape[-1:])
        return h + layers[6](F.silu(layers[4](normed)) * layers[5](normed))

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
        kernels = dict(sorted(kernels.items(), key=lambda item: -item[1][1])[:24])
        found[name] = {"us": microseconds([run] * 2), "kernels": kernels}
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.", file=sys.stderr)
        return 1
    begin = time.monotonic()
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "has torch product": products.has_torch_product(torch.device("cuda", torch.cuda.current_device())),
    }
    parts: dict[str, Callable[[], Any]] = {"memory": time_memory, "update": time_update}
    for tokens in arguments.tokens:
        for name, (outputs, inputs, _) in SHAPES.items():
            parts[f"products, {tokens} tokens, {name}"] = lambda t=tokens, o=outputs, i=inputs: time_products(t, o, i, arguments.sweep)
            parts[f"layers, {tokens} tokens, {name}"] = lambda t=tokens, o=outputs, i=inputs: time_layers(t, o, i)
            parts.setdefault(f"block, {tokens} tokens", lambda t=tokens: time_block(t))
    for name, part in parts.items():
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                facts[name] = part()
            except Exception as problem:
                facts[name] = f"{type(problem).__name__}: {str(problem)[:400]}"
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        print(f"{time.monotonic() - begin:6.1f} s  {name}: {json.dumps(facts[name])}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    facts["seconds"] = time.monotonic() - begin
    if arguments.out:
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
