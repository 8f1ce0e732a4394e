"""A bucket: parameters that are gathered and reduced together, by one collective each.

The local shard is one flat buffer in the master dtype; the parameters that the optimizer updates are views of it. The whole parameters live in a second flat
buffer, in the compute dtype, whose memory comes and goes while the tensors that view it stay, so that whatever autograd has saved of a parameter
is right again when the buffer has been filled again. All offsets are in elements and the same for every dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.contracts import ALIGNMENT_BYTES, Box, Region
from intarsia.layout import DTYPE_BYTES, Layout, region_numel, slices, whole_region
from intarsia.parameters import ParameterInfo, ParameterTable
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of member number `member` and where its elements begin in the rank-major buffer of all ranks' shards."""

    member: int
    box: Box
    offset: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where everything of some members lies, for every rank that cuts them. `offsets[r][m]` is in rank r's own buffer of `counts[r]` elements."""

    regions: tuple[tuple[Region, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]

    def pieces(self) -> list[Piece]:
        """All boxes of all ranks."""
        found, base = [], 0
        for regions, offsets, count in zip(self.regions, self.offsets, self.counts, strict=True):
            for member, (region, offset) in enumerate(zip(regions, offsets, strict=True)):
                position = base + offset
                for box in region:
                    found.append(Piece(member, box, position))
                    position += box.numel
            base += count
        return found


def make_plan(regions: Sequence[Sequence[Region]], alignment: int) -> Plan:
    """The plan for `regions[r][m]`: members in order, each beginning at a multiple of `alignment` elements."""
    offsets, counts = [], []
    for mine in regions:
        positions = [0]
        for region in mine:
            positions.append(positions[-1] + -(-region_numel(region) // alignment) * alignment)
        offsets.append(tuple(positions[:-1]))
        counts.append(positions[-1])
    return Plan(tuple(map(tuple, regions)), tuple(offsets), tuple(counts))


class Bucket:
    """One bucket of a sharded model.

    `shards` is the group of mesh axis dp_shard and `replicas` that of dp_replicate. `whole` are the model's own parameters by canonical name: on a bucket that is not
    unsharded they read as NaN. `masters` are the local parts. `open` says that a reduction is due, `entered` that a backward pass is inside, `calls` how many
    forward calls' backward has still to leave.
    """

    def __init__(
        self, name: str, infos: Sequence[ParameterInfo], table: ParameterTable, shards: Communicator, replicas: Communicator, debug: bool
    ) -> None:
        self.name, self.infos, self.shards, self.replicas, self.debug = name, list(infos), shards, replicas, debug
        dtypes = (table.dtype, table.compute, table.reduce)
        self.master_dtype, self.compute_dtype, self.reduce_dtype = (getattr(torch, dtype) for dtype in dtypes)
        alignment = ALIGNMENT_BYTES // min(DTYPE_BYTES[dtype] for dtype in dtypes)
        layouts = [_layout(info) for info in self.infos]
        self.is_cut = any(axis == "dp_shard" and kind == "cut" for (axis, _), kind in zip(layouts[0].axes, layouts[0].kinds, strict=True))
        self.index = shards.rank if self.is_cut else 0
        regions = [[_region_at(layout, table, shard) for layout in layouts] for shard in range(shards.size if self.is_cut else 1)]
        self.plan = make_plan(regions, alignment)
        self.trained = [index for index, info in enumerate(self.infos) if info.trainable]
        self.reduction = make_plan([[mine[index] for index in self.trained] for mine in regions], alignment)
        self._reduced = self.reduction.pieces()

        device = shards.device
        self.shard = torch.zeros(self.plan.counts[self.index], dtype=self.master_dtype, device=device)
        self.masters: dict[str, nn.Parameter] = {}
        for info, local in zip(self.infos, self._local_views(self.shard, self.plan, self.infos), strict=True):
            self.masters[info.name] = nn.Parameter(local, requires_grad=info.trainable)
        # One rank and one dtype: the shard is the whole parameter, and there is nothing to move.
        self.is_alias = len(self.plan.counts) == 1 and self.master_dtype == self.compute_dtype
        whole_plan = make_plan([[whole_region(info.shape) for info in self.infos]], alignment)
        self._full = self.shard if self.is_alias else torch.empty(whole_plan.counts[0], dtype=self.compute_dtype, device=device)
        self._views = self._local_views(self._full, whole_plan, self.infos, rank=0)
        self._targets = [(piece, self._views[piece.member][slices(piece.box)]) for piece in self.plan.pieces()]
        # What a released parameter shows: its shape, and NaN wherever it is read. Memory that is gone would crash the process on a CPU.
        released = torch.full((), math.nan, dtype=self.compute_dtype, device=device)
        self._released = [released.expand(info.shape) for info in self.infos]
        self.whole: dict[str, nn.Parameter] = {}
        for info, view, stand_in in zip(self.infos, self._views, self._released, strict=True):
            # Made from the stand-in and not from the view, whose version counter every gather moves: autograd would refuse what it has saved.
            parameter = nn.Parameter(stand_in, requires_grad=info.trainable)
            parameter.data = view
            self.whole[info.name] = parameter
        self.is_unsharded = True
        self._gradients: dict[int, Tensor] = {}
        self.open, self.entered, self.calls = True, False, 0
        self.release()

    def facts(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        members = [[info.name, list(info.shape), info.trainable, _layout(info).to_json()["regions"]] for info in self.infos]
        return {"bucket": self.name, "members": members, "counts": list(self.plan.counts), "reduced": list(self.reduction.counts)}

    # ------------------------------------------------------------ parameters

    @torch.no_grad()
    def unshard(self) -> None:
        """Make the whole parameters readable: one gather, or a cast where nothing is cut. Nothing when they are."""
        if self.is_unsharded:
            return
        self._full.untyped_storage().resize_(self._full.numel() * self._full.element_size())
        source = self.shard
        if self.is_cut:
            source = self.shards.gather_v(self.shard.to(self.compute_dtype), self.plan.counts, f"unshard {self.name}")
        for piece, target in self._targets:
            target.copy_(source[piece.offset : piece.offset + piece.box.numel].view(piece.box.size))
        for parameter, view in zip(self.whole.values(), self._views, strict=True):
            parameter.data = view
        self.is_unsharded = True

    def release(self) -> None:
        """Give the whole parameters' memory back."""
        if self.is_alias or not self.is_unsharded:
            return
        for parameter, stand_in in zip(self.whole.values(), self._released, strict=True):
            parameter.data = stand_in
        if self.debug:
            self._full.fill_(math.nan)
        else:
            self._full.untyped_storage().resize_(0)
        self.is_unsharded = False

    # ------------------------------------------------------------ gradients

    def take(self, member: int, parameter: Tensor) -> None:
        """Move the gradient that backward has left on a whole parameter to where it waits for the reduction: the first is kept, later ones are added."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if member in self._gradients:
            self._gradients[member].add_(gradient)
        else:
            self._gradients[member] = gradient.to(self.reduce_dtype)
        self.open = True

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the waiting gradients over the ranks, by one reduce-scatter, into the masters' `.grad`. What has none here contributes zeros."""
        self.open = False
        if not self.trained:
            return
        buffer = torch.zeros(sum(self.reduction.counts), dtype=self.reduce_dtype, device=self.shard.device)
        for piece in self._reduced:
            gradient = self._gradients.get(self.trained[piece.member])
            if gradient is not None:
                buffer[piece.offset : piece.offset + piece.box.numel].view(piece.box.size).copy_(gradient[slices(piece.box)])
        self._gradients.clear()
        if self.is_cut:
            buffer = self.shards.reduce_scatter_v(buffer, self.reduction.counts, "sum", f"reduce {self.name}")
        elif self.shards.size > 1:
            self.shards.all_reduce(buffer, "sum", f"reduce {self.name}")
        if self.replicas.size > 1:
            self.replicas.all_reduce(buffer, "sum", f"reduce {self.name} over replicas")
        trained = [self.infos[index] for index in self.trained]
        for info, part in zip(trained, self._local_views(buffer.to(self.master_dtype), self.reduction, trained), strict=True):
            master = self.masters[info.name]
            master.grad = part if master.grad is None else master.grad.add_(part)

    def forget(self) -> None:
        """Drop all gradients."""
        self._gradients.clear()
        for master in self.masters.values():
            master.grad = None
        self.open = True

    # ------------------------------------------------------------ private

    def _local_views(self, buffer: Tensor, plan: Plan, infos: Sequence[ParameterInfo], rank: int | None = None) -> list[Tensor]:
        """Each member's part of one rank's buffer: in the shape of the whole tensor or of its box where it is one, else 1-D."""
        views = []
        rank = self.index if rank is None else rank
        for info, region, offset in zip(infos, plan.regions[rank], plan.offsets[rank], strict=True):
            part = buffer[offset : offset + region_numel(region)]
            if region == whole_region(info.shape):
                part = part.view(info.shape)
            elif len(region) == 1:
                part = part.view(region[0].size)
            views.append(part)
        return views


def _layout(info: ParameterInfo) -> Layout:
    assert info.layout is not None
    return info.layout


def _region_at(layout: Layout, table: ParameterTable, shard: int) -> Region:
    """What the rank at coordinate `shard` of dp_shard stores, this process's other coordinates being as they are."""
    rank = 0
    for axis, size in layout.axes:
        assert table.mesh is not None
        rank = rank * size + (shard if axis == "dp_shard" else table.mesh.coordinates[axis])
    return layout.local(rank)
