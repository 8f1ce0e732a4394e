"""The kernels of `paged_attention` under Triton's interpreter, where triton is installed: both against float64 over requests of all kinds, bits of `attention/blocks`, and what must not be read or written.

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
from intarsia_generation.paged import Paged, paged, paged_attention
from intarsia_kernels.invariant import blocks as trained
from intarsia_kernels.paged import blocks, split
from intarsia_testing.paged_cases import requests

def made(counts, ends, size=16, heads=4, kv_heads=2, dim=16, values=16, dtype=torch.float32, **settings):
    made = requests(counts, ends, size, heads, kv_heads, dim, values)
    q, keys, values, where = made.q.to(dtype), made.keys.to(dtype), made.values.to(dtype), made.where
    exact = paged_attention.reference(q.double(), keys.double(), values.double(), where, scale=0.3, **settings)
    # Nothing that no request sees is read: neither entries behind ends, nor block 0.
    seen = torch.zeros(keys.shape[:2], dtype=torch.bool).flatten()
    for slots in made.slots:
        seen[slots] = True
    for cache in (keys, values):
        cache[~seen.view(keys.shape[:2])] = float("nan")
    return (q, keys, values, where), exact, made

def near(found, exact, bound):
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert found.shape == exact.shape and error < bound, error

def both(counts, ends, bound=2e-6, **given):
    settings = {name: given[name] for name in ("window", "softcap", "sinks_H") if name in given}
    operands, exact, _ = made(counts, ends, **given)
    for module in (blocks, split):
        near(module.paged_attention(*operands, scale=0.3, **settings), exact, bound)

# Decoding: shares of a program that hold parts of a request, whole ones, several heads; requests that are left out.
both([1, 1, 0, 1, 1], [700, 3, 9, 64, 65])
both([1], [1])
both([1, 1], [130, 200], dim=24, values=8, heads=6, kv_heads=2, size=5)
both([1, 1, 1], [150, 20, 90], window=40, softcap=2.0, sinks_H=torch.linspace(-1, 1, 4), size=1)
both([1, 0, 1], [300, 70, 90], heads=3, kv_heads=3, size=128, sinks_H=torch.linspace(-1, 1, 3))
both([1, 1], [140, 40], dtype=torch.bfloat16, bound=2e-2)
# Prompts and pieces of them, alone and among others; a few queries behind much that is cached.
both([70, 3, 0, 20], [70, 40, 12, 90])
both([5], [400], sinks_H=torch.linspace(-1, 1, 4))
both([40, 2], [200, 30], window=33, softcap=2.0, dim=24, values=8, heads=6)
both([33], [33], heads=2, kv_heads=2, size=3)
both([20, 4], [90, 20], dtype=torch.bfloat16, bound=2e-2)

# Few programs and many, however wide tables are: one result, up to rounding.
for resident in (1, 2, 40):
    split.decoding = lambda groups, width, wide: split.Shape(16, 32, 4, 3, resident)
    for wider in (0, 99):
        operands, exact, whole = made([1, 1, 1], [500, 40, 260])
        where = operands[3]
        tables = torch.nn.functional.pad(where.tables_RW, (0, wider))
        again = Paged(tables, where.firsts_R, where.counts_R, where.positions_R, 1, where.size)
        near(split.paged_attention(*operands[:3], again, scale=0.3), exact, 2e-6)

# More parts of a request than are added at once.
split.decoding = lambda groups, width, wide: split.Shape(16, 32, 4, 3, 40)
split.LEAST = 1
(q, keys, values, where), _, whole = made([1], [2300])
keys.view(-1, *keys.shape[2:])[whole.slots[0]] *= torch.linspace(0.1, 4, 2300)[:, None, None]  # the last entries weigh the most
exact = paged_attention.reference(q.double(), keys.nan_to_num().double(), values.nan_to_num().double(), where, scale=0.3)
near(split.paged_attention(q, keys, values, where, scale=0.3), exact, 5e-6)

# The bits of attention over the same entries in order, whose tiles these are.
for counts, ends, settings in (([1, 1], [200, 70], {}), ([30, 1], [100, 65], {"window": 50}), ([9], [150], {"softcap": 2.0, "sinks_H": torch.linspace(-1, 1, 4)})):
    operands, _, whole = made(counts, ends, **settings)
    found = blocks.paged_attention(*operands, scale=0.3, **settings).split(counts)
    for q, y, (k, v) in zip(operands[0].split(counts), found, whole.own(operands[1], operands[2]), strict=True):
        rows = trained.tiles(max(counts), 2)[0]
        if trained.tiles(len(q), 2)[0] == rows:
            assert torch.equal(trained.attention(q[None], k[None], v[None], scale=0.3, **settings)[0], y)

# Rows of nobody stay as they were, and calls that are another's.
operands, exact, _ = made([1, 1], [9, 20])
q, keys, values, where = operands
assert blocks.paged_attention.supports(q.bfloat16(), *operands[1:]) and split.paged_attention.supports(q.requires_grad_(), *operands[1:])
wide = torch.zeros(2, 1, 264)
assert "wider than 256" in split.paged_attention.supports(wide, torch.zeros(1, 16, 1, 264), torch.zeros(1, 16, 1, 264), where)
assert split.paged_attention(q[:0], keys, values, paged([], [], [], 16), scale=1.0).shape == (0, 4, 16)
print("done")
"""

if importlib.util.find_spec("triton"):

    def test_paged_kernels_under_the_interpreter() -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        run = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, cwd=root, timeout=600, check=False
        )
        assert run.returncode == 0 and run.stdout.strip() == "done", run.stdout + run.stderr
