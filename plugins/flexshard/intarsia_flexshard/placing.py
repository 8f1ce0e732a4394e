"""Which buckets' gradients are written where they are packed, by whoever computes them (`intarsia.ops.gradients`): packing copies nothing then, and a gradient needs no memory beside.

The pack must be the bucket's own from the moment at which backward enters it to the one at which it is left and reduced. So a bucket takes part that is driven by calls within which no other bucket is called,
one of which is outstanding, whose gradients are about to be reduced; and a gradient for which one product asks, once in a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from intarsia.ops.gradients import mark

from intarsia_flexshard.hooks import in_backward

if TYPE_CHECKING:
    from intarsia_flexshard.bucket import Bucket
    from intarsia_flexshard.hooks import Call
    from intarsia_flexshard.reduction import Reduction


class Placing:
    """Offers places in the packs of `buckets`, and marks the weights that may have one; does nothing if not `wanted`."""

    def __init__(self, buckets: Sequence[Bucket], wanted: bool) -> None:
        self._reads: dict[Bucket, list[int]] = {}
        # The backward pass that is under way, and whether it leaves gradients on parameters.
        self._task, self._is_plain = -1, False
        for bucket in buckets if wanted else ():
            reduction = bucket.reduction
            if reduction is None or bucket.is_of_root or bucket.holders is not None or _has_others(bucket, buckets):
                continue
            self._reads[bucket] = [place for place, info in enumerate(bucket.infos) if info.trainable]
            for parameter in reduction.placeable():
                mark(parameter)

    def enter(self, call: Call, is_unsynced: bool) -> None:
        """Backward is about to compute the gradients of a call's bucket, which are reduced as it leaves; `is_unsynced`: with others of the step, or later."""
        bucket = call.bucket
        members = self._reads.get(bucket)
        if is_unsynced or members is None or len(bucket.pending) > 1:
            return
        reduction = bucket.reduction
        assert reduction is not None
        # Numbers are given to calls as they begin and end: another bucket may be reduced while backward is inside of this one.
        if not reduction.can_place or call.end > call.number + 1:
            del self._reads[bucket]
        elif self._accumulates(reduction):
            reads = bucket.payload.reads
            reduction.offer([reads[member] for member in members])

    def _accumulates(self, reduction: Reduction) -> bool:
        """Whether this backward pass adds to parameters' `.grad`. `torch.autograd.grad` hands gradients out, and whoever has them may keep them."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            try:
                nodes = (torch.autograd.graph.get_gradient_edge(parameter).node for parameter in reduction.placeable())
                if not any(map(torch._C._will_engine_execute_node, nodes)):
                    return False  # Nothing of this bucket is computed: another one may tell.
                self._is_plain = True
            except RuntimeError:  # What torch says of a parameter whose gradient is handed out.
                self._is_plain = False
            self._task = task
        return self._is_plain

    def begin_pass(self) -> None:
        """A forward pass begins: a backward pass before it that failed may have left places."""
        if not in_backward():
            for bucket in self._reads:
                assert bucket.reduction is not None
                bucket.reduction.retreat(False)


def _has_others(bucket: Bucket, buckets: Sequence[Bucket]) -> bool:
    """Whether modules of other buckets lie within this one's."""
    within = tuple(f"{name}." for name in bucket.drivers)
    return any(driver.startswith(within) for other in buckets if other is not bucket for driver in other.drivers)
