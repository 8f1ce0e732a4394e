"""Operators of the batch-invariant mode by themselves, for `invariant_gpu.py`: time, whether a backward pass repeats, whether rows are the same in any number.

Shape suffixes: B rows, S tokens, H query heads, K key/value heads, D head dim, N rows, I input and O output features.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from intarsia.config import ModelConfig
from invariant import function_of
from timing import milliseconds
from torch import Tensor

ATTENTION = {
    "cpu": ("attention/tiled", "sdpa"),
    "cuda": ("attention/blocks", "attention/blocks_flash", "attention/unsplit", "sdpa", "sdpa, deterministic algorithms"),
}
LINEAR = {"cpu": ("linear/tiled", "reference"), "cuda": ("linear/unsplit", "linear/ascending", "reference")}


def probe(model: ModelConfig, device: torch.device, dtype: str, rows: int, row: int) -> dict[str, Any]:
    """All of it; what fails says so in its place."""
    kind = getattr(torch, dtype)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(kind)

    mixer: Any = model.layers[0].attention  # type: ignore[attr-defined]
    heads, kv_heads, dim = mixer.heads, mixer.kv_heads, mixer.head_dim
    leaves = [normal(rows, row, count, dim).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    grad = normal(rows, row, heads, dim)
    found: dict[str, Any] = {"attention": {}, "decode": {}, "linear": {}}
    first: list[Tensor] | None = None
    for name in ATTENTION[device.type]:
        try:
            values = _attention(name, leaves, grad)
        except Exception as error:
            found["attention"][name] = {"failed": f"{type(error).__name__}: {error}"[:600]}
            continue
        results = values.pop("results")
        first = first or results
        errors = [float((y.float() - y0.float()).norm() / y0.float().norm()) for y, y0 in zip(results, first, strict=True)]
        same = [torch.equal(y, y0) for y, y0 in zip(results, first, strict=True)]
        found["attention"][name] = values | {"of_the_first": errors, "bits_of_the_first": same}
    del leaves, grad, first
    for name in ATTENTION[device.type]:
        if "," not in name:
            found["decode"][name] = [_tried(lambda n=name, b=b: _decode(n, normal, b, row, heads, kv_heads, dim)) for b in (1, 8, 64)]
    hidden = model.layers[0].feed_forward.hidden  # type: ignore[attr-defined]
    for name in LINEAR[device.type]:
        found["linear"][name] = [
            _tried(lambda n=name, i=i, o=o: _rows(n, normal, i, o))
            for i, o in ((model.dim, model.dim), (model.dim, kv_heads * dim), (model.dim, hidden), (hidden, model.dim))  # type: ignore[attr-defined]
        ]
    return found


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def _attention(name: str, leaves: list[Tensor], grad: Tensor) -> dict[str, Any]:
    """Milliseconds of forward and of both, whether a second backward pass has the bits of the first, and its results."""
    function, strict = function_of("attention", name.partition(",")[0]), "," in name
    scale = leaves[0].shape[-1] ** -0.5

    def both() -> list[Tensor]:
        out = function(*leaves, scale=scale)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(strict)
    try:
        one, again = both(), both()
        repeats = [torch.equal(first, second) for first, second in zip(one, again, strict=True)]
        del again
        with torch.no_grad():
            forward = statistics.median(milliseconds(lambda: function(*leaves, scale=scale)) for _ in range(5))
        whole = statistics.median(milliseconds(both) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(before)
    return {"forward_ms": forward, "both_ms": whole, "repeats": repeats, "results": one}


def _decode(name: str, normal: Callable[..., Tensor], batch: int, context: int, heads: int, kv_heads: int, dim: int) -> float:
    """Milliseconds of one query each over a context."""
    q, k, v = (normal(batch, length, count, dim) for length, count in ((1, heads), (context, kv_heads), (context, kv_heads)))
    place = {
        "positions_q_BS": torch.full((batch, 1), context - 1, device=q.device),
        "positions_k_BT": torch.arange(context, device=q.device)[None],
    }
    function = function_of("attention", name)
    with torch.no_grad():
        return statistics.median(milliseconds(lambda: function(q, k, v, scale=dim**-0.5, **place)) for _ in range(7))


def _rows(name: str, normal: Callable[..., Tensor], inputs: int, outputs: int) -> dict[str, Any]:
    """Of a product which numbers of rows have other bits than these rows have among many."""
    function, many = function_of("linear", name), 4096
    x_NI, weight_OI = normal(many, inputs), normal(outputs, inputs)
    with torch.no_grad():
        whole_NO = function(x_NI, weight_OI)
        differ = [n for n in (1, 2, 3, 8, 16, 17, 64, 65, 128, 200, 1024) if not torch.equal(function(x_NI[:n], weight_OI), whole_NO[:n])]
    return {"inputs": inputs, "outputs": outputs, "rows_that_differ": differ}
