"""`zigzag`: rows are cut into `blocks` x ranks even blocks, which go to the ranks forwards, then backwards, and so on.

With 2 blocks and 3 ranks, blocks 0 1 2 3 4 5 go to ranks 0 1 2 2 1 0: where cost grows along the rows (a causal mask, frequent tokens first), every rank has
as much of it as any other. A tile's rows stay together; a scalar goes to rank 0. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from intarsia.contracts import Box, Member, Partition, Region

from acme_zigzag.config import ZigzagConfig


class Zigzag:
    """See `intarsia.contracts.Placement`. Regions have several boxes."""

    accepts: Literal["box", "region"] = "region"

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.name = f"zigzag(blocks={blocks})"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """Each member alone; nothing is balanced across the bucket."""
        return Partition(tuple(members), ranks, tuple(self._cut(member, ranks) for member in members))

    def _cut(self, member: Member, ranks: int) -> tuple[Region, ...]:
        regions: list[list[Box]] = [[] for _ in range(ranks)]
        if not member.shape:
            regions[0].append(Box((), ()))
        elif member.numel:
            rows, unit = member.shape[0], member.tile[0] if member.tile else 1
            units, count = -(-rows // unit), self.blocks * ranks
            for block in range(count):
                begin, end = (min(units * edge // count * unit, rows) for edge in (block, block + 1))
                turn, place = divmod(block, ranks)
                if end > begin:
                    box = Box((begin, *(0 for _ in member.shape[1:])), (end - begin, *member.shape[1:]))
                    regions[ranks - 1 - place if turn % 2 else place].append(box)
        return tuple(tuple(region) for region in regions)


def build(config: ZigzagConfig) -> Zigzag:
    """The placement of `config`."""
    return Zigzag(config.blocks)
