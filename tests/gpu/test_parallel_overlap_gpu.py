"""Tensor parallelism on two GPUs: torch's symmetric-memory operators give what the communicator gives, one after the other, gradients included.

pytest -m gpu -s tests/gpu/test_parallel_overlap_gpu.py
"""

from __future__ import annotations

import pytest
import torch
from _spawn import spawn
from intarsia.comm import init_world
from intarsia.device import select
from intarsia_parallel import overlap, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs on this host")]


def errors(length: int) -> list[float]:
    """Relative differences of outputs and gradients between the fused operators and `Decomposed`, for bfloat16 parts of [2, length, 512]."""
    world = init_world(select("cuda"), 300.0)
    fused = overlap.products_of(world, world.device)
    found = []
    results = []
    for products in (fused, overlap.Decomposed(world)):
        generator = torch.Generator(world.device).manual_seed(world.rank)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, device=world.device, dtype=torch.bfloat16, generator=generator).requires_grad_()

        tokens.note(length)
        counts = tokens.counts(world)
        x, w1, w3, w2 = draw(2, counts[world.rank], 512), draw(256, 512), draw(256, 512), draw(512, 256)
        gathered, a, b = overlap._GatherProducts.apply(products, tuple(counts), world, x, w1, w3)
        y = overlap._ProductScatter.apply(products, tuple(counts), a * b, w2)
        y.float().square().sum().backward()
        results.append([each.detach().float() for each in (gathered, y, x.grad, w1.grad, w3.grad, w2.grad)])
    for one, other in zip(*results, strict=True):
        found.append(float((one - other).norm() / other.norm()))
    return found


@pytest.mark.parametrize("length", [256, 255])
def test_fused_operators_give_the_same(length):
    for rank in spawn(errors, 2, length, world=False):
        assert max(rank) < 1e-2, rank


def check(*words: str) -> int:
    """`intarsia parallel check` on the GPUs."""
    from intarsia.cli import main

    return main(["parallel", "check", *words, "--device", "cuda"])


def test_llama3_with_overlap_equals_one_gpu():
    words = ["llama3", "--mesh", "tp=2", "--sequence", "64", "--tolerance", "1e-3", "parallel=declared", "parallel.async_tensor=true"]
    assert spawn(check, 2, *words, world=False) == [0, 0]
