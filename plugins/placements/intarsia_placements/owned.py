"""`owned`: one rank has all of a member, as optimizers that need whole matrices want it.

Members are handed out by falling cost (the number of elements where the cost is unknown), each to the rank with the least so far;
equal costs go by name, equal loads to the lowest rank. Where all ranks begin with nothing, the greatest load is at most 4/3 of the best possible one. With
`partition_balanced` ranks begin with what other buckets gave them, so that a few large members in each of many buckets still come out even. Where there are few ways to
hand members out, as with a block's matrices on two ranks, all are compared instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from intarsia.errors import UsageError
from intarsia.layout import Member, Partition, whole_region

from intarsia_placements.config import Owned

COMPARED = 1024
"""Most ways to hand members out that are all compared."""


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
        order = sorted(range(len(members)), key=lambda i: (-weights[i], members[i].name))
        falling = [weights[index] for index in order]
        chosen = _best(falling, loads) if ranks ** len(members) <= COMPARED else _greedy(falling, loads)
        owners = [owner for _, owner in sorted(zip(order, chosen, strict=True))]
        regions = tuple(
            tuple(whole_region(member.shape) if rank == owner else () for rank in range(ranks))
            for member, owner in zip(members, owners, strict=True)
        )
        return Partition(tuple(members), ranks, regions)


def _greedy(weights: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Each to the rank with the least so far."""
    loads, owners = list(loads), []
    for weight in weights:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += weight
    return owners


def _best(weights: Sequence[float], loads: Sequence[float]) -> Sequence[int]:
    """The way with the least greatest load, then with the least second, and so on; the first of equal ones."""

    def falling(owners: Sequence[int]) -> list[float]:
        found = list(loads)
        for weight, owner in zip(weights, owners, strict=True):
            found[owner] += weight
        return sorted(found, reverse=True)

    return min(itertools.product(range(len(loads)), repeat=len(weights)), key=falling)


def build(config: Owned) -> OwnedPlacement:
    """The placement of `config`."""
    return OwnedPlacement()
