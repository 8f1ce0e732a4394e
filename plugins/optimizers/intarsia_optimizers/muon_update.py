"""Muon's step on tensors: matrices that are whole here, in batches of one shape, and rounds of matrices that travel.

Shape suffixes: B matrices of a batch, M rows, N columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from intarsia.layout import Box, Region, region_parts
from intarsia_transfer.run import run_transfers
from torch import Tensor

from intarsia_optimizers.matrices import Stack, stacks_in
from intarsia_optimizers.ownership import Axes, Journey
from intarsia_optimizers.runs import Member, master_dtype
from intarsia_optimizers.updates import Scalar, Tensors

if TYPE_CHECKING:
    from intarsia.comm import Communicator

Wire = tuple[torch.dtype, torch.dtype]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What carries out the parts of a step: `newton_schulz` with its settings, `muon_directions` and `muon_apply` of `intarsia_optimizers.updates`, or kernels in their place."""

    orthogonal: Callable[[Tensor, Tensor | None], Tensor]
    directions: Callable[..., Tensor | None]
    apply: Callable[..., None]


# Elements of all matrices of one round of transfers: bounds what an owner holds of others' matrices at a time.
ROUND = 2**28


@dataclasses.dataclass(frozen=True)
class Update:
    """A group's settings."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    adjust: str

    def shape_factor(self, rows: int, columns: int) -> float:
        """What the learning rate of a matrix is multiplied by; the decay is not."""
        if self.adjust == "original":
            return math.sqrt(max(1.0, rows / columns))
        if self.adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns) if self.adjust == "spectral" else 1.0


def matrix_view(local: Tensor, stack: Stack) -> Tensor:
    """The matrices of `stack` in a contiguous tensor: [count, rows, columns]."""
    distance = stack.distance or stack.rows * stack.columns
    return local.as_strided((stack.count, stack.rows, stack.columns), (distance, stack.leading, 1), local.storage_offset() + stack.offset)


def gradient_of(member: Member) -> Tensor:
    """The parameter's gradient, contiguous."""
    assert member.parameter.grad is not None
    return member.parameter.grad.contiguous()


def rate(update: Update, factor: Scalar, device: torch.device) -> Scalar:
    """The learning rate of this step."""
    return update.lr * (factor.to(device) if isinstance(factor, Tensor) else factor)


class Whole:
    """Matrices of one shape that are whole here, worked on as one batch. `dtype` is what their directions are rounded to before the iteration."""

    def __init__(self, update: Update, entries: Sequence[tuple[Member, Stack]], dtype: torch.dtype) -> None:
        self.update, self.entries, self.dtype = update, list(entries), dtype
        self.rows, self.columns = entries[0][1].rows, entries[0][1].columns
        self.counts = [stack.count for _, stack in entries]
        self.momenta = [matrix_view(member.states["momentum"], stack) for member, stack in entries]
        self.values = [matrix_view(member.value, stack) for member, stack in entries]
        self.lows = [matrix_view(member.low, stack) for member, stack in entries if member.low is not None] or None

    def run(self, factor: Scalar, kernels: Kernels) -> None:
        """One update of all of them."""
        gradients = [matrix_view(gradient_of(member), stack) for member, stack in self.entries]
        batch_BMN = torch.empty(sum(self.counts), self.rows, self.columns, dtype=self.dtype, device=gradients[0].device)
        directions = list(batch_BMN.split(self.counts))
        squares = kernels.directions(self.momenta, gradients, directions, self.update.momentum, self.update.nesterov)
        # Contiguous: a tall batch may have been worked on transposed. The squares are those of matrices where none is part of a stack.
        result_BMN = kernels.orthogonal(batch_BMN, squares if len(directions) == len(batch_BMN) else None)
        updates = list(result_BMN.contiguous().split(self.counts))
        lr, scale = rate(self.update, factor, batch_BMN.device), self.update.shape_factor(self.rows, self.columns)
        kernels.apply(self.values, self.lows, updates, lr, scale, self.update.weight_decay)


@dataclasses.dataclass(eq=False)
class Traveller:
    """A parameter whose matrices are cut: its part here, its journey, and its matrices here as their owner."""

    member: Member
    journey: Journey
    boxes: Sequence[Box]
    region: Region
    owned_numel: int
    stacks: list[Stack]


class Cut:
    """A round: matrices that are cut travel to their owners in one exchange, are worked on, and their updates travel back in another. `wire` are the dtypes
    in which they do."""

    def __init__(
        self,
        update: Update,
        entries: Sequence[tuple[Member, Journey, Sequence[Box]]],
        comm: Communicator,
        wire: Wire,
        batch_elements: int,
    ) -> None:
        self.update, self.comm, self.wire = update, comm, wire
        self.master = master_dtype(entries[0][0])
        self.travellers = []
        for member, journey, boxes in entries:
            owned = journey.owned.local(comm.rank)
            self.travellers.append(
                Traveller(member, journey, boxes, journey.parts.local(comm.rank), journey.owned.numel(comm.rank), stacks_in(owned, boxes))
            )
        stacks = [(number, stack) for number, traveller in enumerate(self.travellers) for stack in traveller.stacks]
        self.batches = list(_batches(stacks, batch_elements))
        self.device = entries[0][0].value.device

    def run(self, factor: Scalar, kernels: Kernels) -> None:
        """One update of all of them; collective."""
        there, back = self.wire
        journeys = [traveller.journey for traveller in self.travellers]
        here = [traveller for traveller in self.travellers if traveller.member.value.numel()]
        parts, owned, results = self._parts(there), self._owned(there), self._owned(back)
        if here:
            gradients = [gradient_of(traveller.member).view(-1) for traveller in here]
            momenta = [traveller.member.states["momentum"] for traveller in here]
            kernels.directions(momenta, gradients, [part for part in parts if part.numel()], self.update.momentum, self.update.nesterov)
        jobs = [(journey.there, part, whole) for journey, part, whole in zip(journeys, parts, owned, strict=True)]
        run_transfers(self.comm, jobs, "Muon: matrices to their owners")
        for batch in self.batches:
            counts = [stack.count for _, stack in batch]
            batch_BMN = torch.empty(sum(counts), batch[0][1].rows, batch[0][1].columns, dtype=there, device=self.device)
            torch._foreach_copy_(list(batch_BMN.split(counts)), [matrix_view(owned[number], stack) for number, stack in batch])
            result_BMN = kernels.orthogonal(batch_BMN, None)
            torch._foreach_copy_([matrix_view(results[number], stack) for number, stack in batch], list(result_BMN.split(counts)))
        parts = self._parts(back)
        jobs = [(journey.back, whole, part) for journey, part, whole in zip(journeys, parts, results, strict=True)]
        run_transfers(self.comm, jobs, "Muon: updates to their parts")
        if here:
            updates = [part.to(self.master) for part in parts if part.numel()]
            self._adjust(here, updates)
            values, lows = [one.member.value for one in here], [one.member.low for one in here if one.member.low is not None] or None
            kernels.apply(values, lows, updates, rate(self.update, factor, self.device), 1.0, self.update.weight_decay)

    def _parts(self, dtype: torch.dtype) -> Tensors:
        sizes = [traveller.member.value.numel() for traveller in self.travellers]
        return list(torch.empty(sum(sizes), dtype=dtype, device=self.device).split(sizes))

    def _owned(self, dtype: torch.dtype) -> Tensors:
        sizes = [traveller.owned_numel for traveller in self.travellers]
        return list(torch.empty(sum(sizes), dtype=dtype, device=self.device).split(sizes))

    def _adjust(self, travellers: Sequence[Traveller], updates: Tensors) -> None:
        """Multiply each matrix's part of `updates` by its shape's factor."""
        views, factors = [], []
        for traveller, flat in zip(travellers, updates, strict=True):
            shapes = {box.size[-2:] for box in traveller.boxes}
            if len(shapes) == 1:
                views.append(flat)
                factors.append(self.update.shape_factor(*shapes.pop()))
                continue
            for box in traveller.boxes:
                for _, view in region_parts(flat, traveller.region, box):
                    views.append(view)
                    factors.append(self.update.shape_factor(*box.size[-2:]))
        torch._foreach_mul_(views, factors)


def direction_dtype(newton_schulz: torch.dtype, master: torch.dtype) -> torch.dtype:
    """What directions are rounded to before the iteration, and travel in: bfloat16 for an iteration in bfloat16, else the master's."""
    return torch.bfloat16 if newton_schulz == torch.bfloat16 else master


def wire_of(newton_schulz: torch.dtype, master: torch.dtype) -> Wire:
    """In which dtypes cut matrices travel, there and back. What the iteration gives lies between -1.5 and 1.5: float16 holds what any 16-bit one computes."""
    return direction_dtype(newton_schulz, master), torch.float16 if newton_schulz.itemsize == 2 else master


def plan(
    local: Iterable[tuple[Member, Update, Region, Sequence[Box]]],
    cut: Iterable[tuple[Member, Update, Journey, Sequence[Box]]],
    groups: Mapping[Axes, Communicator],
    dtype: torch.dtype,
    batch_elements: int,
) -> tuple[list[Whole], list[Cut]]:
    """The batches and the rounds of a step; `dtype` is Newton-Schulz's. Rounds are the same on all ranks of a group, and so are their parameters' order."""
    alike: dict[tuple[Update, torch.dtype, torch.dtype, torch.device], list[tuple[Member, Stack]]] = {}
    for member, update, region, boxes in local:
        key = (update, member.value.dtype, master_dtype(member), member.value.device)
        alike.setdefault(key, []).extend((member, stack) for stack in stacks_in(region, boxes))
    whole = []
    for (update, _, master, _), entries in alike.items():
        whole += [Whole(update, batch, direction_dtype(dtype, master)) for batch in _batches(entries, batch_elements)]
    rounds: dict[tuple[Axes, Update, torch.dtype, torch.dtype], list[list[tuple[Member, Journey, Sequence[Box]]]]] = {}
    for member, update, journey, boxes in cut:
        started = rounds.setdefault((journey.axes, update, member.value.dtype, master_dtype(member)), [[]])
        if started[-1] and sum(math.prod(other.parts.shape) for _, other, _ in started[-1]) + math.prod(journey.parts.shape) > ROUND:
            started.append([])
        started[-1].append((member, journey, boxes))
    cuts = []
    for (axes, update, _, master), lists in rounds.items():
        cuts += [Cut(update, entries, groups[axes], wire_of(dtype, master), batch_elements) for entries in lists]
    return whole, cuts


def _batches(entries: Iterable[tuple[Member | int, Stack]], most: int) -> Iterable[list]:  # type: ignore[type-arg]
    """`entries` by shape, in lists of at most `most` elements (at least one matrix)."""
    by_shape: dict[tuple[int, int], list[list]] = {}  # type: ignore[type-arg]
    filled: dict[tuple[int, int], int] = {}
    for owner, stack in entries:
        shape = (stack.rows, stack.columns)
        room = max(1, most // (stack.rows * stack.columns))
        batches = by_shape.setdefault(shape, [[]])
        first = 0
        while first < stack.count:
            free = room - filled.get(shape, 0)
            if not free:
                batches.append([])
                filled[shape] = 0
                continue
            count = min(free, stack.count - first)
            batches[-1].append((owner, stack.part(first, count)))
            filled[shape] = filled.get(shape, 0) + count
            first += count
    return [batch for batches in by_shape.values() for batch in batches if batch]
