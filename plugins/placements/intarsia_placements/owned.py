"""`owned`: one rank has all of a member, as optimizers that need whole matrices want it.

Members are handed out by falling cost (the number of elements where the cost is unknown), each to the rank with the least so far;
equal costs go by name, equal loads to the lowest rank. Where all ranks begin with nothing, the greatest load is at most 4/3 of the best possible one. With
`partition_balanced` ranks begin with what other buckets gave them, so that a few large members in each of many buckets still come out even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from intarsia.errors import UsageError
from intarsia.layout import Member, Partition, whole_region

from intarsia_placements.config import Owned


class OwnedPlacement:
    """Gives each member whole to one rank."""

    name = "owned"
    accepts: Literal["box", "region"] = "region"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        return self.partition_balanced(members, ranks, [0.0] * ranks)

    def partition_balanced(self, members: Sequence[Member], ranks: int, loads: Sequence[float]) -> Partition:
        """The same, where rank r has `loads[r]` of cost already. See `intarsia.contracts.Placement`."""
        if len(loads) != ranks or not all(math.isfinite(load) and load >= 0 for load in loads):
            raise UsageError(
                f"Placement {self.name!r} cannot cut members {', '.join(repr(member.name) for member in members[:3])}: there are the loads {list(loads)} "
                f"for {ranks} ranks; it takes one finite load of at least 0 for each."
            )
        weights = [member.cost or float(member.numel) for member in members]
        loads = list(loads)
        owners = [0] * len(members)
        for index in sorted(range(len(members)), key=lambda i: (-weights[i], members[i].name)):
            owners[index] = loads.index(min(loads))
            loads[owners[index]] += weights[index]
        regions = tuple(
            tuple(whole_region(member.shape) if rank == owner else () for rank in range(ranks))
            for member, owner in zip(members, owners, strict=True)
        )
        return Partition(tuple(members), ranks, regions)


def build(config: Owned) -> OwnedPlacement:
    """The placement of `config`."""
    return OwnedPlacement()
