"""`owned`: one rank has all of a member, as optimizers that need whole matrices want it.

Members are handed out by falling cost (the number of elements where the cost is unknown), each to the rank with the least so far;
equal costs go by name, equal loads to the lowest rank. The greatest load is at most 4/3 of the best possible one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from intarsia.layout import Member, Partition, whole_region

from intarsia_placements.config import Owned


class OwnedPlacement:
    """Gives each member whole to one rank."""

    name = "owned"
    accepts: Literal["box", "region"] = "region"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        weights = [member.cost or float(member.numel) for member in members]
        loads = [0.0] * ranks
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
