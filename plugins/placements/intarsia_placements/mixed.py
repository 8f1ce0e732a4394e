"""`mixed`: the members of one bucket are cut by different placements, each by the first rule whose glob has its name, so that they share one collective.

Each placement sees its own members alone, as if they were a bucket. Those that can balance (`partition_balanced`) come last, and are told what the others have
given to each rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Literal

from intarsia.contracts import Placement
from intarsia.errors import UsageError
from intarsia.layout import Member, Partition, Region, region_numel
from intarsia.plugins import current

from intarsia_placements.config import Mixed


class MixedPlacement:
    """Cuts each member by the placement of the first rule that has its name."""

    def __init__(self, rules: Sequence[tuple[str, Placement]], default: Placement) -> None:
        self._globs = [glob for glob, _ in rules]
        self._placements = [*(placement for _, placement in rules), default]
        self.name = f"mixed({', '.join([*(f'{glob}: {placement.name}' for glob, placement in rules), default.name])})"
        # What one of them cannot cut the bucket cannot hold.
        boxes = any(placement.accepts == "box" for placement in self._placements)
        self.accepts: Literal["box", "region"] = "box" if boxes else "region"
        replicas = [placement.name for placement in self._placements if _replicates(placement)]
        cutting = [placement.name for placement in self._placements if placement.name not in replicas]
        if replicas and cutting:
            raise UsageError(
                f"Placement {self.name!r}: {replicas[0]!r} keeps members whole on every rank while {cutting[0]!r} cuts others, and a bucket is one or the "
                "other. Put what is replicated into a bucket of its own."
            )

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        return self.partition_balanced(members, ranks, [0.0] * ranks)

    def partition_balanced(self, members: Sequence[Member], ranks: int, loads: Sequence[float]) -> Partition:
        """The same, where rank r has `loads[r]` of cost already. See `intarsia.contracts.Placement`."""
        chosen = [self._rule(member) for member in members]
        regions: list[tuple[Region, ...]] = [()] * len(members)
        loads, replicated = list(loads), bool(members)
        # Even shares first: what is whole can make up for what they leave uneven.
        order = sorted(set(chosen), key=lambda number: (hasattr(self._placements[number], "partition_balanced"), number))
        for number in order:
            mine = [index for index, rule in enumerate(chosen) if rule == number]
            shown, placement = [members[index] for index in mine], self._placements[number]
            balanced = getattr(placement, "partition_balanced", None)
            answer = balanced(shown, ranks, loads) if balanced else placement.partition(shown, ranks)
            replicated &= answer.replicated
            for index, row in zip(mine, answer.regions, strict=True):
                regions[index] = row
                weight = members[index].cost / max(members[index].numel, 1) or 1.0
                loads = [load + weight * region_numel(region) for load, region in zip(loads, row, strict=True)]
        return Partition(tuple(members), ranks, tuple(regions), replicated)

    def _rule(self, member: Member) -> int:
        """The number of the placement that cuts the member; the last one is the default."""
        hits = (number for number, glob in enumerate(self._globs) if fnmatch.fnmatchcase(member.name, glob))
        return next(hits, len(self._globs))


def _replicates(placement: Placement) -> bool:
    """Whether a placement keeps everything everywhere, as it does with any member or with none."""
    try:
        return placement.partition((Member("probe", (2,)),), 2).replicated
    except UsageError:
        return False


def build(config: Mixed) -> MixedPlacement:
    """The placement of `config`."""
    build_one = current().build
    return MixedPlacement([(rule.match, build_one(rule.placement)) for rule in config.rules], build_one(config.default))
