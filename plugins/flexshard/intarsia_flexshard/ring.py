"""Memory for whole parameters that buckets take turns in.

A bucket lives in the same slot for ever, so that its parameters are permanent views: nothing is allocated, resized or re-pointed in a step, compiled code finds the
tensors that it was compiled for, and a step can be captured. What a bucket leaves behind stays readable until the next one of its slot is gathered, which is why
the last blocks of the forward pass need no second gather.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intarsia_flexshard.lanes import Lanes
from intarsia_flexshard.sharing import aligned

if TYPE_CHECKING:
    from intarsia_flexshard.bucket import Bucket
    from intarsia_flexshard.reduction import Pack


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
