"""Memory for whole parameters that buckets take turns in.

A bucket lives in the same slot for ever, so that its parameters are permanent views: nothing is allocated, resized or re-pointed in a step, compiled code finds the
tensors that it was compiled for, and a step can be captured. What a bucket leaves behind stays readable until the next one of its slot is gathered, which is why
the last blocks of the forward pass need no second gather.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intarsia_flexshard.lanes import Lanes

if TYPE_CHECKING:
    from intarsia_flexshard.bucket import Bucket
    from intarsia_flexshard.reduction import Pack

# Buckets share a ring if the largest is at most this many times the smallest.
SIMILAR = 1.1


@dataclasses.dataclass(eq=False)
class Slot:
    """One buffer. `resident` is the bucket whose parameters are in it or on their way; `freed`, if `dirty`, must be waited for before it is filled again, and so
    must what reads the `packs` that lie in it once the last bucket of the forward pass has been left."""

    buffer: Tensor
    staging: Tensor
    freed: Any
    resident: Bucket | None = None
    dirty: bool = False
    packs: list[Pack] = dataclasses.field(default_factory=list)


def aligned(size: int) -> int:
    """At least `size` bytes, so that what comes after begins where every kernel likes it."""
    return math.ceil(size / 512) * 512


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


def slots_needed(ring: Sequence[int], window: int) -> int:
    """Buffers of a ring with buckets at these places of the execution order, `window` neighbours of which are alive at a time."""
    return max(sum(first <= other < first + window for other in ring) for first in ring)


def make_slots(buckets: Sequence[Bucket], count: int, lanes: Lanes, least: int = 0) -> list[Slot]:
    """`count` buffers, each as large as the largest of `buckets` needs and of `least` bytes; the n-th bucket lives in the n-th, counted round."""
    sizes = [max(getattr(bucket.payload, name) for bucket in buckets) for name in ("whole_bytes", "staged_bytes")]
    whole, staged = (aligned(size) for size in (max(sizes[0], least), sizes[1]))
    groups = buckets[0].groups
    # On a device the gathering stream orders all uses of one staging buffer; on a CPU gathers of several slots run at once.
    shared = torch.empty(staged, dtype=torch.uint8, device=groups.gather.device)
    slots = []
    for number in range(count):
        staging = shared if lanes.on_device or number == 0 else torch.empty_like(shared)
        # What also holds gradients is memory that reductions may read from.
        buffer = (
            groups.reduce.empty(whole, torch.uint8, "gradients") if least else torch.empty(whole, dtype=torch.uint8, device=shared.device)
        )
        slots.append(Slot(buffer, staging, lanes.event()))
    for number, bucket in enumerate(buckets):
        bucket.move_to(slots[number % count])
    return slots
