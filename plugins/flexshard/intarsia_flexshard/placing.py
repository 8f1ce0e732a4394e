"""Which buckets' gradients are written where they are packed, by whoever computes them (`intarsia.ops.gradients`): packing copies nothing then, and a gradient needs no memory beside.

The pack must be the bucket's own from the moment at which backward enters it to the one at which it is left and reduced. So a bucket takes part that is driven by calls within which no other bucket is left,
one of which is outstanding, whose gradients are about to be reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from intarsia.ops import gradients

from intarsia_flexshard.hooks import in_backward

if TYPE_CHECKING:
    from torch import Tensor

    from intarsia_flexshard.bucket import Bucket
    from intarsia_flexshard.reduction import Reduction


class Placing:
    """Offers places in the packs of `buckets`, and marks the weights that may have one; does nothing if not `wanted`."""

    def __init__(self, buckets: Sequence[Bucket], wanted: bool) -> None:
        self._reads: dict[Bucket, list[int]] = {}
        self._offering: Reduction | None = None
        for bucket in buckets if wanted else ():
            if bucket.reduction is None or bucket.is_of_root or bucket.holders is not None or _has_others(bucket, buckets):
                continue
            self._reads[bucket] = [place for place, info in enumerate(bucket.infos) if info.trainable]
            for parameter in bucket.reduction.placeable():
                gradients.mark(parameter)

    def enter(self, bucket: Bucket, is_unsynced: bool) -> None:
        """Backward is about to compute the bucket's gradients, which are reduced as it leaves; `is_unsynced`: with others of the step, or later."""
        members = self._reads.get(bucket)
        if is_unsynced or members is None or len(bucket.pending) > 1:
            return
        reduction = bucket.reduction
        assert reduction is not None
        reads: list[Tensor] = bucket.payload.reads
        reduction.offer([reads[member] for member in members])
        self._offering = reduction

    def begin_pass(self) -> None:
        """A forward pass begins: a backward pass before it that failed may have left places."""
        if self._offering is not None and not in_backward():
            self._offering.retreat(False)
            self._offering = None


def _has_others(bucket: Bucket, buckets: Sequence[Bucket]) -> bool:
    """Whether modules of other buckets are called within this one's."""
    within = tuple(f"{name}." for name in bucket.drivers)
    return any(driver.startswith(within) for other in buckets if other is not bucket for driver in other.drivers)
