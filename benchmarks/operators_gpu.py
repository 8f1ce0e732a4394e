"""Attention and cross-entropy kernels on a GPU at Llama 3 1B's sizes: milliseconds of forward and of forward with backward, as JSON.

    python benchmarks/operators_gpu.py

Random bfloat16 inputs; medians by CUDA events after warm-up. `error` is the largest ||y - y0|| / ||y0|| of output and gradients against the first row
of its group. Attention: 2 rows of 8192 tokens, 32 heads and 8 key/value heads of 64, whole or packed. Cross-entropy: 16384 tokens, 128256 words.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from intarsia.ops import Packing, operators
from intarsia_kernels.attention import flex, sdpa, varlen
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROWS, TOKENS, HEADS, KV_HEADS, DIM = 2, 8192, 32, 8, 64
LENGTHS = ((5000, 3192), (1200, 800, 6000, 192))


def milliseconds(call: Callable[[], Any], repeat: int = 30, warmup: int = 5) -> float:
    """Median of one call on the device."""
    times = []
    for number in range(warmup + repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if number >= warmup:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def compare(rows: dict[str, Callable[[], Tensor]], leaves: list[Tensor], gradient: Tensor, forward_flops: float) -> list[dict[str, Any]]:
    """One row of figures for each implementation; backward counts two and a half forwards, as flash attention computes it."""
    first: list[Tensor] | None = None
    found = []
    for name, forward in rows.items():
        results = [y.detach().float() for y in (forward(), *torch.autograd.grad(forward(), leaves, gradient))]
        first = first or results
        error = max(float((y - y0).norm() / y0.norm()) for y, y0 in zip(results, first, strict=True))
        alone = milliseconds(forward)
        both = milliseconds(lambda forward=forward: torch.autograd.grad(forward(), leaves, gradient))  # type: ignore[misc]
        rate = 3.5 * forward_flops / both / 1e9
        found.append({"what": name, "forward_ms": alone, "both_ms": both, "both_tflops_per_s": rate, "error": error})
    return found


def attention() -> dict[str, Any]:
    """Whole rows, then packed ones."""
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM))
    q, k, v = (torch.randn(ROWS, TOKENS, *shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    gradient, scale = torch.randn_like(q), DIM**-0.5

    def by(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
            return y.transpose(1, 2)

        return run

    whole: dict[str, Callable[[], Tensor]] = {
        "torch sdpa, flash": by(SDPBackend.FLASH_ATTENTION),
        "torch sdpa, cuDNN": by(SDPBackend.CUDNN_ATTENTION),
        **{f"kernel {m.__name__.rpartition('.')[2]}": functools.partial(m.attention, q, k, v, scale=scale) for m in (sdpa, varlen, flex)},
    }
    documents = torch.stack([torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(row)]) for row in LENGTHS]).cuda()
    packing = Packing(LENGTHS)
    for module in (varlen, flex):
        module.prepare(packing, windows=(None,), documents_BS=documents)
    named: dict[str, Any] = {"scale": scale, "documents_q_BS": documents, "documents_k_BT": documents, "packing": packing}
    packed: dict[str, Callable[[], Tensor]] = {
        f"kernel {m.__name__.rpartition('.')[2]}": functools.partial(m.attention, q, k, v, **named) for m in (varlen, flex, sdpa)
    }
    pairs = 2.0 * HEADS * DIM
    return {
        "whole rows": compare(whole, [q, k, v], gradient, pairs * ROWS * TOKENS**2),
        f"packed {LENGTHS}": compare(packed, [q, k, v], gradient, pairs * sum(n * n for row in LENGTHS for n in row)),
    }


def cross_entropy() -> list[dict[str, Any]]:
    """The reference and the Triton kernel by chunk."""
    from intarsia_kernels.loss import triton_cross_entropy

    hidden = torch.randn(ROWS * TOKENS, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(128256, 2048, device="cuda") * 0.02).bfloat16().requires_grad_()
    labels = torch.randint(0, 128256, (ROWS * TOKENS,), device="cuda")
    found = []
    for name, function in (("reference", operators()["cross_entropy"].reference), ("triton", triton_cross_entropy.cross_entropy)):
        for chunk in (2048, 4096, 8192):

            def both(function: Any = function, chunk: int = chunk) -> Any:
                return torch.autograd.grad(function(hidden, weight, labels, chunk=chunk), (hidden, weight))

            torch.cuda.reset_peak_memory_stats()
            took = milliseconds(both, repeat=10)
            rate = 6 * hidden.numel() * weight.shape[0] / took / 1e9
            found.append(
                {"what": name, "chunk": chunk, "both_ms": took, "both_tflops_per_s": rate, "peak_bytes": torch.cuda.max_memory_allocated()}
            )
    return found


def main() -> int:
    """Measure and print."""
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.", file=sys.stderr)
        return 1
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    print(json.dumps({**facts, "attention": attention(), "cross_entropy": cross_entropy()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
