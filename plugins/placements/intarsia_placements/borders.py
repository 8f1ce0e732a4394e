"""Where even ranges of a bucket begin and end inside its members."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from intarsia.layout import Member


def bucket_borders(
    members: Sequence[Member], sizes: Sequence[int], targets: Sequence[int], snap: Callable[[Member, int], int]
) -> list[tuple[int, ...]]:
    """For each member the len(targets) + 2 borders, counted in its own elements, that cuts of the bucket at `targets` make in it.

    The bucket is `sizes[m]` places for each member, end to end; `targets` are places in it, rising. `snap(member, place)` says at which element of the member a
    cut at one of its places is made; it must keep order.
    """
    begins = [0, *accumulate(sizes)]
    borders: list[list[int]] = [[0] for _ in members]
    for target in targets:
        # Members before the one that holds the target are wholly left of the border, those after it wholly right.
        cut = bisect_right(begins, target) - 1
        for index, member in enumerate(members):
            inside = member.numel if index < cut else 0
            borders[index].append(snap(member, target - begins[index]) if index == cut else inside)
    return [(*found, member.numel) for found, member in zip(borders, members, strict=True)]
