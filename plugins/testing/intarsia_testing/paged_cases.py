"""Calls of `paged_attention`: requests whose entries lie in blocks in disorder. Shape suffixes as in `intarsia_generation.paged`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from intarsia_generation.paged import Paged, paged
from torch import Tensor

from intarsia_testing.kernel_cases import Case


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """A line of queries, caches, and of each request the `slots` of its entries in order (entries' numbers in the caches)."""

    q: Tensor
    keys: Tensor
    values: Tensor
    where: Paged
    slots: tuple[Tensor, ...]
    tables: tuple[tuple[int, ...], ...]

    def own(self, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each request's own entries, [T, K, D] and [T, K, Dv]."""
        for slots_T in self.slots:
            yield keys.flatten(0, 1)[slots_T], values.flatten(0, 1)[slots_T]


def requests(
    counts: Sequence[int],
    ends: Sequence[int],
    size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    values: int,
    *,
    normal: Callable[..., Tensor] | None = None,
    **settings: Any,
) -> Requests:
    """Requests of `ends` entries each, the last `counts` of which are new, in blocks of `size`; block 0 is nobody's. `settings` as for `paged`. Numbers in float64, by `normal` or by a seed of their own."""
    generator = torch.Generator().manual_seed(0)

    def own(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    normal = normal or own
    needed = [-(-end // size) for end in ends]
    order = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    where = paged(tables, counts, [end - count for end, count in zip(ends, counts, strict=True)], size, **settings)
    offsets = torch.arange(size)
    slots = tuple(
        (torch.tensor(table, dtype=torch.int64)[:, None] * size + offsets).flatten()[:end] for table, end in zip(tables, ends, strict=True)
    )
    keys, held = (normal(sum(needed) + 1, size, kv_heads, width) for width in (dim, values))
    return Requests(normal(sum(counts), heads, dim), keys, held, where, slots, tuple(tuple(table) for table in tables))


CALLS: tuple[tuple[str, Sequence[int], Sequence[int], int, tuple[int, int, int, int], Mapping[str, Any]], ...] = (
    ("one request of one entry", (1,), (1,), 16, (4, 2, 64, 64), {}),
    ("decoding of requests of 1 to 700 entries", (1, 1, 1, 1, 1), (700, 1, 64, 65, 300), 16, (8, 2, 64, 64), {}),
    ("decoding, a window, blocks of 1", (1, 1, 1), (150, 20, 90), 1, (6, 2, 100, 100), {"window": 40}),
    ("decoding, softcap and sinks, head dims 24 and 8", (1, 1), (130, 200), 5, (6, 2, 24, 8), {"softcap": 2.0, "sinks": True}),
    ("decoding, heads of 256 that share nothing, blocks of 128", (1, 1), (300, 15), 128, (3, 3, 256, 256), {}),
    ("prompts and pieces of prompts, and a request that is left out", (63, 1, 0, 15), (63, 90, 12, 300), 16, (4, 2, 64, 64), {}),
    ("3 new tokens behind 700, sinks", (3,), (703,), 16, (8, 2, 128, 128), {"sinks": True}),
    ("prompts, a window, softcap, head dims 24 and 8", (40, 2), (200, 30), 7, (6, 2, 24, 8), {"window": 33, "softcap": 2.0}),
)
"""Label, new tokens and entries of each request, entries of a block, query and key/value heads with their dims, settings."""


def cases(normal: Callable[..., Tensor]) -> Iterator[Case]:
    """For the conformance of kernels. A row of the batch is a new token: alone it comes with nothing beside it, as if it were decoded."""
    for label, counts, ends, size, widths, given in CALLS:
        made = requests(counts, ends, size, *widths, normal=normal)
        settings = {"scale": widths[2] ** -0.5, **given}
        tensors = {"q_NHD": made.q, "keys": made.keys, "values": made.values}
        if settings.pop("sinks", False):
            tensors["sinks_H"] = normal(widths[0])
        alone = functools.partial(_alone, label, made, tensors, settings)
        yield Case(label, tensors, {"where": made.where, **settings}, differentiable=False, rows=alone)


def _alone(label: str, made: Requests, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], token: int) -> Case:
    counts, positions = made.where.host_counts, made.where.host_positions
    assert counts is not None and positions is not None
    request, first = 0, 0
    while first + counts[request] <= token:
        first += counts[request]
        request += 1
    position = positions[request] + token - first
    where = paged([made.tables[request]], [1], [position], made.where.size)
    tensors = {**tensors, "q_NHD": made.q[token : token + 1]}
    return Case(f"{label}, token {token} alone", tensors, {"where": where, **settings}, differentiable=False)
