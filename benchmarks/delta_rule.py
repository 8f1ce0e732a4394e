"""The gated delta rule on a GPU, forward and backward, against flash-linear-attention, Attention Gym (where they are installed) and the torch reference, in one run. Writes one JSON.

    python benchmarks/delta_rule.py OUT.json                    16 heads of 128, 65,536 tokens packed from 8 documents, bfloat16
    python benchmarks/delta_rule.py OUT.json --uneven           documents of 1,024 to 24,576 tokens
    python benchmarks/delta_rule.py OUT.json --tune             other cuts of each kernel as well, each compiled first
    python benchmarks/delta_rule.py OUT.json --debug-sizes      does it run? (without a GPU: the reference alone; with TRITON_INTERPRET=1 the kernels too)

Queries and keys are normalised inside. Times are medians of CUDA events, all implementations by turns; `ratio` is the opponent's time over ours. `errors` are ||x - x64|| / ||x64|| of outputs and
gradients against the reference in float64, from the same rounded inputs. flash-linear-attention refuses its backward pass where Triton 3.4.0 to 3.7.0 compiles it for Hopper, as
that makes some of its gradients wrong: it is measured all the same (`overridden` says so), and `errors` say which are. `pieces` are the launches, each by itself, with the bytes that it must move at least. `short_conv`: 6,144 channels, 4 taps.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from intarsia_kernels.delta_rule import peers
from intarsia_models_common.linear_attention.delta_rule import gated_delta_rule as reference
from intarsia_models_common.linear_attention.short_conv import short_conv as conv_reference
from timing import CUDA, by_turns
from torch import Tensor

DEVICE = "cuda" if CUDA else "cpu"
EVEN = (8192,) * 8
UNEVEN = (24576, 1024, 12288, 2048, 8192, 4096, 10240, 3072)
NAMES = ("q", "k", "v", "decay", "beta")

CUTS = {
    "prepare": [(128, 4, 1), (128, 4, 1, 1, 128)],
    "forward": [(64, 4, 2, 2), (128, 8, 2, 1), (128, 8, 3, 1)],
    "backward": [(64, 4, 2, 2), (128, 8, 2, 1), (128, 8, 3, 1), (64, 4, 3, 1)],
    "gradients": [(64, 8, 3), (64, 8, 2), (32, 8, 4), (32, 8, 3), (32, 8, 2)],
}
"""Columns, warps, stages, residents and registers to try, for keys and values of 128: those that compile for compute capability 9.0 with few spills or none."""


def facts() -> dict[str, Any]:
    """Versions, device and commit."""
    version: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    for name in ("triton", "fla", "attn_gym"):
        if importlib.util.find_spec(name):
            version[name] = getattr(importlib.import_module(name), "__version__", "installed")
    run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return {**version, "device": torch.cuda.get_device_name() if CUDA else "cpu", "commit": run.stdout.strip()}


def override_fla() -> str | None:
    """Let flash-linear-attention run where it refuses to. Why it had refused."""
    refused = peers.fla_refuses_here()
    if refused:
        importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]
    return refused


# ---------------------------------------------------------------- implementations


class Problem:
    """Inputs, documents, and every implementation of one problem as `(q, k, v, decay, beta) -> y`."""

    def __init__(self, lengths: tuple[int, ...], heads: int, width: int, dtype: torch.dtype) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        tokens = sum(lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, tokens, heads, *shape, generator=generator, device=DEVICE)

        self.scale = width**-0.5
        self.documents_BS = torch.cat([torch.full((n,), i, device=DEVICE) for i, n in enumerate(lengths)])[None]
        self.offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
        # Decays as of a trained layer: most near 1, some strong.
        decay, beta = -0.1 * torch.exp(normal()), normal().sigmoid()
        self.inputs = [*(normal(width).to(dtype) for _ in range(3)), decay, beta]
        self.gradient = normal(width).to(dtype)

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The inputs, asking for gradients."""
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.inputs]

    def packed(self, function: Callable[..., Any], leaves: list[Tensor]) -> Tensor:
        """By something with the operator's signature."""
        return function(*leaves, None, self.documents_BS, None, scale=self.scale, normalise=True)[0]

    def by_offsets(self, run: Callable[..., Any], leaves: list[Tensor]) -> Tensor:
        """By another package, which is given the documents' borders: ours find them."""
        return run(*leaves, None, self.offsets, scale=self.scale, normalise=True)[0]

    def implementations(self) -> dict[str, Callable[[list[Tensor]], Tensor]]:
        """All that run here, ours first."""
        found: dict[str, Callable[[list[Tensor]], Tensor]] = {}
        if CUDA or "TRITON_INTERPRET" in os.environ:
            from intarsia_kernels.delta_rule.rule import gated_delta_rule

            found["ours"] = functools.partial(self.packed, gated_delta_rule)
            found["ours, states again"] = functools.partial(self.packed, functools.partial(gated_delta_rule, recompute=True))
        for name, run in (("fla", peers.run_fla), ("attn_gym", peers.run_attn_gym)):
            if CUDA and importlib.util.find_spec(name):
                found[name] = functools.partial(self.by_offsets, run)
        found["reference"] = functools.partial(self.packed, reference)
        return found

    def all_of(self, run: Callable[[list[Tensor]], Tensor], leaves: list[Tensor]) -> dict[str, Tensor]:
        """Output and gradients by name."""
        y = run(leaves)
        gradients = torch.autograd.grad(y, leaves, self.gradient.to(y.dtype))
        return {"y": y.detach(), **{f"d{name}": x for name, x in zip(NAMES, gradients, strict=True)}}

    def errors(self, runs: dict[str, Callable[[list[Tensor]], Tensor]]) -> dict[str, dict[str, float]]:
        """Against float64."""
        exact = self.all_of(functools.partial(self.packed, reference), self.leaves(torch.float64))
        found = {}
        for name, run in runs.items():
            mine = self.all_of(run, self.leaves())
            found[name] = {what: float((mine[what].double() - x).norm() / x.norm()) for what, x in exact.items()}
            print(f"  {name:>20} " + "  ".join(f"{what} {error:.2e}" for what, error in found[name].items()), flush=True)
        return found

    def times(self, runs: dict[str, Callable[[list[Tensor]], Tensor]], rounds: int) -> dict[str, dict[str, Any]]:
        """Milliseconds of forward (nothing kept) and of forward with backward."""
        leaves, plain = self.leaves(), [x.detach() for x in self.inputs]
        both = by_turns({name: functools.partial(self.all_of, run, leaves) for name, run in runs.items()}, rounds)
        forward = by_turns({name: functools.partial(run, plain) for name, run in runs.items()}, rounds)
        found = {}
        for name in runs:
            found[name] = {
                "forward_ms": statistics.median(forward[name]),
                "both_ms": statistics.median(both[name]),
                "raw_ms": {"forward": forward[name], "both": both[name]},
            }
            print(f"  {name:>20} forward {found[name]['forward_ms']:.3f} ms, both {found[name]['both_ms']:.3f} ms", flush=True)
        return found


# ---------------------------------------------------------------- pieces


def pieces(problem: Problem) -> dict[str, tuple[Callable[[], Any], int]]:
    """Each launch of ours by itself, and the bytes that it must read and write."""
    from intarsia_kernels.delta_rule import rule

    q, k, v, decay, beta = problem.inputs
    prepared = rule.delta_rule_prepare(q, k, decay, beta, problem.documents_BS, None, problem.scale, True)
    solved, scores, factors, ordinals, borders, runs, count = prepared
    chunked = (solved, scores, factors, runs, count)
    y, _, states, new = rule.delta_rule_forward(q, k, v, None, None, *chunked, True, True)
    with_borders = (solved, scores, factors, borders, runs, count)
    dx, dv, dstates, _ = rule.delta_rule_backward(problem.gradient, None, q, k, None, *with_borders, False)
    last = (factors, ordinals, states, dstates, problem.scale, True)

    def size(*tensors: Tensor) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    return {
        "prepare": (
            lambda: rule.delta_rule_prepare(q, k, decay, beta, problem.documents_BS, None, problem.scale, True),
            size(q, k, solved, scores, factors),
        ),
        "forward": (
            lambda: rule.delta_rule_forward(q, k, v, None, None, *chunked, True, True),
            size(q, k, v, solved, scores, factors, y, states, new),
        ),
        "backward": (
            lambda: rule.delta_rule_backward(problem.gradient, None, q, k, None, *with_borders, False),
            size(problem.gradient, q, k, solved, scores, factors, dx, dv, dstates),
        ),
        "gradients": (
            lambda: rule.delta_rule_gradients(problem.gradient, dx, new, q, k, v, decay, None, *last),
            size(problem.gradient, dx, new, q, k, v, factors, states, dstates, q, k),
        ),
    }


def timed_pieces(problem: Problem, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and GB/s."""
    calls = pieces(problem)
    times = by_turns({name: call for name, (call, _) in calls.items()}, rounds)
    found = {}
    for name, (_, moved) in calls.items():
        taken = statistics.median(times[name])
        found[name] = {"ms": taken, "bytes": moved, "gb_per_s": moved / taken / 1e6}
        print(f"  {name:>20} {taken:.3f} ms, {found[name]['gb_per_s']:.0f} GB/s", flush=True)
    return found


def tuned(problem: Problem, width: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of each kernel by cut, or why one fails; the fastest are in force afterwards."""
    from intarsia_kernels.delta_rule import settings

    found: dict[str, dict[str, Any]] = {}
    chosen = settings.settings(problem.inputs[0].dtype, width)
    for kernel, cuts in CUTS.items():
        found[kernel], best = {}, None
        for cut in cuts:
            settings._measured[width] = dataclasses.replace(chosen, **{kernel: settings.Cut(*cut)})
            try:
                taken = statistics.median(by_turns({kernel: pieces(problem)[kernel][0]}, rounds)[kernel])
            except Exception as error:
                found[kernel][str(cut)] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            found[kernel][str(cut)] = taken
            print(f"  {kernel:>20} {cut!s:>16} {taken:.3f} ms", flush=True)
            best = min(best or (taken, cut), (taken, cut))
        if best:
            chosen = dataclasses.replace(chosen, **{kernel: settings.Cut(*best[1])})
    settings._measured[width] = chosen
    print("  fastest:", chosen, flush=True)
    return found


# ---------------------------------------------------------------- the convolution


def convolution(documents_BS: Tensor, channels: int, rounds: int) -> dict[str, dict[str, float]]:
    """Forward, and with backward, of the kernel and the reference; bytes are inputs and outputs once each."""
    x = torch.randn(1, documents_BS.shape[1], channels, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(channels, 4, device=DEVICE).requires_grad_()
    gradient = torch.randn_like(x)
    functions: dict[str, Callable[..., Any]] = {"reference": conv_reference}
    if CUDA or "TRITON_INTERPRET" in os.environ:
        from intarsia_kernels.delta_rule.short_conv import short_conv

        functions["ours"] = short_conv
    forward = {name: lambda f=f: f(x.detach(), weight.detach(), None, documents_BS) for name, f in functions.items()}
    both = {
        name: lambda f=f: torch.autograd.grad(f(x, weight, None, documents_BS)[0], (x, weight), gradient) for name, f in functions.items()
    }
    alone, whole, found = by_turns(forward, rounds), by_turns(both, rounds), {}
    for name in functions:
        one, two = statistics.median(alone[name]), statistics.median(whole[name])
        moved = x.numel() * x.element_size()
        found[name] = {"forward_ms": one, "both_ms": two, "forward_gb_per_s": 2 * moved / one / 1e6, "both_gb_per_s": 5 * moved / two / 1e6}
        print(f"  {name:>20} forward {one:.3f} ms, both {two:.3f} ms, {found[name]['both_gb_per_s']:.0f} GB/s", flush=True)
    return found


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--inverse", choices=("tf32", "tf32x3"), help="how chunks are inverted (default: as `settings` has it)")
    parser.add_argument("--debug-sizes", action="store_true")
    given = parser.parse_args()
    if not CUDA and not given.debug_sizes:
        print("This benchmark needs a CUDA device (or --debug-sizes).", file=sys.stderr)
        return 1
    lengths, heads, width, channels, rounds = UNEVEN if given.uneven else EVEN, 16, 128, 6144, 20
    if given.debug_sizes:
        lengths, heads, width, channels, rounds = (70, 26), 1, 64, 32, 1
    problem = Problem(lengths, heads, width, torch.bfloat16 if CUDA else torch.float32)
    found: dict[str, Any] = {
        **facts(),
        "documents": lengths,
        "heads": heads,
        "width": width,
        "overridden": override_fla() if CUDA else None,
    }
    runs = problem.implementations()
    if given.inverse:
        from intarsia_kernels.delta_rule import settings

        settings._measured[width] = dataclasses.replace(settings.settings(problem.inputs[0].dtype, width), inverse=given.inverse)
    if given.tune and "ours" in runs:
        found["tuned"] = tuned(problem, width, rounds)
    found["errors"] = problem.errors(runs)
    # The reference goes chunk by chunk from the host: a few rounds of it, apart.
    times = problem.times({name: run for name, run in runs.items() if name != "reference"}, rounds)
    times |= problem.times({"reference": runs["reference"]}, min(rounds, 3))
    found["times"] = times
    if "ours" in runs:
        found["ratio"] = {
            name: {what: each[f"{what}_ms"] / times["ours"][f"{what}_ms"] for what in ("forward", "both")}
            for name, each in times.items()
            if name != "ours"
        }
        for name, ratio in found["ratio"].items():
            print(f"  {name:>20} takes {ratio['forward']:.2f} times ours forward, {ratio['both']:.2f} with backward", flush=True)
        found["pieces"] = timed_pieces(problem, rounds)
    found["short_conv"] = convolution(problem.documents_BS, channels, rounds)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
