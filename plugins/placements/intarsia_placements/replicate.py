"""`replicate`: every rank stores every member whole; rank 0's copy is primary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from intarsia.layout import Member, Partition, whole_region

from intarsia_placements.config import Replicate


class ReplicatePlacement:
    """Cuts nothing."""

    name = "replicate"
    accepts: Literal["box", "region"] = "region"
    by_shape = True

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        regions = tuple((whole_region(member.shape),) * ranks for member in members)
        return Partition(tuple(members), ranks, regions, replicated=True)


def build(config: Replicate) -> ReplicatePlacement:
    """The placement of `config`."""
    return ReplicatePlacement()
