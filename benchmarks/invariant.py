"""What the batch-invariant mode costs: products and attention, and on a CPU the step of whole models, by the usual kernels and by the mode's. Prints one JSON line for each.

    python benchmarks/invariant.py                                        # a CPU, the debug model's sizes
    CUBLAS_WORKSPACE_CONFIG=:0:0 python benchmarks/invariant.py --device cuda    # Llama 1B's width

The variable slows the usual products as well: run once with and once without it, and compare the mode's lines of the first with the usual lines of the second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from intarsia import device as devices
from intarsia import ops, plugins
from intarsia.config import resolve
from intarsia.contracts import Batch
from intarsia_eager.engine import prepare
from intarsia_rl.weights.build import build_model, fill_initial
from intarsia_testing.model import documents_of, positions_of
from torch import Tensor

KERNELS = {
    "cpu": {"linear": ("reference", "linear/tiled"), "attention": ("sdpa", "attention/tiled")},
    "cuda": {
        "linear": ("reference", "linear/unsplit", "linear/ascending"),
        "attention": ("sdpa", "varlen", "attention/unsplit", "attention/blocks"),
    },
}


MODELS = (("llama3/debug", "float32"), ("deepseek_v3/debug", "float32"), ("llama3/debug", "bfloat16"))
"""Whole models, with what they compute in."""


def function_of(op: str, name: str) -> Callable[..., Any]:
    """A kernel by name, called as the operator calls it."""
    found = plugins.current()
    return ops.operators()[op].reference if name == "reference" else found.target(found.registry("kernel").find(name, op=op))


def median_ms(function: Callable[[], object], device: str, repeats: int) -> dict[str, float]:
    """Median time of a call, after two to warm up; on a CPU the shortest CPU time as well, which other work disturbs least."""
    times, cpu_times = [], []
    for number in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start, cpu = time.perf_counter(), time.process_time()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        if number > 1:
            times.append(1e3 * (time.perf_counter() - start))
            cpu_times.append(1e3 * (time.process_time() - cpu))
    found = {"ms": round(statistics.median(times), 4)}
    return found | {"cpu_ms": round(min(cpu_times), 4)} if device == "cpu" else found


def step(function: Callable[..., Tensor], leaves: list[Tensor], **settings: Any) -> Callable[[], object]:
    """Forward and backward."""

    def run() -> object:
        out = function(*leaves, **settings)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def model_step(name: str, dtype: str, rows: int, tokens: int, invariant: bool) -> Callable[[], object]:
    """Forward and backward of a model on a CPU, over rows of four documents each."""
    recipe = resolve(name, ["train.device=cpu", f"precision.compute={dtype}"], ["batch_invariant"] if invariant else []).recipe
    loaded = plugins.current()
    choices = ops.select(recipe.kernels, loaded, devices.capabilities(), dtype, invariant=invariant).choices
    model: Any = build_model(recipe, loaded, "cpu", dtype).train().requires_grad_(True)
    fill_initial(model, recipe, loaded)
    lengths = ((tokens // 4,) * 4,) * rows
    tokens_BS = torch.arange(rows * tokens).view(rows, tokens) * 7 % 250
    batch = Batch(tokens_BS, tokens_BS.roll(-1, 1), positions_of(documents_of(lengths)), documents_of(lengths), lengths)

    def run() -> None:
        model.zero_grad()
        with ops.installed(choices):
            local, context = prepare(batch, getattr(model, "predicts_ahead", 0), None, (None,))
            hidden = model(local.tokens_BS, context)
            outputs = hidden if isinstance(hidden, tuple) else (hidden,)
            labels_N = local.labels_BS.flatten()
            sum(ops.cross_entropy(each_BSD.flatten(0, 1), model.head_weight_VD, labels_N) for each_BSD in outputs).backward()

    return run


def main() -> None:
    """All measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, is_small = arguments.device, arguments.device == "cpu"
    dtype = arguments.dtype or ("float32" if is_small else "bfloat16")
    rows, tokens, dim, hidden, heads, kv_heads, head_dim = (4, 512, 256, 768, 8, 4, 32) if is_small else (8, 4096, 2048, 8192, 32, 8, 64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(getattr(torch, dtype))

    def tell(op: str, kernel: str, what: str, function: Callable[[], object], kind: str | None = None) -> None:
        facts: dict[str, Any] = {
            "op": op,
            "kernel": kernel,
            "what": what,
            "dtype": kind or dtype,
            "device": device,
            "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
        try:
            facts |= median_ms(function, device, arguments.repeats)
        except Exception as error:  # what cannot run here is said, and the rest is measured
            facts["failed"] = f"{type(error).__name__}: {error}"
        print(json.dumps(facts), flush=True)

    for name, kind in MODELS if is_small else ():
        for invariant in (False, True):
            work = model_step(name, kind, rows, tokens, invariant)
            tell("model", "the mode's" if invariant else "usual", f"step of {name}, {rows} x {tokens}", work, kind)
    contexts = (128,) if is_small else (4096,)
    for kernel in KERNELS[device]["linear"]:
        function = function_of("linear", kernel)
        for inputs, outputs in ((dim, hidden), (hidden, dim)):
            leaves = [normal(rows * tokens, inputs).requires_grad_(), normal(outputs, inputs).requires_grad_()]
            tell("linear", kernel, f"step {rows * tokens} x {inputs} -> {outputs}", step(function, leaves))
            for few in (1, 8, 64):
                x, weight = leaves[0][:few].detach(), leaves[1].detach()
                tell("linear", kernel, f"forward {few} x {inputs} -> {outputs}", lambda f=function, x=x, w=weight: f(x, w))
    for kernel in KERNELS[device]["attention"]:
        function = function_of("attention", kernel)
        leaves = [normal(rows, tokens, n, head_dim).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        tell(
            "attention",
            kernel,
            f"step {rows} x {tokens}, {heads}/{kv_heads} heads of {head_dim}",
            step(function, leaves, scale=head_dim**-0.5),
        )
        for context in contexts:
            for few in (1, 8, 64):
                q, k, v = (
                    normal(few, 1, heads, head_dim),
                    normal(few, context, kv_heads, head_dim),
                    normal(few, context, kv_heads, head_dim),
                )
                place = {
                    "positions_q_BS": torch.full((few, 1), context - 1, device=device),
                    "positions_k_BT": torch.arange(context, device=device)[None],
                }
                tell(
                    "attention",
                    kernel,
                    f"decode {few} over {context}",
                    lambda f=function, q=q, k=k, v=v, place=place: f(q, k, v, scale=head_dim**-0.5, **place),
                )


if __name__ == "__main__":
    main()
