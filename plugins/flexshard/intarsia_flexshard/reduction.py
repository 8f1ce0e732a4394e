"""A bucket's gradients: from what backward leaves on whole parameters to the sum over ranks on the masters' shards.

Gradients are packed once, straight into the buffer that the exchange reads: a contiguous member by one copy, others box by box. They travel in the dtype in which
they were computed and are added in float32, in the order of the ranks: the sum is that of float32 gradients at half the bytes. Only what was accumulated over
micro-batches travels in the reduction dtype, in which it was accumulated.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from intarsia.comm import Communicator, add_parts
from intarsia.errors import PluginError
from intarsia.layout import slices
from intarsia.ops.gradients import ALIGNMENT, Place, offer, withdraw
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from intarsia_flexshard.lanes import Lanes
from intarsia_flexshard.plan import Geometry
from intarsia_flexshard.recorded import Recorded, record
from intarsia_flexshard.ring import Slot
from intarsia_flexshard.sharing import parts_received


@dataclasses.dataclass(eq=False)
class Pack:
    """A buffer in which gradients are packed, and one for what other ranks send; `read`, if `dirty`, must be waited for before it is filled again. `is_followed` says that the
    computing stream has been made to. It may lie in a `slot`, whose parameters it then destroys. `holder` has offered places in it, which backward is filling."""

    buffer: Tensor
    scratch: Tensor
    read: Any
    dirty: bool = False
    is_followed: bool = False
    user: Reduction | None = None
    holder: Reduction | None = None
    slot: Slot | None = None

    def claim(self) -> bool:
        """Take the slot's memory; False where somebody may be reading parameters there."""
        if self.slot is None or self.slot.resident is None:
            return True
        if self.slot.resident.is_in_use:
            return False
        self.slot.resident.settle()
        self.slot.resident = None
        return True


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a member's gradient goes in the pack: views, and for members that are not contiguous the boxes of the gradient that belong there."""

    views: tuple[Tensor, ...]
    boxes: tuple[tuple[slice, ...], ...] | None


@dataclasses.dataclass
class Plan:
    """How gradients of one dtype are packed and exchanged: the pack as `source`, each member's `targets` in it, `views` where each has just one, and the prepared `call`. `sums` is what the
    last exchange brought, and `add` adds it: most bring the same views every time."""

    source: Tensor
    targets: list[Target]
    views: list[Tensor] | None
    call: Any
    sums: Sums | None = None
    add: Callable[[Tensor], None] | None = None


def add_scaled(parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """`add_parts`, times `scale`; in float32 where `out` is narrower, and rounded once."""
    total = out if out.element_size() >= 4 else torch.empty_like(out, dtype=torch.float32)
    add_parts(parts, total)
    if scale != 1.0:
        total.mul_(scale)
    if total is not out:
        out.copy_(total)


def prepare_add(parts: Sequence[Tensor], scale: float) -> Callable[[Tensor], None]:
    """`add_scaled` of these into what it is called with."""
    return lambda out: add_scaled(parts, out, scale)


Adders = tuple[Callable[[Sequence[Tensor], Tensor, float], None], Callable[[Sequence[Tensor], float], Callable[[Tensor], None]]]


class Sums(NamedTuple):
    """What ranks have sent, before it is added: for optimizers that add it themselves (see `intarsia_optimizers.wires`)."""

    parts: tuple[Tensor, ...]
    scale: float
    begins: Mapping[nn.Parameter, int]


@functools.cache
def best_sums(device_type: str) -> Adders:
    """`add_scaled` and `prepare_add`: the fused ones where their kernels are installed and can run, else these."""
    if device_type == "cuda" and importlib.util.find_spec("intarsia_kernels") and importlib.util.find_spec("triton"):
        from intarsia_kernels.optimizer import sum as fused

        return fused.add_parts, fused.prepare_add
    return add_scaled, prepare_add


class Reduction:
    """The gradients of one bucket's trained members.

    `parameters` are the whole ones, `masters` those that get `.grad`; both in the order of `geometry`. `shards` is the group that exchanges (None where nothing is
    cut), `copies` are groups over which the result is summed afterwards. `narrow` is the dtype of computed gradients, `wide` that of accumulated
    ones, `dtype` that of the masters' gradients. `host` asks for gradients in the host's pinned memory.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        masters: Sequence[nn.Parameter],
        geometry: Geometry,
        index: int,
        shards: Communicator | None,
        copies: Sequence[Communicator],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        scale: float,
        lanes: Lanes,
        host: bool = False,
    ) -> None:
        self.name, self.parameters, self.masters, self.geometry = name, list(parameters), list(masters), geometry
        self._shards, self._copies, self._lanes, self._host = shards, [group for group in copies if group.size > 1], lanes, host
        self.narrow, self.wide, self._dtype = dtypes
        (self._add, self._prepare_add), self._scale = best_sums(parameters[0].device.type), scale
        self._parts: Sequence[Tensor] = ()
        self._count = geometry.counts[index]
        self._parts_of = splitter(geometry, index, self.masters)
        self._begins = dict(zip(self.masters, geometry.offsets[index], strict=True))
        # Kernels may multiply and add in one: only powers of two give the bits of doing one after the other.
        self._is_plain = not self._copies and not host and math.frexp(scale)[0] == 0.5
        # A bucket of one parameter that lies there as its gradient does is sent without being packed.
        self._is_bare = geometry.is_bare
        self._accumulated: list[Tensor | None] = [None] * len(self.parameters)
        self._is_accumulating = False
        self._plans: dict[torch.dtype, Plan] = {}
        self.pack: Pack | None = None
        # Gives larger buffers, of so many bytes, where the bucket's own are too small.
        self.fresh_pack: Callable[[int, int], Pack]
        self.done = lanes.event()
        self._packed = lanes.event()
        self._nothing = torch.empty(0, dtype=self._dtype, device=parameters[0].device)
        self._result: Tensor | None = None
        self._total: Tensor | None = None
        self._given: list[Tensor] = []
        self._running: Any = None
        self._kept: tuple[Any, ...] = ()
        self.is_waiting = False
        # By member a place in the pack, where its gradient can have one, and whether one product asks for it. What is offered: member, what products read of it, place.
        can = [start is not None and not self._is_bare and not host for start in geometry.starts]
        self._places: list[Place | None] = [Place() if each else None for each in can]
        self._are_asked_for = [False] * len(self.parameters)
        self._offered: list[tuple[int, Tensor, Place]] = []
        self._then: Callable[[Sums | None], None] | None = None
        self._hands_on = False

    def pack_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes to pack gradients of `dtype` and to receive the others'; 0 where they are sent as they are."""
        return (0, 0) if self._is_bare else self._sizes(dtype)

    def _sizes(self, dtype: torch.dtype) -> tuple[int, int]:
        ranks = 1 if self._shards is None else self._shards.size
        received = parts_received(ranks, self._lanes.on_device) * self._count
        return self.geometry.total * dtype.itemsize, received * dtype.itemsize

    @property
    def can_hand_on(self) -> bool:
        """Whether an optimizer may be given what the next reduction brings, before it is added."""
        return self._is_plain and self._total is None

    def has_gradients(self) -> bool:
        """Whether backward has left something on the whole parameters."""
        return any(parameter.grad is not None for parameter in self.parameters)

    # ------------------------------------------------------------ places in the pack

    @property
    def can_place(self) -> bool:
        """Whether any gradient may be written where it is packed."""
        return any(self._places)

    def placeable(self) -> list[nn.Parameter]:
        """The parameters whose gradients may be."""
        return [parameter for parameter, place in zip(self.parameters, self._places, strict=True) if place is not None]

    def offer(self, reads: Sequence[Tensor]) -> None:
        """Gradients may be written where they are packed, until `start`, which comes before any other bucket's. `reads` is what products read of each parameter.

        First it is only counted who asks: a place is for a gradient for which one product asks, once. Where the pack is not laid out yet, or the host would have to wait for it, packing copies.
        """
        if self._is_accumulating or self._offered:
            return
        plan = self._plans.get(self.narrow)
        holds = plan is not None and any(self._are_asked_for) and self._hold()
        for member, (parameter, read, place) in enumerate(zip(self.parameters, reads, self._places, strict=True)):
            if place is None or parameter.grad is not None:
                continue
            view = plan.targets[member].views[0] if plan is not None and holds and self._are_asked_for[member] else None
            place.tensor = view if view is not None and view.data_ptr() % ALIGNMENT == 0 else None
            offer(read, place)
            self._offered.append((member, read, place))

    def _hold(self) -> bool:
        """Whether the pack is this bucket's from now on."""
        pack = self.pack
        if pack is None or pack.holder is not None:
            return False
        if not self._lanes.on_device and any(user is not None and user.is_waiting for user in (pack.user, self)):
            return False
        if not pack.claim():
            return False
        self.complete()
        self._follow(pack)
        pack.holder = self
        return True

    def _withdraw(self, learns: bool = False) -> list[tuple[nn.Parameter, Tensor]]:
        """Nobody takes places any more; those that were taken. With `learns` backward has come to its end here, and who asked for places is known."""
        taken = []
        for member, read, place in self._offered:
            withdraw(read)
            parameter = self.parameters[member]
            if place.is_taken and place.tensor is not None:
                taken.append((parameter, place.tensor))
            if learns and place.takes == 1:
                self._are_asked_for[member] = True
            elif learns and (place.takes or parameter.grad is not None):
                self._places[member] = None
        self._offered = []
        return taken

    def retreat(self, strict: bool = True) -> None:
        """Take what lies in the pack out of it. PluginError, if `strict`, where somebody has taken a place and its gradient has not arrived: it would be overwritten."""
        taken = self._withdraw()
        if self.pack is not None and self.pack.holder is self:
            self.pack.holder = None
        for parameter, place in taken:
            if parameter.grad is None and strict:
                raise PluginError(
                    f"Bucket {self.name!r}: its memory is needed for another bucket while one of its gradients is on the way there. Put modules whose calls overlap into one bucket "
                    "(sharder.buckets), or set sharder.placed=false."
                )
            if parameter.grad is not None and parameter.grad.data_ptr() == place.data_ptr():
                parameter.grad = parameter.grad.clone()

    # ------------------------------------------------------------ a step

    def accumulate(self) -> None:
        """Put what backward has left aside: the first is kept (in the reduction dtype), later ones are added."""
        self.retreat()
        for index, parameter in enumerate(self.parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            before = self._accumulated[index]
            self._is_accumulating = True
            if before is None:
                self._accumulated[index] = gradient.to(self.wide)
            else:
                before.add_(gradient)

    def start(
        self,
        is_wide: bool,
        then: Callable[[Sums | None], None] | None = None,
        takes_sums: bool = False,
    ) -> None:
        """Begin to sum what is there over the ranks.

        `is_wide`: micro-batches were accumulated in this step (the same on all ranks). `then` runs behind the sum with the masters' `.grad` in place, which are dropped afterwards. With `takes_sums` it may instead
        be given what was to be added, and nothing is.
        """
        if self.pack is not None and self.pack.holder not in (None, self):
            self.pack.holder.retreat()  # type: ignore[union-attr]
        dtype = self.wide if is_wide else self.narrow
        lanes, gradients = self._lanes, self._gather_up(is_wide)
        bare = gradients[0] if self._is_bare else None
        if bare is not None and bare.is_contiguous() and bare.dtype == dtype:
            source, running, pack, plan = bare.view(-1), self._prepare(bare.view(-1), None), None, None
        else:
            pack = self._free_pack(dtype)
            plan = self._fill(pack, dtype, gradients)
            source, running = plan.source, plan.call
            pack.user, pack.dirty, pack.is_followed = self, lanes.on_device, False
        self._kept = (source, gradients if pack is None else None)
        self._hands_on = takes_sums and self.can_hand_on
        self._result = None if self._hands_on else torch.empty(self._count, dtype=self._dtype, device=source.device)
        self._running = running
        if lanes.on_device:
            self._packed.record(lanes.compute)
            self._packed.wait(lanes.reduce)
            lanes.enter(lanes.reduce)
            if (observer := lanes.observer) is not None:
                observer.begin("reduce", self.name)
            running.start(self._nothing)
            if not self._hands_on:
                self._sum(plan)
            if observer is not None:
                observer.end("reduce", self.name)
            if then is not None:
                self._go_on(then, plan)
            self.done.record(lanes.reduce)
            if pack is not None:
                pack.read = self.done
            if isinstance(running, Recorded):
                running.watch(self.done)
            lanes.enter(lanes.compute)
            if then is None:
                self._attach()
        else:
            if (observer := lanes.observer) is not None:
                observer.begin("reduce", self.name)
            running.start(self._nothing)
            if observer is not None:
                observer.end("reduce", self.name)
            self._then = then
        self.is_waiting = True

    def _gather_up(self, is_wide: bool) -> list[Tensor | None]:
        """What backward has left, and what was put aside before, by parameter; nothing stays behind."""
        if is_wide:
            self.retreat()
            if self.narrow != self.wide:
                self.accumulate()
        if self._offered:
            self._withdraw(learns=True)
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if self._is_accumulating:
            gradients = [_plus(kept, gradient) for kept, gradient in zip(self._accumulated, gradients, strict=True)]
            self._accumulated, self._is_accumulating = [None] * len(self.parameters), False
        return gradients

    def _free_pack(self, dtype: torch.dtype) -> Pack:
        """The bucket's pack, or a larger one, when nobody reads it any more."""
        pack = self.pack
        if pack is not None and pack.holder is self:
            return pack
        if pack is None or not (dtype in self._plans or self._fits(pack, dtype)) or not pack.claim():
            pack = self.use(self.fresh_pack(*self._sizes(dtype)))
        self._follow(pack)
        return pack

    def _follow(self, pack: Pack) -> None:
        """What is computed from now on comes after everything that reads the pack."""
        if pack.user is not None and pack.user.is_waiting and pack.user is not self:
            pack.user.complete()
        if pack.dirty and not pack.is_followed:
            pack.read.wait(self._lanes.compute)

    def _fits(self, pack: Pack, dtype: torch.dtype) -> bool:
        size, received = self._sizes(dtype)  # Of what is sent as it is too, if it is missing or lies otherwise.
        return pack.buffer.numel() >= size and pack.scratch.numel() >= received

    def complete(self) -> None:
        """Whatever is computed from now on comes after the sum, and the masters have their `.grad`."""
        if not self.is_waiting:
            return
        if (observer := self._lanes.observer) is not None:
            observer.enter("wait for sum of", self.name)
        if self._lanes.on_device:
            self.is_waiting = False
            self.done.wait(self._lanes.compute)
            if self.pack is not None and self.pack.user is self:
                self.pack.is_followed = True
            if self._host:
                self.done.synchronize()
        else:
            self._running.wait()
            self.is_waiting = False
            if not self._hands_on or self._then is None:
                self._sum(None)
                self._attach()
        if observer is not None:
            observer.leave("wait for sum of", self.name)
        if self._then is not None:
            self._go_on(self._then, None)
        self._kept, self._running, self._result, self._then = (), None, None, None

    def cancel(self) -> None:
        """What was to run behind the sum does not."""
        self._then = None

    def forget(self) -> None:
        """Drop all gradients."""
        self.complete()
        self._total, self._given = None, []
        self._accumulated, self._is_accumulating = [None] * len(self.parameters), False
        for parameter in (*self.masters, *self.parameters):
            parameter.grad = None
        self.retreat(False)

    # ------------------------------------------------------------ private

    def use(self, pack: Pack) -> Pack:
        """The bucket packs there from now on."""
        self.retreat()
        self.pack, self._plans = pack, {}
        return pack

    def _plan(self, pack: Pack, dtype: torch.dtype) -> Plan:
        source = pack.buffer[: self.geometry.total * dtype.itemsize].view(dtype)
        targets = [_target(self.geometry, member, source) for member in range(len(self.parameters))]
        whole = [target.views[0] for target in targets if target.boxes is None]
        return Plan(source, targets, whole if len(whole) == len(targets) else None, self._prepare(source, pack.scratch))

    def _fill(self, pack: Pack, dtype: torch.dtype, gradients: Sequence[Tensor | None]) -> Plan:
        plan = self._plans.get(dtype)
        if plan is None:
            plan = self._plans[dtype] = self._plan(pack, dtype)
        if pack.holder is self:
            pack.holder = None
            return self._fill_by_member(plan, gradients)
        there = [gradient for gradient in gradients if gradient is not None]
        if plan.views is not None and len(there) == len(plan.views):
            torch._foreach_copy_(plan.views, there)
            return plan
        return self._fill_by_member(plan, gradients)

    def _fill_by_member(self, plan: Plan, gradients: Sequence[Tensor | None]) -> Plan:
        """Whatever does not lie in its place already; zeros where there is no gradient."""
        into: list[Tensor] = []
        values: list[Tensor] = []
        for target, gradient in zip(plan.targets, gradients, strict=True):
            if gradient is None:
                torch._foreach_zero_(target.views)
                continue
            if target.boxes is None and gradient.data_ptr() == target.views[0].data_ptr():
                continue
            into += target.views
            values += [gradient] if target.boxes is None else [gradient[box] for box in target.boxes]
        if into:
            torch._foreach_copy_(into, values)
        return plan

    def _prepare(self, source: Tensor, scratch: Tensor | None) -> Any:
        if self._shards is None:
            return _Alone(source, self._take)
        scratch = None if scratch is None else scratch[: scratch.numel() // source.itemsize * source.itemsize].view(source.dtype)
        return self._shards.prepare_reduce_scatter(source, self.geometry.counts, f"reduce {self.name}", self._take, scratch)

    def record(self) -> None:
        """CUDA, at a step's border: exchanges cost the host one launch each from now on."""
        for plan in self._plans.values():
            if plan.sums is not None and not isinstance(plan.call, (_Alone, Recorded)):
                plan.call = record(plan.call, self._nothing)

    def _take(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """What the exchange calls when all parts are there: they are summed afterwards."""
        self._parts = parts

    def _go_on(self, then: Callable[[Sums | None], None], plan: Plan | None) -> None:
        """Do what was to come behind the sum."""
        if self._hands_on:
            then(self._received(plan))
        else:
            self._attach()
            then(None)
            self._detach()

    def _received(self, plan: Plan | None) -> Sums:
        """What is to be added. A recorded exchange calls nobody: what it brings is known from before."""
        parts, self._parts = self._parts, ()
        known = None if plan is None else plan.sums
        if known is not None and all(map(operator.is_, parts, known.parts)):
            return known
        sums = Sums(tuple(parts), self._scale, self._begins)
        if plan is not None:
            plan.sums, plan.add = sums, None
        return sums

    def _sum(self, plan: Plan | None) -> None:
        """Add the parts in the order of the ranks; then replicas, and what earlier micro-batches of the step have left."""
        if self._result is None:  # It was to be handed on.
            self._result = torch.empty(self._count, dtype=self._dtype, device=self._nothing.device)
        parts = self._received(plan).parts
        if plan is None:
            self._add(parts, self._result, self._scale)
        else:
            if plan.add is None:
                plan.add = self._prepare_add(parts, self._scale)
            plan.add(self._result)
        for group in self._copies:
            group.all_reduce(self._result, "sum", f"reduce {self.name} over replicas")
        if self._host and self._lanes.on_device:
            pinned = torch.empty(self._count, dtype=self._dtype, pin_memory=True)
            self._kept = (*self._kept, self._result)  # It is read from until `complete`.
            self._result = pinned.copy_(self._result, non_blocking=True)
        if self._total is not None:
            self._heed()
            if self._host and self._lanes.on_device:
                self.done.record(self._lanes.reduce)
                self.done.synchronize()
            self._total.add_(self._result)

    def _attach(self) -> None:
        if self._total is not None:
            return
        assert self._result is not None
        self._total = self._result
        self._given = self._parts_of(self._total)
        for master, part in zip(self.masters, self._given, strict=True):
            master.grad = part

    def _heed(self) -> None:
        """Somebody (an optimizer's `zero_grad`, say) may have dropped or replaced what the masters were given: that is what is added to."""
        for master, part in zip(self.masters, self._given, strict=True):
            if master.grad is None:
                part.zero_()
            elif master.grad is not part:
                part.copy_(master.grad)
            master.grad = part

    def _detach(self) -> None:
        """The gradients have been used; their memory lives until `complete`."""
        self._kept = (*self._kept, self._total, self._result)
        self._total, self._given = None, []
        for master in self.masters:
            master.grad = None


class _Alone:
    """A reduction without other ranks to exchange with."""

    def __init__(self, source: Tensor, combine: Callable[[Sequence[Tensor], Tensor], None]) -> None:
        self._source, self._combine = source, combine

    def start(self, out: Tensor) -> None:
        """The sum of one part."""
        self._combine([self._source], out)

    def wait(self) -> None:
        """It is complete."""


def _plus(kept: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if kept is None or gradient is None:
        return gradient if kept is None else kept
    return kept.add_(gradient)


def splitter(geometry: Geometry, index: int, masters: Sequence[nn.Parameter]) -> Callable[[Tensor], list[Tensor]]:
    """What makes views of a shard, one for each master in its shape; all of them in one call, which is half as long as one for each."""
    # Gaps are parts that nobody takes: tensors of their sizes that have no memory.
    like, taken, position = [], [], 0
    for offset, master in zip((*geometry.offsets[index], geometry.counts[index]), (*masters, None), strict=True):
        if offset > position:
            like.append(torch.empty(1).expand(offset - position))
        if master is not None:
            taken.append(len(like))
            like.append(master.detach())
            position = offset + master.numel()
    # An empty part comes back in one dimension.
    flat = [(place, like[number].shape) for place, number in enumerate(taken) if not like[number].numel() and like[number].dim() != 1]

    def split(shard: Tensor) -> list[Tensor]:
        found = list(_unflatten_dense_tensors(shard, like))
        if len(taken) < len(found):
            found = [found[number] for number in taken]
        for place, shape in flat:
            found[place] = found[place].view(shape)
        return found

    return split


def _target(geometry: Geometry, member: int, pack: Tensor) -> Target:
    shape, start = geometry.shapes[member], geometry.starts[member]
    if start is not None:
        return Target((pack[start : start + math.prod(shape)].view(shape),), None)
    pieces = geometry.pieces(member)
    views = tuple(pack[piece.offset : piece.offset + piece.box.numel].view(piece.box.size) for piece in pieces)
    return Target(views, tuple(slices(piece.box) for piece in pieces))
