"""What flash attention is handed for a block of context parallelism, by a double that masks as the kernel does: windows counted from the last query and key of each
sequence, and no further than the longest run of keys."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from intarsia_parallel.context import block
from intarsia_parallel.context.block import Block, Merged, Result, Settings
from intarsia_parallel.context.cut import SequenceCut, slices
from intarsia_parallel.context.plan import Documents, Plan
from torch import Tensor


def scores_of(q: Tensor, k: Tensor, scale: float, left: int, right: int, most: int) -> Tensor:
    """[H, queries, keys] of one sequence, -inf where the kernel looks away."""
    left, right = (-1 if each >= most else each for each in (left, right))
    if left >= 0 and right < 0:
        right = most
    elif left < 0 and right >= 0:
        left = most
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    if left < 0:
        return scores
    offset = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
    return scores.masked_fill((offset > right) | (offset < -left), float("-inf"))


def sequences(starts: tuple[Tensor, Tensor]) -> list[tuple[slice, slice]]:
    first, second = (each.tolist() for each in starts)
    pairs = zip(itertools.pairwise(first), itertools.pairwise(second), strict=True)
    return [(slice(*a), slice(*b)) for a, b in pairs]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *more: Any, scale: float, window_size_left: int, window_size_right: int) -> Any:
    assert q.shape[-1] == v.shape[-1] and more[2:4] == tuple(max(each.diff().tolist()) for each in more[:2])
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    for a, b in sequences(more[:2]):
        scores = scores_of(q[a], k[b], scale, window_size_left, window_size_right, more[3])
        lse[:, a] = torch.logsumexp(scores, -1)
        out[a] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[b].repeat_interleave(q.shape[1] // k.shape[1], 1))
    return out, lse


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *more: Any,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> Any:
    groups = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a, b in sequences(more[:2]):
        p = (scores_of(q[a], k[b], scale, window_size_left, window_size_right, more[3]) - lse[:, a, None]).exp()
        dp = torch.einsum("qhd,khd->hqk", dout[a], v[b].repeat_interleave(groups, 1))
        ds = p * (dp - (dout[a] * out[a]).sum(-1).T[..., None]) * scale
        dq[a] = torch.einsum("hqk,khd->qhd", ds, k[b].repeat_interleave(groups, 1))
        dk[b] = torch.einsum("hqk,qhd->khd", ds, q[a]).unflatten(1, (-1, groups)).sum(2)
        dv[b] = torch.einsum("hqk,qhd->khd", p, dout[a]).unflatten(1, (-1, groups)).sum(2)
    return dq, dk, dv


def attended(plan: Plan, rank: int, values: list[Tensor], settings: Settings) -> list[Tensor]:
    """Outputs, and gradients of queries and of every block's keys and values, of one rank's queries over all blocks."""
    q, k, v, dout = values
    own = plan.cut.take(q, rank, 1)
    merged, blocks = Merged(own, v.shape[-1]), []
    for source in range(plan.cut.ranks):
        keys = plan.transfers[source][rank]
        blocks.append((Block(plan.segments(rank, keys)), slices(k, keys, 1), slices(v, keys, 1)))
        blocks[-1][0].forward(own, *blocks[-1][1:], settings, merged)
    result, dq = Result(merged.out, merged.lse, plan.cut.take(dout, rank, 1)), torch.zeros_like(own)
    return [merged.out, *(x for each, *held in blocks for x in each.backward(own, *held, settings, result, dq)), dq]


@pytest.mark.parametrize("window", [None, 30, 90])
@pytest.mark.parametrize("method", ["zigzag", "contiguous"])
def test_packs_say_what_segments_say(monkeypatch: pytest.MonkeyPatch, method: str, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (2, 6), (2, 5), (4, 5)]
    values = [torch.randn(2, 100, *shape, dtype=torch.float64, generator=generator) for shape in shapes]
    settings = Settings(0.4, window)
    for lengths in (((100,), (100,)), ((30, 1, 69), (50, 50)), ((32, 68), (3, 97))):
        plan = Plan(SequenceCut.of(100, 3, method), Documents.of(lengths), window)
        for rank in range(3):
            right = attended(plan, rank, values, settings)
            with monkeypatch.context() as patch:
                patch.setattr(block, "flash_obstacle", lambda *arguments: None)
                patch.setattr(block, "_flash_forward", flash_forward)
                patch.setattr(block, "_flash_backward", flash_backward)
                found = attended(plan, rank, values, settings)
            for one, other in zip(found, right, strict=True):
                assert torch.allclose(one, other, atol=1e-11), (lengths, rank)
