"""Which buckets and gradients share memory, and how large it is. Pure integers, torch-free: the runtime lays its memory out by these rules, and plans are counted by them."""

from __future__ import annotations

from collections.abc import Sequence

# Buckets share a ring if the largest is at most this many times the smallest.
SIMILAR = 1.1
# The slot that lends its memory to gradients may be made this much larger for it.
LENT = 1.25
# Buffers for packed gradients, which reductions take turns in.
PACKS = 2
# Buffers come in multiples of so many bytes: what comes after one begins where every kernel likes it.
ALIGNED = 512


def aligned(size: int) -> int:
    """At least `size` bytes."""
    return -(-size // ALIGNED) * ALIGNED


def group(order: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Which buckets share a ring: lists of positions. `order` has for each bucket, in execution order, its bytes and a key that they must share."""
    rings: list[list[int]] = []
    for position in sorted(range(len(order)), key=lambda index: (-order[index][0], index)):
        fitting = [ring for ring in rings if order[ring[0]][1] == order[position][1] and order[ring[0]][0] <= SIMILAR * order[position][0]]
        if fitting:
            fitting[0].append(position)
        else:
            rings.append([position])
    return [sorted(ring) for ring in rings]


def turns_of(drivers: Sequence[tuple[str, ...]]) -> list[int]:
    """Whose turn it is at each place of the execution order: buckets that follow each other and are driven by the same modules are needed at once."""
    turns: list[int] = []
    for place, modules in enumerate(drivers):
        turns.append(turns[-1] + (modules != drivers[place - 1]) if turns else 0)
    return turns


def slots_needed(ring: Sequence[int], depth: int, keeps: Sequence[int]) -> int:
    """Buffers of a ring with buckets that have these turns, gathered `depth` buckets ahead and each given back after `keeps` further ones."""
    window = 1 + max(depth, *keeps)
    return max(sum(first <= other < first + window for other in ring) for first in ring)


def may_lend(ring: Sequence[int], turns: Sequence[int], slots: int, forward_only: Sequence[bool]) -> bool:
    """Whether gradients may be packed in the slot of a ring with buckets at these places: backward leaves the first bucket of the last turn before all others, and needs no other
    of this slot (`forward_only`, by place)."""
    return ring[-1] == turns.index(turns[-1]) and slots == 1 and all(forward_only[place] for place in ring[:-1])


def buffers_needed(reductions: int, on_device: bool) -> tuple[int, int]:
    """Buffers for packed gradients, and for what other ranks send, where so many buckets are reduced."""
    packs = min(PACKS, reductions)
    # On a device the reducing stream orders all uses of one receive buffer; elsewhere exchanges run at once.
    return packs, min(packs, 1) if on_device else packs


def parts_received(ranks: int, on_device: bool) -> int:
    """Ranks' contributions that an exchange writes. A process that computes on CPUs gets its own back, unless there are only two."""
    return ranks if ranks > 2 and not on_device else ranks - 1
