"""Blocks of context parallelism by torch's flash attention against the plain products, every rank's blocks of a cut row, forward and backward."""

from __future__ import annotations

import pytest
import torch
from intarsia_parallel.context import block
from intarsia_parallel.context.block import Block, Merged, Result, Settings
from intarsia_parallel.context.cut import SequenceCut, slices
from intarsia_parallel.context.plan import Documents, Plan
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def attended(plan: Plan, rank: int, values: list[Tensor], settings: Settings) -> list[Tensor]:
    """Outputs, and gradients of queries, keys and values, of one rank's queries over all blocks, which nobody had to send."""
    q, k, v, dout = values
    cut = plan.cut
    own, merged, blocks = cut.take(q, rank, 1), Merged(cut.take(q, rank, 1), v.shape[-1]), []
    for source in [rank, *((rank - shift) % cut.ranks for shift in plan.shifts)]:
        keys = plan.transfers[source][rank]
        blocks.append((Block(plan.segments(rank, keys)), slices(k, keys, 1), slices(v, keys, 1), keys))
        blocks[-1][0].forward(own, *blocks[-1][1:3], settings, merged)
    result = Result(merged.out.to(q.dtype), merged.lse, cut.take(dout, rank, 1))
    dq, dk, dv = (
        torch.zeros_like(own, dtype=torch.float32),
        torch.zeros_like(k, dtype=torch.float32),
        torch.zeros_like(v, dtype=torch.float32),
    )
    for each, keys, held, ranges in blocks:
        parts = each.backward(own, keys, held, settings, result, dq)
        index = [i for start, stop in ranges for i in range(start, stop)]
        dk[:, index] += parts[0]
        dv[:, index] += parts[1]
    return [merged.out, dq, dk, dv]


@pytest.mark.parametrize("window", [None, 1, 70, 400, 2000])
@pytest.mark.parametrize("lengths", [((1000,), (1000,)), ((300, 1, 699), (500, 500)), ((340, 660), (10, 990))], ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 64, 64), (4, 4, 192, 128)], ids=str)
def test_flash_equals_plain(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int, int], lengths: tuple[tuple[int, ...], ...], window: int | None
) -> None:
    query_heads, kv_heads, dim, value_dim = heads
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(query_heads, dim), (kv_heads, dim), (kv_heads, value_dim), (query_heads, value_dim)]
    values = [torch.randn(2, 1000, *shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes]
    settings = Settings(dim**-0.5, window)
    assert block.flash_obstacle(*values[:3], settings) is None
    for method in ("zigzag", "contiguous"):
        plan = Plan(SequenceCut.of(1000, 3, method), Documents.of(lengths), window)
        for rank in range(3):
            with monkeypatch.context() as patch:
                fast = attended(plan, rank, values, settings)
                patch.setattr(block, "flash_obstacle", lambda *arguments: "as a reference")
                plain = attended(plan, rank, values, settings)
            for one, other in zip(fast, plain, strict=True):
                assert float((one - other).norm()) <= 1e-2 * float(other.norm()) + 1e-2, (method, rank)
