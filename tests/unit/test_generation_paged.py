"""The operator `paged_attention`: its reference is attention over each request's own entries, wherever blocks lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from intarsia import ops
from intarsia.errors import UsageError
from intarsia_generation.paged import Paged, paged, paged_attention
from torch import Tensor

HEADS, KV_HEADS, DIM, VALUES = 4, 2, 8, 6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Requests:
    """Requests whose entries lie in blocks in disorder: of each `ends` entries, the last `counts` of which are new."""

    def __init__(self, counts: list[int], ends: list[int], size: int, **settings: Any) -> None:
        self.counts, self.ends = counts, ends
        needed = [-(-end // size) for end in ends]
        order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1).tolist()
        tables = [[order.pop() for _ in range(count)] for count in needed]
        self.keys, self.values = (normal(sum(needed) + 1, size, KV_HEADS, width, seed=width) for width in (DIM, VALUES))
        self.q = normal(sum(counts), HEADS, DIM, seed=1)
        self.own = []
        for table, end in zip(tables, ends, strict=True):
            self.own.append([cache[table].flatten(0, 1)[:end] for cache in (self.keys, self.values)])
        self.where = paged(tables, counts, [end - count for count, end in zip(counts, ends, strict=True)], size, **settings)

    def expected(self, **settings: Any) -> Tensor:
        parts = [
            ops.attention(q[None], k[None], v[None], **settings)[0]
            for q, (k, v) in zip(self.q.split(self.counts), self.own, strict=True)
            if len(q)
        ]
        return torch.cat(parts)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("settings", [{}, {"window": 7}, {"softcap": 3.0, "sinks_H": torch.linspace(-1, 1, HEADS)}])
@pytest.mark.parametrize(
    ("counts", "ends", "size"),
    [([1, 1, 1], [5, 33, 16], 16), ([3, 3, 0, 9, 1], [3, 3, 7, 40, 1], 4), ([2, 5], [30, 5], 1)],
)
def test_it_is_attention_over_a_requests_own_entries(counts: list[int], ends: list[int], size: int, settings: Any, narrow: bool) -> None:
    made = Requests(counts, ends, size, narrow=narrow)
    found = paged_attention(made.q, made.keys, made.values, made.where, scale=0.4, **settings)
    torch.testing.assert_close(found, made.expected(scale=0.4, **settings), rtol=1e-5, atol=1e-6)


def test_single_tokens_of_which_the_host_knows_nothing() -> None:
    made = Requests([1, 0, 1, 0], [9, 12, 17, 4], 4, width=8)
    where = made.where
    unknown = Paged(where.tables_RW, where.firsts_R, where.counts_R, where.positions_R, 1, where.size)
    found = paged_attention(made.q, made.keys, made.values, unknown, scale=0.4, window=6)
    torch.testing.assert_close(found, made.expected(scale=0.4, window=6), rtol=1e-5, atol=1e-6)
    counted = Paged(where.tables_RW, where.firsts_R, where.counts_R, where.positions_R, 2, where.size)
    known = paged_attention(made.q, made.keys, made.values, where, scale=0.4, window=6)
    assert torch.equal(paged_attention(made.q, made.keys, made.values, counted, scale=0.4, window=6), known)


@pytest.mark.parametrize("requests", [0, 2])
def test_where_nobody_has_new_tokens_nothing_comes_back(requests: int) -> None:
    keys, values = normal(4, 4, 2, 8, seed=1), normal(4, 4, 2, 6, seed=2)
    where = paged([[1, 2]] * requests, [0] * requests, [5] * requests, 4)
    assert paged_attention(torch.empty(0, 4, 8), keys, values, where, scale=1.0).shape == (0, 4, 6)


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="Request 1 has 9 entries, and 2 blocks of 4 hold 8"):
        paged([[1], [2, 3]], [1, 1], [0, 8], 4)
    with pytest.raises(UsageError, match="2 tables, 1 counts"):
        paged([[1], [2]], [1], [0, 0], 4)
    with pytest.raises(UsageError, match="width is 1"):
        paged([[1, 2]], [1], [0], 4, width=1)
