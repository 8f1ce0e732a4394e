"""When whole parameters come and go: gathers in execution order, ahead of their use, both ways."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from intarsia.comm import Communicator
from intarsia.errors import PluginError, UsageError
from torch import nn

from intarsia_flexshard.bucket import Bucket
from intarsia_flexshard.hooks import in_backward
from intarsia_flexshard.lanes import Lanes
from intarsia_flexshard.memory import grow_pack, make_memory
from intarsia_flexshard.ring import make_slots
from intarsia_flexshard.sharing import turns_of

logger = logging.getLogger("intarsia.flexshard")


def needs_weights(module: nn.Module) -> bool:
    """Whether the module's backward reads its parameters. An embedding's does not; others say so by an attribute `backward_reads_weights = False`."""
    return bool(getattr(module, "backward_reads_weights", not isinstance(module, nn.Embedding)))


class Gathers:
    """The moving side of a sharded model's buckets.

    `order` are the buckets that take turns in rings, in execution order, `turns` the same as they are needed together, `kept` those that stay whole to the step's end. `epoch` counts updates. `is_stale` says that the
    masters have changed since they were last encoded, `is_fence_due` that nobody has told the others so.
    """

    def __init__(self, buckets: Sequence[Bucket], lanes: Lanes, comm: Communicator, poison: bool) -> None:
        self.buckets, self._lanes, self._comm, self.poison = list(buckets), lanes, comm, poison
        self.order = [bucket for bucket in buckets if not (bucket.is_alias or bucket.is_kept)]
        self.kept = [bucket for bucket in buckets if bucket.is_kept and not bucket.is_alias]
        self._place = dict(zip((bucket.name for bucket in self.order), turns_of([bucket.drivers for bucket in self.order]), strict=True))
        self.turns: list[list[Bucket]] = [[] for _ in range(len(set(self._place.values())))]
        for bucket in self.order:
            self.turns[self._place[bucket.name]].append(bucket)
        self.depth = max((bucket.spec.prefetch for bucket in buckets), default=0)
        self._wanted_depth = self.depth
        self.epoch, self.is_stale, self.is_fence_due = 0, True, True
        self._groups = list(dict.fromkeys(bucket.groups.gather for bucket in buckets))
        for bucket in buckets:
            if bucket.reduction is not None:
                bucket.reduction.fresh_pack = functools.partial(grow_pack, self.buckets, bucket.reduction)
        self.make_memory()

    def make_memory(self) -> None:
        """Rings and packs for the present depth, and for each bucket whom to gather next."""
        make_memory(self.buckets, self.order, self.kept, self.depth, self._lanes)
        for bucket in self.order:
            bucket.forward, bucket.backward = self._next(bucket, 1, 0), self._next(bucket, -1, 0)
            bucket.further = self._next(bucket, -1, 1)

    def _next(self, bucket: Bucket, direction: int, further: int) -> tuple[Bucket, ...]:
        """What comes next, `further` turns more than the depth says; without `further` also what is needed beside the bucket. Nothing where the depth is 0."""
        if not self.depth:
            return ()
        place = self._place[bucket.name]
        places = [place + direction * step for step in range(1 if further else 0, self.depth + further + 1)]
        ahead = [other for place in places if 0 <= place < len(self.turns) for other in self.turns[place]]
        return tuple(other for other in ahead if other is not bucket and (direction > 0 or other.needs_backward))

    def first(self) -> list[Bucket]:
        """What a forward pass needs before anything else."""
        return [*(bucket for turn in self.turns[: self.depth + 1] for bucket in turn), *self.kept]

    # ------------------------------------------------------------ one bucket

    def launch(self, bucket: Bucket) -> None:
        """Begin to gather unless it is there."""
        slot = bucket.slot
        if slot is None or slot.resident is bucket:
            return
        self._prepare()
        if slot.resident is not None and slot.resident.is_in_use:
            self._resolve_conflict(bucket, slot.resident)
        bucket.launch()

    def _prepare(self) -> None:
        """What comes before every gather."""
        if self.is_stale:
            self._refresh()
        if self.is_fence_due:
            self.fence()

    def prefetch(self, buckets: Sequence[Bucket]) -> None:
        """Begin to gather these (`Bucket.forward`, `backward` or `further`), up to the first whose memory is in use."""
        for ahead in buckets:
            resident = ahead.slot.resident  # type: ignore[union-attr]
            if resident is ahead:
                continue
            if resident is not None and resident.is_in_use:
                return
            if self.is_stale or self.is_fence_due:
                self._prepare()
            ahead.launch()

    def _resolve_conflict(self, bucket: Bucket, other: Bucket) -> None:
        """Two buckets of one slot are needed at once."""
        if in_backward() or bucket.pending:
            raise PluginError(
                f"Buckets {bucket.name!r} and {other.name!r} take turns in one buffer, but both are needed at once: their modules are not run one after the "
                f"other. Give one of them `reshard=never`, or both `reshard='after {bucket.spec.keep + 1}'`."
            )
        logger.warning("Buckets %r and %r are needed at once: %r gets memory of its own.", bucket.name, other.name, bucket.name)
        make_slots([bucket], 1, self._lanes)

    # ------------------------------------------------------------ all of them

    def _refresh(self) -> None:
        """The masters have changed since the last gather."""
        self.is_stale = False
        for bucket in self.buckets:
            bucket.payload.encode()

    def fence(self) -> None:
        """Shards are ready to be read by everybody."""
        self.is_fence_due = False
        lanes = self._lanes
        if lanes.on_device:
            lanes.gather.wait_stream(lanes.compute)
        lanes.enter(lanes.gather)
        for group in self._groups:
            group.fence("shards are updated")
        lanes.leave()

    def drop(self) -> None:
        """The masters change: whatever was gathered from them is given back."""
        self.epoch += 1
        for bucket in (*self.order, *self.kept):
            assert bucket.slot is not None
            if bucket.slot.resident is bucket:
                bucket.settle()
                bucket.free(self.poison)
                bucket.slot.resident = None

    def launch_first(self) -> None:
        """What the next step needs first has been updated: gather it."""
        self.is_stale = False
        self.fence()
        for bucket in self.first():
            if bucket.slot is not None and bucket.slot.resident is None:
                bucket.launch()

    def forget_events(self) -> None:
        """Everything has been joined: no event of the past needs to be waited for."""
        for bucket in (*self.order, *self.kept):
            bucket.is_flying = False
            assert bucket.slot is not None
            bucket.slot.dirty = False
        for bucket in self.buckets:
            if bucket.reduction is not None and bucket.reduction.pack is not None:
                bucket.reduction.pack.dirty, bucket.reduction.pack.user = False, None

    # ------------------------------------------------------------ another depth

    def ask_depth(self, depth: int) -> None:
        """From the next step's border on, look `depth` buckets ahead."""
        if depth < 0:
            raise UsageError(f"prefetch is {depth}; it must be 0 or more.")
        self._wanted_depth = depth

    def change_depth(self) -> bool:
        """At a step's border: another prefetch depth, if the ranks agree. Whether it has changed."""
        if self._wanted_depth == self.depth:
            return False
        self._comm.agree(self._wanted_depth, "the prefetch depth")
        self.drop()
        self.is_stale, self.depth = True, self._wanted_depth
        self.make_memory()
        return True
