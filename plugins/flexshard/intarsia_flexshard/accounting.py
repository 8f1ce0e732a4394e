"""What FlexShard takes and moves, from geometries alone. Pure integers, torch-free.

All numbers are bytes unless they are called elements or parts. What differs between the ranks of a bucket's group is a tuple over them. The rules are those of the
runtime: whole parameters live in rings whose slots buckets share, gradients are packed into two buffers, computed gradients travel in the compute dtype and
accumulated ones in the reduction dtype, and a bucket that is still in its slot is not gathered again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from intarsia.layout import DTYPE_BYTES, region_numel

from intarsia_flexshard.assign import BucketSpec
from intarsia_flexshard.plan import Geometry
from intarsia_flexshard.sharing import LENT, PACKS, aligned, buffers_needed, parts_received
from intarsia_flexshard.wire import Wire, plan_arrival


@dataclasses.dataclass(frozen=True)
class Slots:
    """The optimizer state of one parameter: bytes for each element that a rank holds, and bytes for a parameter of which it holds any."""

    element: float
    parameter: int = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What holds for all buckets. `slots` by parameter; None: unknown. `micro_batches` are those of one rank in a step. `on_device`: exchanges are ordered by a stream
    and share one receive buffer, and a rank's own part is not sent to itself."""

    master: str = "float32"
    is_split: bool = False
    is_sharded_accumulation: bool = False
    micro_batches: int = 1
    slots: Mapping[str, Slots] | None = None
    on_device: bool = True

    @property
    def is_accumulating(self) -> bool:
        """Whether whole gradients wait for the last micro-batch."""
        return self.micro_batches > 1 and not self.is_sharded_accumulation


@dataclasses.dataclass(frozen=True)
class BucketBytes:
    """One bucket. `low` are the low halves of split masters that wait in the host's memory for most of a step (they are in `masters`, too); `cast` what is sent where that is not the masters themselves; `pack` is what its packed gradients take as they
    were computed, `received` those of other ranks that arrive; `gather` and `reduce` are what a rank receives in one of them, `replicas` what it receives in the sum over replicas and uncut shards."""

    spec: BucketSpec
    is_cut: bool
    elements: int
    held: tuple[int, ...]
    counts: tuple[int, ...]
    masters: tuple[int, ...]
    low: tuple[int, ...]
    cast: tuple[int, ...]
    gradients: tuple[int, ...]
    slots: tuple[int, ...] | None
    accumulated: int
    whole: int
    staged: int
    pack: int
    received: tuple[int, ...]
    gather: tuple[int, ...]
    reduce: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def is_kept(self) -> bool:
        """See `BucketSpec.is_kept`."""
        return self.spec.is_kept

    @property
    def is_alias(self) -> bool:
        """Whether the shard is the whole parameter, and nothing is moved."""
        return self.whole == 0

    @property
    def imbalance(self) -> float:
        """The most elements that a rank holds, in parts of what even shares would be."""
        return max(self.held) * len(self.held) / sum(self.held) if sum(self.held) else 1.0

    @property
    def padding(self) -> float:
        """What of a shard is no parameter, in parts of it."""
        return 1.0 - sum(self.held) / sum(self.counts) if sum(self.counts) else 0.0


def measure(
    spec: BucketSpec,
    geometry: Geometry,
    reduction: Geometry,
    is_cut: bool,
    replicas: Sequence[int],
    settings: Settings,
    wire: Wire | None = None,
    read: Sequence[bool] = (),
) -> BucketBytes:
    """The numbers of one bucket.

    `geometry` has the members in the runtime's order, trained ones first; `reduction` those alone. `replicas` are the sizes of the groups over which sums are made
    after the exchange. A quantised bucket has a `wire`, and `read` says which members are read as float8.
    """
    compute, reduce = DTYPE_BYTES[spec.compute], DTYPE_BYTES[spec.reduce]
    master = 2 if settings.is_split else DTYPE_BYTES[settings.master]
    gradient = 4 if settings.is_split else master
    is_same = spec.compute == ("bfloat16" if settings.is_split else settings.master) and spec.offload != "cpu"
    is_alias = not is_cut and is_same and wire is None
    names = [info.name for info in spec.members]
    held = [[region_numel(region) for region in row] for row in geometry.regions]
    trained, total = len(reduction.shapes), geometry.total
    kept = any(start is not None for start in geometry.starts)
    travelling = reduce if settings.is_accumulating else compute
    arrival = None if wire is None else plan_arrival(wire, read, compute)
    if wire is not None and arrival is not None:
        sent, whole, staged = wire.counts, arrival.whole, arrival.staged
    else:
        sent = tuple(count * compute for count in geometry.counts)
        whole, staged = ((total if kept else 0) + geometry.copied) * compute, 0 if kept else total * compute
    slots = None
    if settings.slots is not None:
        slots = tuple(
            sum(_slots(settings.slots.get(name), count) for name, count in zip(names[:trained], row, strict=False)) for row in held
        )
    group = len(geometry.counts)
    parts = parts_received(group, settings.on_device)
    return BucketBytes(
        spec=spec,
        is_cut=is_cut,
        elements=geometry.elements,
        held=tuple(map(sum, held)),
        counts=geometry.counts,
        masters=tuple(count * (master + 2 * settings.is_split) for count in geometry.counts),
        low=tuple(2 * count * (settings.is_split and spec.offload == "low") for count in geometry.counts),
        cast=tuple(0 if is_same and wire is None else size for size in sent),
        gradients=tuple(count * gradient for count in reduction.counts),
        slots=slots,
        accumulated=reduction.elements * reduce if settings.is_accumulating else 0,
        whole=0 if is_alias else whole,
        staged=0 if is_alias else staged,
        pack=0 if reduction.is_bare else reduction.total * compute,
        received=tuple(0 if reduction.is_bare or not is_cut else parts * count * compute for count in reduction.counts),
        gather=tuple(sum(sent) - size if is_cut else 0 for size in sent),
        reduce=tuple((group - 1) * count * travelling if is_cut else 0 for count in reduction.counts),
        # A ring's sum: every rank receives each part once to add and once to have.
        replicas=tuple(sum(2 * (size - 1) * count * gradient // size for size in replicas) for count in reduction.counts),
    )


def _slots(slots: Slots | None, held: int) -> int:
    return 0 if slots is None or not held else round(slots.element * held) + slots.parameter


def count_gathers(
    buckets: Sequence[BucketBytes], slots: Sequence[tuple[int, int] | None], micro_batches: int, forward_only: Sequence[bool]
) -> list[int]:
    """How often each bucket is gathered in a step.

    `buckets` are in execution order, `slots` the (ring, slot) that each lives in (None: it is not gathered); `forward_only` those whose backward
    needs no parameters. A bucket is gathered where a pass needs it and another has taken its slot; in a step's first pass nothing is there yet.
    """
    found = [0] * len(buckets)
    resident: dict[tuple[int, int] | None, int] = {}
    forward = [index for index, slot in enumerate(slots) if slot is not None]
    # What the model itself drives is there for the whole pass, so that it is asked for once only.
    backward = [index for index in reversed(forward) if not forward_only[index]]
    for index in [*forward, *backward] * micro_batches:
        if resident.get(slots[index]) != index:
            resident[slots[index]] = index
            found[index] += 1
    return found


@dataclasses.dataclass(frozen=True)
class RankBytes:
    """One rank. `optimizer` is None where it is unknown; `host` is what lives in the host's memory: masters, gradients and optimizer state of `offload=cpu`, which are not in the others, and the
    copies of low halves, whose own memory `away` is given back by the time when activations are at their most."""

    masters: int
    cast: int
    gradients: int
    optimizer: int | None
    accumulated: int
    whole: int
    pack: int
    host: int
    away: int
    gather: int
    reduce: int
    replicas: int

    @property
    def device(self) -> int:
        """Everything that is known on the device."""
        return self.masters + self.cast + self.gradients + (self.optimizer or 0) + self.accumulated + self.whole + self.pack


@dataclasses.dataclass(frozen=True)
class Ring:
    """`count` slots of `whole` bytes, and what is staged for one of them. `may_lend`: backward leaves it first, and needs nothing else of it."""

    count: int
    whole: int
    staged: int
    may_lend: bool = False


def rank_bytes(
    buckets: Sequence[BucketBytes],
    places: Sequence[int],
    gathers: Sequence[int],
    rings: Sequence[Ring],
    reductions: int,
    settings: Settings,
) -> RankBytes:
    """What a rank at `places[b]` of bucket b's group has; `reductions` is how many reductions each bucket has in a step."""
    sums = dict.fromkeys(("masters", "cast", "gradients", "optimizer", "host", "away", "gather", "reduce", "replicas"), 0)
    is_known = True
    for bucket, place, count in zip(buckets, places, gathers, strict=True):
        is_known &= bucket.slots is not None
        state = {
            "masters": bucket.masters[place],
            "gradients": bucket.gradients[place],
            "optimizer": bucket.slots[place] if bucket.slots else 0,
        }
        for name, size in state.items():
            sums["host" if bucket.spec.offload == "cpu" else name] += size
        sums["away"] += bucket.low[place]
        sums["host"] += bucket.low[place]
        sums["cast"] += bucket.cast[place]
        sums["gather"] += bucket.gather[place] * count
        sums["reduce"] += bucket.reduce[place] * reductions
        sums["replicas"] += bucket.replicas[place] * reductions
    whole, pack = _buffers(buckets, places, rings, settings)
    return RankBytes(
        accumulated=sum(bucket.accumulated for bucket in buckets),
        whole=whole,
        pack=pack,
        **{**sums, "optimizer": sums["optimizer"] if is_known else None},  # type: ignore[arg-type]
    )


def _buffers(buckets: Sequence[BucketBytes], places: Sequence[int], rings: Sequence[Ring], settings: Settings) -> tuple[int, int]:
    """Bytes of whole parameters, and of packed gradients beside them: they lie in a slot that backward has left where that is large enough."""
    packed = [(bucket, bucket.received[place]) for bucket, place in zip(buckets, places, strict=True) if any(bucket.gradients)]
    count, scratches = buffers_needed(len(packed), settings.on_device)
    pack = aligned(max((bucket.pack for bucket, _ in packed), default=0))
    received = aligned(max((size for _, size in packed), default=0))
    wanted = count * pack + scratches * received
    lender = next((ring for ring in rings if ring.may_lend and wanted <= LENT * ring.whole), None)
    # On a device the gathering stream orders all uses of a ring's staging buffer, and one will do.
    whole = sum(ring.count * aligned(max(ring.whole, wanted * (ring is lender))) for ring in rings)
    whole += sum((1 if settings.on_device else ring.count) * aligned(ring.staged) for ring in rings)
    beside = 0 if lender is not None else wanted
    if settings.is_accumulating and any(bucket.spec.reduce != bucket.spec.compute for bucket, _ in packed):
        # Accumulated gradients are wider, and get packs of their own when they are first sent.
        beside = 0
        for number in range(count):
            turns = [
                (bucket, DTYPE_BYTES[bucket.spec.reduce], DTYPE_BYTES[bucket.spec.compute], size) for bucket, size in packed[number::PACKS]
            ]
            beside += max(pack, *(bucket.pack // narrow * wide for bucket, wide, narrow, _ in turns))
            beside += max(received, *(size // narrow * wide for _, wide, narrow, size in turns))
    return whole, beside
