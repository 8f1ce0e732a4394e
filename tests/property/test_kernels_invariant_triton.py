"""The Triton pair of the batch-invariant mode under Triton's interpreter, where triton is installed: numbers against float64, gradients, and rows that come packed, in chunks and one at a time.

The interpreter multiplies by another library than a GPU, so that bits are compared for calls that have one tile shape; tests/gpu compares them all.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from tests.support import triton_interpreter

triton_interpreter.repair()
from intarsia import ops
from intarsia_kernels.invariant import blocks
from intarsia_kernels.invariant.ascending import linear, router_linear
from intarsia_kernels.invariant.blocks import attention, attention_by_flash
from intarsia_kernels.invariant.rotate import rope

def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

def near(found, expected, bound=2e-5):
    error = float((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    assert found.shape == expected.shape and error < bound, error

def gradients(function, leaves, **settings):
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*leaves, **settings)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape))]

for rows, inputs, outputs in ((1, 15, 63), (17, 70, 5)):
    exact = [normal(rows, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2)]
    wanted = gradients(ops.linear.reference, exact)
    for one, other in zip(gradients(linear, [each.float() for each in exact]), wanted, strict=True):
        near(one, other)
    x, weight = exact[0].float(), exact[1].float()
    assert torch.equal(linear(x, weight)[-1:], linear(x[-1:], weight)) and torch.equal(router_linear(x, weight), linear(x, weight))

def compare(heads, kv_heads, dim, values, lengths, queries=None, sinks=False, **settings):
    tokens = sum(lengths)
    exact = [normal(1, tokens, heads, dim), normal(1, tokens, kv_heads, dim, seed=1), normal(1, tokens, kv_heads, values, seed=2)]
    if queries:
        exact[0] = exact[0][:, -queries:]
    mask = {}
    if len(lengths) > 1:
        documents = torch.cat([torch.full((1, n), i, dtype=torch.int32) for i, n in enumerate(lengths)], 1)
        mask = {"documents_q_BS": documents, "documents_k_BT": documents}
    def call(function):
        def run(q, k, v, *rest):
            return function(q, k, v, scale=0.3, sinks_H=rest[0] if rest else None, **mask, **settings)
        return run
    leaves = exact + ([normal(heads, seed=3)] if sinks else [])
    wanted = gradients(call(ops.attention.reference), leaves)
    for one, other in zip(gradients(call(attention), [each.float() for each in leaves]), wanted, strict=True):
        near(one, other)

for interleaved in (False, True):
    for rows, heads, pairs, tables in ((2, 6, 12, 2), (2, 3, 8, 1)):
        x, angles = normal(rows, 5, heads, 2 * pairs), normal(tables, 5, pairs, seed=1)
        wanted = gradients(ops.rope.reference, [x], cos_BSd=angles.cos(), sin_BSd=angles.sin(), interleaved=interleaved)
        tables_BSd = {"cos_BSd": angles.cos().float(), "sin_BSd": angles.sin().float()}
        found = gradients(rope, [x.float()], **tables_BSd, interleaved=interleaved)
        for one, other in zip(found, wanted, strict=True):
            near(one, other)
        turned = rope(x.float().transpose(2, 3).contiguous().transpose(2, 3), **tables_BSd, interleaved=interleaved)
        assert torch.equal(turned, found[0])

compare(2, 1, 16, 16, (5, 70))
compare(2, 2, 24, 8, (70,), queries=3)
compare(4, 2, 16, 16, (66,), queries=1)
compare(2, 1, 16, 16, (20, 3), window=6, softcap=2.0, sinks=True)

# Packed = alone = in a chunk = from slots in disorder, some empty.
lengths = (7, 69, 2)
q, k, v = (normal(1, sum(lengths), n, 16, seed=n).float() for n in (2, 1, 1))
documents = torch.cat([torch.full((1, n), i, dtype=torch.int32) for i, n in enumerate(lengths)], 1)
packed = attention(q, k, v, scale=0.3, documents_q_BS=documents, documents_k_BT=documents)
known = attention(q, k, v, scale=0.3, documents_q_BS=documents, documents_k_BT=documents, packing=ops.Packing((lengths,)))
own = [x[:, 7:76] for x in (q, k, v)]
alone = attention(*own, scale=0.3)
assert torch.equal(attention_by_flash(q, k, v, scale=0.3, documents_q_BS=documents, documents_k_BT=documents), packed)
assert torch.equal(packed, known) and torch.equal(packed[:, 7:76], alone)
chunk = attention(own[0][:, 30:69], own[1], own[2], scale=0.3)
assert torch.equal(chunk, alone[:, 30:69])
order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
slots = torch.full((1, 80), -1)
slots[0, order[:69]] = torch.arange(69)
pages = [torch.full((1, 80, 1, 16), 5.0) for _ in range(2)]
for page, part in zip(pages, own[1:]):
    page[0, order[:69]] = part[0]
place = {"positions_q_BS": torch.arange(40, 69)[None], "positions_k_BT": slots, "documents_k_BT": slots.clamp(max=0)}
assert torch.equal(attention(own[0][:, 40:], *pages, scale=0.3, **place), alone[:, 40:])
one = attention(own[0][:, 68:], *pages, scale=0.3, **{**place, "positions_q_BS": torch.tensor([[68]])})
near(one, alone[:, 68:].double(), 1e-6)
nothing = attention(own[0][:, 68:], *pages, scale=0.3, documents_k_BT=torch.full((1, 80), -1), positions_q_BS=torch.tensor([[68]]), positions_k_BT=slots)
assert not nothing.any()

# Gradients by flash attention for the widths that it has alone.
asked = []
blocks._attended = lambda *given: asked.append(given[-1])
for width, values, dtype in ((64, 64, torch.bfloat16), (256, 256, torch.bfloat16), (264, 264, torch.bfloat16), (60, 60, torch.bfloat16), (64, 32, torch.bfloat16), (64, 64, torch.float32)):
    q, v = (normal(1, 3, 2, size).to(dtype) for size in (width, values))
    attention_by_flash(q, q, v, scale=1.0)
assert asked == [True, True, False, False, False, False], asked
print("done")
"""

if importlib.util.find_spec("triton"):

    def test_the_triton_pair_under_the_interpreter() -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        run = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, cwd=root, timeout=600, check=False
        )
        assert run.returncode == 0 and run.stdout.strip() == "done", run.stdout + run.stderr
