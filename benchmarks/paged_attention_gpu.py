"""Attention over paged caches on a GPU: kernels that read through tables, against entries that are gathered first, in one run. Writes one JSON.

    python benchmarks/paged_attention_gpu.py OUT.json                   heads of Llama 3 1B and 8B; 1, 8 and 64 requests of 512, 4,096 and 32,768 entries; prompts
    python benchmarks/paged_attention_gpu.py OUT.json --tune            other cuts of the programs as well
    python benchmarks/paged_attention_gpu.py OUT.json --debug-sizes     does it run? (without a GPU: the reference alone; with TRITON_INTERPRET=1 the kernels too)

bfloat16, blocks of 16 entries in disorder. A call is attention in one layer; layers have caches of their own, as many as fit into `ROOM` bytes up to 16, and are called in turn, so that a cache of the chip holds
what it would hold in a model. `times_ms` are all the measured times of one such turn, by CUDA events, implementations by turns; `graph_times_ms` the same where the turn is one CUDA graph, which leaves
the host out (for what can be captured). `ms` and `graph_ms` are medians over layers: of one call. `gigabytes_per_s` are the entries that are seen, read once, over `graph_ms`.
`error` is ||y - y64|| / ||y64|| against the reference in float64.

Implementations: `split` and `blocks` are the kernels; `gathered` is the operator's reference (a copy, then what `auto` chooses for attention); `gathered, invariant` the same with `attention/blocks`;
`sdpa` is torch's scaled_dot_product_attention of entries that lie gathered already, with a mask where lengths differ, whose copy is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from intarsia import ops, plugins
from intarsia.device import capabilities
from intarsia_generation.paged import Paged, paged, paged_attention
from timing import CUDA, by_turns, milliseconds
from torch import Tensor

DEVICE = "cuda" if CUDA else "cpu"
KERNELS = CUDA or "TRITON_INTERPRET" in os.environ
DTYPE = torch.bfloat16 if CUDA else torch.float32
ROOM = 24 << 30
HEADS = {"llama3 1b": (32, 8, 64), "llama3 8b": (32, 8, 128)}
SIZE = 16


@dataclasses.dataclass(frozen=True)
class Call:
    """Requests of `ends` entries, the last `counts` of which are new, with tables for `longest` entries."""

    label: str
    counts: Sequence[int]
    ends: Sequence[int]
    longest: int = 0


def calls(small: bool) -> Iterator[Call]:
    """Decoding of equal and of unequal requests, in tables as wide as needed and as wide as a CUDA graph's; prompts."""
    batches, contexts = ((1, 3), (40, 90)) if small else ((1, 8, 64), (512, 4096, 32768))
    for batch in batches:
        for context in contexts:
            yield Call(f"{batch} x {context}", (1,) * batch, (context,) * batch)
    longest = contexts[-1]
    batch = batches[-1]
    yield Call(f"{batch} x {contexts[0]}, tables for {longest}", (1,) * batch, (contexts[0],) * batch, longest)
    uneven = [contexts[0] + (longest - contexts[0]) * number * number // (batch * batch) // 2 for number in range(batch)]
    yield Call(f"{batch} x {uneven[0]} to {uneven[-1]}, tables for {longest}", (1,) * batch, uneven, longest)
    yield Call(f"{batch} - 1 x {contexts[0]} and one of {longest}", (1,) * batch, (contexts[0],) * (batch - 1) + (longest,))
    prompt = contexts[1]
    yield Call(f"a prompt of {prompt}", (prompt,), (prompt,))
    yield Call(f"4 prompts of {prompt // 4}", (prompt // 4,) * 4, (prompt // 4,) * 4)
    yield Call(f"{contexts[0] // 2} new tokens behind {longest}", (contexts[0] // 2,), (longest + contexts[0] // 2,))
    yield Call(f"8 x 4 new tokens behind {prompt}", (4,) * 8, (prompt + 4,) * 8)


class Layers:
    """The operands of one call, for several layers."""

    def __init__(self, call: Call, heads: int, kv_heads: int, dim: int) -> None:
        needed = [-(-end // SIZE) for end in call.ends]
        blocks = sum(needed) + 1
        order = (torch.randperm(blocks - 1) + 1).tolist()
        tables = [[order.pop() for _ in range(count)] for count in needed]
        positions = [end - count for end, count in zip(call.ends, call.counts, strict=True)]
        self.call, self.scale = call, dim**-0.5
        self.where = paged(tables, call.counts, positions, SIZE, device=DEVICE, width=-(-call.longest // SIZE))
        one = 2 * blocks * SIZE * kv_heads * dim * 2
        self.number = max(1, min(16, ROOM // one)) if CUDA else 1
        self.bytes = 2 * sum(call.ends) * kv_heads * dim * 2
        self.q = torch.randn(sum(call.counts), heads, dim, device=DEVICE).to(DTYPE)
        shape = (self.number, 2, blocks, SIZE, kv_heads, dim)
        self.caches = torch.empty(shape, device=DEVICE, dtype=DTYPE)
        for layer in self.caches:
            layer.normal_()

    def turn(self, function: Callable[..., Tensor], where: Paged) -> Tensor:
        """One call in every layer. The last one's result."""
        for keys, values in self.caches:
            y = function(self.q, keys, values, where, scale=self.scale)
        return y

    def gathered(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """For sdpa, of every layer: queries, keys and values [B, heads, tokens, D], and a mask where it takes one. Requests have equally many new tokens."""
        tables_RW, count = self.where.tables_RW, self.call.counts[0]
        width = -(-max(self.call.ends) // SIZE)
        ends_R = torch.tensor(self.call.ends, device=DEVICE)
        places = torch.arange(width * SIZE, device=DEVICE)
        last_RS = ends_R[:, None] - count + torch.arange(count, device=DEVICE)
        mask = places[None, None] <= last_RS[:, :, None]
        q = self.q.unflatten(0, (-1, count)).transpose(1, 2)
        found = []
        for pair in self.caches:
            k, v = (x[tables_RW[:, :width]].flatten(1, 2)[:, : max(self.call.ends)].transpose(1, 2).contiguous() for x in pair)
            whole = len(set(self.call.ends)) == 1 and count in (1, self.call.ends[0])
            found.append((q, k, v, None if whole else mask[:, None, :, : k.shape[2]]))
        return found


def by_sdpa(layers: list[tuple[Tensor, Tensor, Tensor, Tensor | None]], scale: float) -> None:
    """One call in every layer."""
    for q, k, v, mask in layers:
        causal = mask is None and q.shape[2] > 1
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)


@contextlib.contextmanager
def attention_by(kernel: str) -> Iterator[str]:
    """What is in force for `attention` inside: its name."""
    found = ops.select({"attention": kernel}, plugins.current(), capabilities(), "bfloat16" if CUDA else "float32")
    with ops.installed({"attention": found.choices["attention"]}):
        yield found.choices["attention"].kernel


def under(kernel: str, function: Callable[[], Any]) -> None:
    """The call with a kernel of attention in force."""
    with attention_by(kernel):
        function()


def graphed(function: Callable[[], Any]) -> Callable[[], None] | None:
    """The call as one CUDA graph; None where it cannot be captured."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def implementations(layers: Layers) -> dict[str, Callable[[], Any]]:
    """By name, one turn of each."""
    found: dict[str, Callable[[], Any]] = {}
    if KERNELS:
        from intarsia_kernels.paged import blocks, split

        found["split"] = functools.partial(layers.turn, split.paged_attention, layers.where)
        found["blocks"] = functools.partial(layers.turn, blocks.paged_attention, layers.where)
    reference = functools.partial(layers.turn, paged_attention.reference, layers.where)
    found["gathered"] = functools.partial(under, "auto", reference)
    if CUDA:
        found["gathered, invariant"] = functools.partial(under, "attention/blocks", reference)
    if len(set(layers.call.counts)) == 1 and 2 * layers.caches.numel() * 2 < 2 * ROOM:
        found["sdpa"] = functools.partial(by_sdpa, layers.gathered(), layers.scale)
    return found


def errors(layers: Layers) -> dict[str, float]:
    """Of the first layer's result."""
    if not KERNELS or sum(layers.call.ends) > 300_000:
        return {}
    from intarsia_kernels.paged import blocks, split

    keys, values = layers.caches[0]
    exact = paged_attention.reference(layers.q.double(), keys.double(), values.double(), layers.where, scale=layers.scale)
    found = {}
    for name, module in (("split", split), ("blocks", blocks)):
        y = module.paged_attention(layers.q, keys, values, layers.where, scale=layers.scale)
        found[name] = float((y.double() - exact).norm() / exact.norm())
    return found


def measure(layers: Layers, turns: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Times of all, by turns: as the host launches them, and as graphs."""
    found: dict[str, Any] = {}
    slow: dict[str, float] = {}
    for name, turn in turns.items():
        try:
            slow[name] = min(milliseconds(turn) for _ in range(2))
        except torch.OutOfMemoryError as error:  # what is gathered can be many times what there is
            found[name] = {"error": str(error).splitlines()[0]}
            torch.cuda.empty_cache()
    turns = {name: turns[name] for name in slow}
    # A call of hundreds of milliseconds needs no thirty rounds.
    rounds = max(3, min(rounds, int(2000 / max(1e-3, sum(slow.values())))))
    for name, times in by_turns(turns, rounds, warmup=1).items():
        found[name] = {"ms": statistics.median(times) / layers.number, "times_ms": times}
    if CUDA:
        graphs = {name: graph for name, turn in turns.items() if not name.startswith("gathered") and (graph := graphed(turn))}
        for name, times in by_turns(graphs, rounds, warmup=1).items():
            one = statistics.median(times) / layers.number
            found[name] |= {"graph_ms": one, "graph_times_ms": times, "gigabytes_per_s": layers.bytes / one / 1e6}
    return found


CUTS = {
    64: [(16, 64, 4, 3, 4), (16, 64, 4, 7, 3), (16, 64, 2, 5, 6), (16, 64, 1, 5, 6), (16, 128, 4, 5, 3), (16, 128, 4, 3, 4), (16, 32, 2, 7, 8), (16, 64, 4, 5, 8)],
    128: [(16, 64, 4, 3, 4), (16, 64, 2, 5, 3), (16, 32, 4, 5, 4), (16, 32, 2, 5, 6), (16, 32, 2, 7, 4), (16, 64, 8, 5, 3), (16, 128, 4, 3, 2), (16, 64, 4, 5, 6)],
}  # fmt: skip
PROMPTS = {
    64: [(128, 64, 8, 3, 2), (128, 64, 4, 5, 2), (128, 128, 8, 3, 1), (64, 64, 4, 3, 3), (64, 128, 4, 3, 2)],
    128: [(128, 64, 8, 5, 1), (128, 32, 8, 5, 1), (64, 64, 4, 3, 2), (128, 128, 8, 3, 1)],
}
"""Rows, keys, warps, stages and residents to try beside what the kernels take."""


def cut_turn(layers: Layers, cut: tuple[int, int, int, int, int] | None) -> None:
    """One turn of `split`, with its programs cut so (None: as they are)."""
    from intarsia_kernels.paged import split

    kept = split.decoding, split.prompting
    if cut is not None:
        split.decoding = split.prompting = lambda *_: split.Shape(*cut)
    try:
        layers.turn(split.paged_attention, layers.where)
    finally:
        split.decoding, split.prompting = kept


def tuned(heads: tuple[int, int, int], rounds: int, small: bool) -> list[dict[str, Any]]:
    """Times of `split` by cut of its programs."""
    rows = []
    decodes = [call for call in calls(small) if set(call.counts) == {1}]
    prompts = [call for call in calls(small) if set(call.counts) != {1}]
    for call, cuts in [*((each, CUTS[heads[2]]) for each in decodes), *((each, PROMPTS[heads[2]]) for each in prompts)]:
        layers = Layers(call, *heads)
        turns: dict[str, Callable[[], Any]] = {}
        for cut in (None, *cuts):
            turn = functools.partial(cut_turn, layers, cut)
            name = "as it is" if cut is None else "{} rows, {} keys, {} warps, {} stages, {} resident".format(*cut)
            try:
                turn()
            except Exception as error:  # more shared memory than there is
                rows.append({"call": call.label, "cut": name, "refused": str(error).splitlines()[0]})
                continue
            turns[name] = turn
        for name, found in measure(layers, turns, rounds).items():
            rows.append({"call": call.label, "cut": name, **found})
        del layers
    return rows


def facts() -> dict[str, Any]:
    """Versions, device and commit."""
    version: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    if KERNELS:
        import triton

        version["triton"] = triton.__version__
    run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return {**version, "device": torch.cuda.get_device_name() if CUDA else "cpu", "commit": run.stdout.strip()}


def main() -> int:
    """Measure, write, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--debug-sizes", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"facts": facts(), "rows": [], "tuned": {}}
    with attention_by("auto") as chosen:
        result["attention in force"] = chosen
    for model, heads in (HEADS | ({"debug": (4, 2, 16)} if options.debug_sizes else {})).items():
        if options.debug_sizes != (model == "debug"):
            continue
        for call in calls(options.debug_sizes):
            layers = Layers(call, *heads)
            found = measure(layers, implementations(layers), options.rounds)
            row = {"model": model, "call": call.label, "layers": layers.number, "bytes": layers.bytes, "error": errors(layers), **found}
            result["rows"].append(row)
            shown = {name: round(1e3 * each.get("graph_ms", each["ms"]), 1) for name, each in found.items() if "ms" in each}
            print(f"{model:10s} {call.label:44s} us a layer: {shown}", flush=True)
            options.out.write_text(json.dumps(result, indent=1))
            del layers
        if options.tune and KERNELS and heads[2] in CUTS:
            result["tuned"][model] = tuned(heads, options.rounds, options.debug_sizes)
            for row in result["tuned"][model]:
                print(f"{model:10s} {row['call']:44s} {row['cut']:56s} {row.get('graph_ms', row.get('refused'))}", flush=True)
    options.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
