"""Who lives where: rings for whole parameters, and the two buffers in which gradients are packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia_flexshard.bucket import Bucket
from intarsia_flexshard.lanes import Lanes
from intarsia_flexshard.reduction import Pack, Reduction
from intarsia_flexshard.ring import Slot, make_slots
from intarsia_flexshard.sharing import LENT, aligned, buffers_needed, group, may_lend, slots_needed, turns_of


def make_memory(buckets: Sequence[Bucket], turns: Sequence[Bucket], kept: Sequence[Bucket], depth: int, lanes: Lanes) -> None:
    """Give every bucket of `turns` (those that take turns, in execution order) a place in a ring, every one of `kept` memory of its own, and every reduction a pack.

    Backward leaves the last bucket first. If no other of its slot is needed there, gradients are packed where its parameters were.
    """
    packed, received = _pack_sizes(buckets)
    count, scratches = buffers_needed(sum(bucket.reduction is not None for bucket in buckets), lanes.on_device)
    wanted = count * packed + scratches * received
    keys = {id(bucket.groups.gather): number for number, bucket in enumerate(turns)}
    forward_only, numbers = [not bucket.needs_backward for bucket in turns], turns_of([bucket.drivers for bucket in turns])
    lent: Slot | None = None
    for places in group([(bucket.payload.whole_bytes, keys[id(bucket.groups.gather)]) for bucket in turns]):
        ring = [turns[place] for place in places]
        needed = slots_needed([numbers[place] for place in places], depth, [bucket.spec.keep for bucket in ring])
        lends = may_lend(places, numbers, needed, forward_only) and wanted <= LENT * max(bucket.payload.whole_bytes for bucket in ring)
        slots = make_slots(ring, needed, lanes, wanted if lends else 0)
        lent = slots[0] if lends else lent
    for bucket in kept:
        make_slots([bucket], 1, lanes)
    reductions = [bucket.reduction for bucket in buckets if bucket.reduction is not None]
    if not reductions:
        return
    # Zeros: between members there may be gaps, which are summed with the rest.
    reducer = next(bucket.groups.reduce for bucket in buckets if bucket.reduction is not None)
    memory = reducer.empty(wanted, torch.uint8, "gradients").zero_() if lent is None else lent.buffer.zero_()
    packs = []
    for number in range(count):
        scratch = memory[count * packed + number % scratches * received :][:received]
        packs.append(Pack(memory[number * packed : (number + 1) * packed], scratch, None, slot=lent))
    if lent is not None:
        lent.packs = packs
    for number, reduction in enumerate(reductions):
        reduction.use(packs[number % count])


def grow_pack(buckets: Sequence[Bucket], reduction: Reduction, size: int, received: int) -> Pack:
    """A pack of its own for everybody who used the pack of `reduction`. What used it is complete first."""
    pack = reduction.pack
    if pack is not None:
        if pack.user is not None:
            pack.user.complete()
        size, received = max(size, pack.buffer.numel()), max(received, pack.scratch.numel())
    reducer = next(bucket.groups.reduce for bucket in buckets if bucket.reduction is not None)
    scratch = torch.empty(received, dtype=torch.uint8, device=reducer.device)
    larger = Pack(reducer.empty(size, torch.uint8, "gradients").zero_(), scratch, None)
    for bucket in buckets:
        if bucket.reduction is not None and bucket.reduction.pack is pack:
            bucket.reduction.use(larger)
    return larger


def _pack_sizes(buckets: Sequence[Bucket]) -> tuple[int, int]:
    """Bytes of a pack, and of what is received for it, that fit every bucket's computed gradients."""
    sizes = [bucket.reduction.pack_bytes(bucket.reduction.narrow) for bucket in buckets if bucket.reduction is not None]
    packed, received = ([size[which] for size in sizes] for which in (0, 1))
    return aligned(max(packed, default=0)), aligned(max(received, default=0))
