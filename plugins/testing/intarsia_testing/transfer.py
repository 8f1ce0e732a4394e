"""What a transfer between two layouts means, on plain lists. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intarsia.errors import UsageError
from intarsia.layout import region_numel
from intarsia.transfer import Transfer


def simulate(plan: Transfer, buffers: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Carry out a transfer of all ranks in this process, on plain lists: what every other executor must agree with. Stability: provisional.

    `buffers[r]` are the elements that rank r of the source stores, in storage order; so are the lists that come back for the destination.
    Elements that nothing writes stay None.
    """
    for rank in range(plan.src.ranks):
        if len(buffers[rank]) != plan.src.numel(rank):
            raise UsageError(f"Rank {rank} stores {plan.src.numel(rank)} elements, the buffer has {len(buffers[rank])}.")
    results: list[list[Any]] = []
    for rank in range(plan.dst.ranks):
        result: list[Any] = [None] * region_numel(plan.dst.local(rank))
        for move in plan.receives(rank):
            for source, target, length in move.runs():
                there = slice(target, target + length)
                new = [0] * length if move.op == "zero" else buffers[move.source][source : source + length]
                if move.op == "sum":
                    result[there] = [a + b for a, b in zip(result[there], new, strict=True)]
                elif move.op == "max":
                    result[there] = list(map(max, result[there], new))
                else:
                    result[there] = new
        results.append(result)
    return results
