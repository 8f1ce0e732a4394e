"""A bucket: parameters that are gathered by one collective and reduced by one.

The local shard is one flat buffer; the masters that the optimizer updates are views of it, and so are their gradients of one flat gradient. The whole parameters
are views of a slot of a ring (`intarsia_flexshard.ring`) for as long as the model lives.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from intarsia.contracts import ALIGNMENT_BYTES, Box, Member, Partition, Placement, Region
from intarsia.errors import PluginError, UsageError
from intarsia.layout import DTYPE_BYTES, Layout, region_numel, whole_region
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterInfo, ParameterTable, join_master, split_master
from intarsia_placements.layouts import build_layouts
from torch import Tensor, nn

from intarsia_flexshard.assign import BucketSpec, member_of
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.copies import Holders
from intarsia_flexshard.groups import Groups
from intarsia_flexshard.halves import WaitingHalves
from intarsia_flexshard.hooks import Call, Inputs
from intarsia_flexshard.lanes import Lanes
from intarsia_flexshard.payload import Payload, PlainPayload
from intarsia_flexshard.plan import Geometry, make_geometry
from intarsia_flexshard.quantised import Owner, QuantisedPayload
from intarsia_flexshard.recorded import Recorded, record
from intarsia_flexshard.reduction import Reduction
from intarsia_flexshard.ring import Slot
from intarsia_flexshard.wire import make_wire, tile_of


class BalancedPlacement:
    """A placement that knows what the ranks were given in earlier buckets. See `docs/how-to/write-a-placement.md`."""

    def __init__(self, placement: Any, loads: list[float]) -> None:
        self.name, self.accepts, self._placement, self.loads = placement.name, placement.accepts, placement, loads

    def partition(self, members: Any, ranks: int) -> Any:
        """See `intarsia.contracts.Placement`."""
        found = self._placement.partition_balanced(members, ranks, self.loads)
        for member, regions in zip(members, found.regions, strict=True):
            for rank, region in enumerate(regions):
                self.loads[rank] += (member.cost or member.numel) * region_numel(region) / max(member.numel, 1)
        return found


def balanced(placement: Placement, loads: dict[tuple[str, ...], list[float]], axes: tuple[str, ...], ranks: int) -> Placement:
    """The placement, told of the `loads` that ranks over `axes` have, if it can balance them."""
    if not hasattr(placement, "partition_balanced"):
        return placement
    return BalancedPlacement(placement, loads.setdefault(axes, [0.0] * ranks))


class Bucket:
    """One bucket of a sharded model.

    `whole` are the model's own parameters by canonical name, `masters` the local parts. `running` are forward calls that are under way (and their inputs), `pending`
    those whose backward has still to leave; `entered` says that a backward pass is inside, `is_held` that a schedule keeps the bucket whole, `open` that a reduction is due. `holders` are the pipeline stages
    that have its one parameter too. `hidden` are the inputs of calls whose outputs showed no tensor.
    """

    def __init__(
        self,
        spec: BucketSpec,
        placement: Placement,
        table: ParameterTable,
        mesh: Mesh,
        groups: Groups,
        lanes: Lanes,
        config: FlexShardConfig,
        readers: Mapping[str, Sequence[Owner]],
        holders: Holders | None = None,
    ) -> None:
        self.holders = holders
        self.spec, self.name, self.groups, self.lanes, self.is_split = spec, spec.name, groups, lanes, config.master == "split"
        self._tile, self._power_of_two = config.tile, config.scales == "power_of_two"
        self.infos: list[ParameterInfo] = spec.members
        self.is_kept = spec.is_kept
        # What stays whole anyway and is needed in several places is gathered as the model's forward begins.
        self.drivers = ("",) if self.is_kept and len(spec.modules) > 1 else spec.modules
        self.compute_dtype = getattr(torch, spec.compute)
        self.master_dtype = torch.bfloat16 if self.is_split else getattr(torch, table.dtype)
        shapes, regions, self.is_cut = lay_out(spec, self.infos, placement, table, mesh, config)
        self.index = groups.gather.rank if self.is_cut else 0
        self.geometry, of_trained = make_geometries(spec, shapes, regions, table.dtype, self.is_split)
        self.trained = [info for info in self.infos if info.trainable]
        self.trained_names = tuple(info.name for info in self.trained)
        self._make_shard(table)
        self._make_whole(readers)
        self.reduction = self._make_reduction(of_trained)
        self.slot: Slot | None = None
        self.gather: Any = None
        self.arrived = lanes.event()
        self.is_flying, self.needs_backward = False, True
        self.entered, self.open, self.is_held = False, True, False
        self.running: list[tuple[Call, Inputs | None]] = []
        self.pending: set[weakref.ref[Call]] = set()
        self.hidden: list[Inputs] = []
        self.is_of_root = "" in self.drivers
        # Whom to gather beside this one and ahead: forward, and as backward enters it; then what is one turn further still, as backward leaves it.
        self.forward: tuple[Bucket, ...] = ()
        self.backward: tuple[Bucket, ...] = ()
        self.further: tuple[Bucket, ...] = ()

    # ------------------------------------------------------------ what the bucket is made of

    def _make_shard(self, table: ParameterTable) -> None:
        """The flat masters and the parameters that are views of them, filled with initial values."""
        device = self.groups.gather.device
        count = self.geometry.counts[self.index]
        self.is_offloaded = self.spec.offload == "cpu"
        if self.is_offloaded:
            self.shard = torch.zeros(count, dtype=self.master_dtype, pin_memory=device.type == "cuda")
        elif self.spec.payload == "plain" and self.master_dtype == self.compute_dtype:
            self.shard = self.groups.gather.empty(count, self.master_dtype, f"shard {self.name}").zero_()
        else:
            self.shard = torch.zeros(count, dtype=self.master_dtype, device=device)
        self.low = torch.zeros(count, dtype=torch.int16, device=self.shard.device) if self.is_split else None
        self.halves = WaitingHalves(self.low, self.lanes) if self.low is not None and self.spec.offload == "low" else None
        self.masters: dict[str, nn.Parameter] = {}
        lows = self._views(self.low) if self.low is not None else [None] * len(self.infos)
        for info, view, low in zip(self.infos, self._views(self.shard), lows, strict=True):
            assert info.layout is not None
            region = info.layout.local(table.rank_in(info.layout))
            if low is None:
                table.fill(info.name, region, view)
            else:
                values = torch.empty(view.shape, dtype=torch.float32, device=view.device)
                table.fill(info.name, region, values)
                split_master(values, view, low)
            master = nn.Parameter(view, requires_grad=info.trainable)
            if low is not None:
                master.grad_dtype = torch.float32  # type: ignore[attr-defined]
                info.low = low
            self.masters[info.name] = master

    def _make_whole(self, readers: Mapping[str, Sequence[Owner]]) -> None:
        """The model's parameters, and what brings values into them."""
        device, dtype = self.groups.gather.device, self.compute_dtype
        parameters = [nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=info.trainable) for info in self.infos]
        self.whole = {info.name: parameter for info, parameter in zip(self.infos, parameters, strict=True)}
        # One holder and one dtype: the shard is the whole parameter, and there is nothing to move.
        same = self.shard.dtype == dtype and not self.is_offloaded
        self.is_alias = not self.is_cut and same and self.spec.payload == "plain"
        self.payload: Payload
        if self.spec.payload == "fp8":
            wire = make_wire(self.geometry, [tile_of(info.shape, self._tile) for info in self.infos], dtype.itemsize)
            sent = self.groups.gather.empty(wire.counts[self.index], torch.uint8, f"float8 of {self.name}")
            owners = [readers[info.name] for info in self.infos]
            self.payload = QuantisedPayload(
                wire, self.geometry, self.index, self.shard, sent, parameters, owners, dtype, self._tile, self._power_of_two
            )
            return
        cast = None if same else torch.zeros(self.shard.numel(), dtype=dtype, device=device)
        self.payload = PlainPayload(self.geometry, self.shard, cast, parameters, dtype)
        if self.is_alias:
            self.payload.bind(self.shard.view(torch.uint8), self.shard.new_empty(0, dtype=torch.uint8))

    def _make_reduction(self, geometry: Geometry) -> Reduction | None:
        if not self.trained:
            return None
        ranks = self.groups.reduce.size * self.groups.replicas.size
        scale = 1.0 / (self.spec.divisor or ranks) if self.spec.reduce_op == "average" else 1.0
        copies: list[Any] = [self.groups.replicas] if self.is_cut else [self.groups.reduce, self.groups.replicas]
        copies += [] if self.holders is None else [self.holders]
        return Reduction(
            self.name,
            [self.whole[info.name] for info in self.trained],
            [self.masters[info.name] for info in self.trained],
            geometry,
            self.index,
            self.groups.reduce if self.is_cut and self.groups.reduce.size > 1 else None,
            copies,
            (self.compute_dtype, getattr(torch, self.spec.reduce), torch.float32 if self.is_split else self.master_dtype),
            scale,
            self.lanes,
            self.is_offloaded,
        )

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Each member's part of this rank's buffer: in the shape of the member or of its box where it is one, else 1-D."""
        found = []
        for shape, region, offset in zip(
            self.geometry.shapes, self.geometry.regions[self.index], self.geometry.offsets[self.index], strict=True
        ):
            part = buffer[offset : offset + region_numel(region)]
            if region == whole_region(shape):
                part = part.view(shape)
            elif len(region) == 1:
                part = part.view(region[0].size)
            found.append(part)
        return found

    # ------------------------------------------------------------ memory and motion

    @property
    def calls(self) -> int:
        """Forward calls whose backward has still to leave."""
        return len(self.pending)

    def expect(self, call: Call) -> None:
        """Backward has still to leave this call, unless nothing can reach it any more."""
        call.reference = weakref.ref(call, self.pending.discard)
        self.pending.add(call.reference)

    def forget_calls(self) -> None:
        """Nobody uses the bucket, and no backward pass is expected."""
        self.entered, self.is_held = False, False
        self.running.clear()
        self.pending.clear()
        self.hidden.clear()

    @property
    def is_in_use(self) -> bool:
        """Whether somebody may be reading the whole parameters."""
        return bool(self.running) or self.entered or self.is_held

    def move_to(self, slot: Slot) -> None:
        """Live in `slot` from now on."""
        self.slot = slot
        self.payload.bind(slot.buffer, slot.staging)
        if self.is_cut:
            self.gather = self.groups.gather.prepare_gather(
                self.payload.send(), self.payload.arrival, self.payload.counts, f"unshard {self.name}"
            )

    def record(self) -> None:
        """CUDA, at a step's border: collectives cost the host one launch each from now on."""
        if self.gather is not None:
            self.gather = record(self.gather)
        if self.reduction is not None:
            self.reduction.record()

    def _lose(self) -> None:
        """A gather has failed: nobody may take what is in the slot for the parameters."""
        assert self.slot is not None
        self.slot.resident, self.is_flying = None, False
        self.lanes.leave()

    def launch(self) -> None:
        """Begin to fill the slot. Nobody may be using it."""
        slot, lanes, gather, payload = self.slot, self.lanes, self.gather, self.payload
        assert slot is not None
        try:
            if slot.resident is not None and slot.resident.is_flying:
                slot.resident.settle()
            slot.resident, self.is_flying = self, True
            if slot.dirty:
                slot.freed.wait(lanes.gather)
                slot.dirty = False
            for pack in slot.packs:
                if pack.holder is not None:
                    pack.holder.retreat()
                    lanes.follow_compute()
                if pack.dirty:
                    pack.read.wait(lanes.gather)
                elif pack.user is not None:
                    pack.user.complete()
            lanes.enter(lanes.gather)
            if (observer := lanes.observer) is not None:
                observer.begin("gather", self.name)
            source = payload.send()
            if gather is not None:
                gather.start()
            else:
                payload.arrival.copy_(source)
            if lanes.on_device:
                payload.decode()
                self.arrived.record(lanes.gather)
                if isinstance(gather, Recorded):
                    gather.watch(self.arrived)
            if observer is not None:
                observer.end("gather", self.name)
            lanes.enter(lanes.compute)
        except BaseException:
            self._lose()
            raise

    def settle(self) -> None:
        """Whatever is computed from now on finds the whole parameters in the slot."""
        if not self.is_flying:
            return
        self.is_flying = False
        if (observer := self.lanes.observer) is not None:
            observer.enter("wait", self.name)
        if self.lanes.on_device:
            self.arrived.wait(self.lanes.compute)
        else:
            try:
                if self.gather is not None:
                    self.gather.wait()
                self.payload.decode()
            except BaseException:
                self._lose()
                raise
        if observer is not None:
            observer.leave("wait", self.name)

    def free(self, poison: bool) -> None:
        """The slot may be filled again after what was computed so far; with `poison` a use until then reads NaN."""
        slot = self.slot
        if slot is None or slot.resident is not self:
            return
        if poison:
            self.settle()
            slot.resident = None
            self.payload.poison()
        if slot.freed is not None:
            slot.freed.record(self.lanes.compute)
            slot.dirty = True

    # ------------------------------------------------------------ values and facts

    def values(self) -> dict[str, Tensor]:
        """The masters: their live storages, or float32 copies where they are split."""
        if self.low is None:
            return {name: master.detach() for name, master in self.masters.items()}
        if self.halves is not None:
            self.halves.arrive()
        lows = self._views(self.low)
        return {name: join_master(master.detach(), low) for (name, master), low in zip(self.masters.items(), lows, strict=True)}

    def take(self, values: dict[str, Tensor]) -> None:
        """Take masters back that `values` gave as copies."""
        if self.halves is not None:
            self.halves.arrive()
        for info in self.infos:
            value, master = values.get(info.name), self.masters[info.name].detach()
            if value is not None and info.low is not None:
                split_master(value, master, info.low)
            elif value is not None and value.data_ptr() != master.data_ptr():
                master.copy_(value)

    def facts(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        return {
            "bucket": self.name,
            "members": [[info.name, list(info.shape), info.trainable] for info in self.infos],
            "dtypes": [str(self.master_dtype), str(self.compute_dtype), self.spec.reduce],
            "axes": [list(self.spec.axes), list(self.spec.replicas)],
        }

    def sizes(self) -> dict[str, Any]:
        """What the ranks of the bucket's groups must agree on: others may have other pieces of what was cut before."""
        return {
            "bucket": self.name,
            "gather": self.geometry.facts(),
            "wire": list(self.payload.counts),
            "reduce": self.reduction.geometry.facts() if self.reduction is not None else [],
        }


def lay_out(
    spec: BucketSpec, infos: Sequence[ParameterInfo], placement: Placement, table: ParameterTable, mesh: Mesh, config: FlexShardConfig
) -> tuple[list[tuple[int, ...]], list[list[Region]], bool]:
    """Write each parameter's Layout and bucket; returns the shapes of the members on this rank's side of outer cuts, the regions by rank of the shards'
    group in those members' own index space, and whether anything is cut. The placement is asked once, over the ranks of all axes together."""
    if not isinstance(placement, Placement):
        lacks = [name for name in ("name", "accepts", "partition") if not hasattr(placement, name)]
        raise PluginError(
            f"Bucket {spec.name!r}: {type(placement).__name__}, which {type(spec.placement).__name__} chooses, is no placement: it lacks {', '.join(lacks)}. "
            "See intarsia.contracts.Placement."
        )
    cuts = [(axis, mesh.sizes[axis]) for axis in spec.axes if mesh.sizes[axis] > 1]
    joint = "+".join(axis for axis, _ in cuts)
    origins, shapes = [], []
    outer_groups: dict[Any, list[ParameterInfo]] = {}
    for info in infos:
        outer_groups.setdefault(tuple((axis, size, placement == "replicate") for axis, size, placement in info.outer), []).append(info)
    pieces: dict[str, Box] = {}
    for parameters in outer_groups.values():
        outer = _outer_steps(parameters)
        members = [dataclasses.replace(member_of(info, owners=config.owners), tile=_tile(spec, info, config)) for info in parameters]
        named = {axis for axis, _, _ in outer}
        inner: list[Any] = [(axis, mesh.sizes[axis], "replicate") for axis in spec.replicas if axis not in named and mesh.sizes[axis] > 1]
        inner += [(joint, math.prod(size for _, size in cuts), placement)] if cuts else []
        held, layouts = build_layouts(members, outer), build_layouts(members, [*outer, *inner])
        for info in parameters:
            info.layout, info.bucket = _apart(layouts[info.name], joint, cuts), spec.name
            pieces[info.name] = _outer_piece(info, held[info.name], table)
    for info in infos:
        origins.append(pieces[info.name].start)
        shapes.append(pieces[info.name].size)
    cut_axes = {axis for axis in spec.axes if mesh.sizes[axis] > 1}
    first = infos[0].layout
    assert first is not None
    is_cut = any(axis in cut_axes and kind == "cut" for (axis, _), kind in zip(first.axes, first.kinds, strict=True))
    ranks = math.prod(mesh.sizes[axis] for axis in spec.axes) if is_cut else 1
    regions = []
    for rank in range(ranks):
        row = []
        for info, origin in zip(infos, origins, strict=True):
            boxes = _region_at(info, mesh, spec.axes, rank)
            row.append(tuple(Box(tuple(a - o for a, o in zip(box.start, origin, strict=True)), box.size) for box in boxes))
        regions.append(row)
    return shapes, regions, is_cut


def _apart(layout: Layout, joint: str, cuts: Sequence[tuple[str, int]]) -> Layout:
    """The layout with its axis `joint` as the axes that it was made of."""
    axes, kinds = [], []
    for axis, kind in zip(layout.axes, layout.kinds, strict=True):
        parts = list(cuts) if axis[0] == joint else [axis]
        axes += parts
        kinds += [kind] * len(parts)
    return dataclasses.replace(layout, axes=tuple(axes), kinds=tuple(kinds))


def make_geometries(
    spec: BucketSpec, shapes: Sequence[tuple[int, ...]], regions: Sequence[Sequence[Region]], master: str, is_split: bool
) -> tuple[Geometry, Geometry]:
    """Of all members, and of the trained ones alone, whose gradients are reduced. Members begin where the narrowest dtype that they ever have is aligned."""
    narrowest = min(*(DTYPE_BYTES[name] for name in (master, spec.compute, spec.reduce)), 2 if is_split else 8)
    alignment, trained = ALIGNMENT_BYTES // narrowest, sum(info.trainable for info in spec.infos)
    return make_geometry(shapes, regions, alignment), make_geometry(shapes[:trained], [row[:trained] for row in regions], alignment)


class OuterCuts:
    """One step of cuts before data parallelism, in which each parameter has a placement of its own (columns of one matrix, rows of the next)."""

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        self._placements = dict(placements)
        distinct = {id(placement): placement for placement in self._placements.values()}
        self.name = " or ".join(dict.fromkeys(placement.name for placement in distinct.values()))
        self.accepts: Literal["box", "region"] = "box" if any(each.accepts == "box" for each in distinct.values()) else "region"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        chosen: dict[int, list[int]] = {}
        for index, member in enumerate(members):
            chosen.setdefault(id(self._placements[member.name]), []).append(index)
        regions: list[tuple[Region, ...]] = [()] * len(members)
        for indices in chosen.values():
            answer = self._placements[members[indices[0]].name].partition([members[index] for index in indices], ranks)
            for index, row in zip(indices, answer.regions, strict=True):
                regions[index] = row
        return Partition(tuple(members), ranks, tuple(regions))


def _outer_steps(parameters: Sequence[ParameterInfo]) -> list[Any]:
    """The outer cuts of parameters that are cut over the same axes, as steps for all of them."""
    steps: list[Any] = []
    for number, (axis, size, placement) in enumerate(parameters[0].outer):
        cuts = {info.name: info.outer[number][2] for info in parameters}
        steps.append((axis, size, placement if placement == "replicate" else OuterCuts(cuts)))  # type: ignore[arg-type]
    return steps


def _tile(spec: BucketSpec, info: ParameterInfo, config: FlexShardConfig) -> tuple[int, ...] | None:
    """What must not be cut: the tiles that share a scale."""
    return tile_of(info.shape, config.tile) if spec.payload == "fp8" else None


def _outer_piece(info: ParameterInfo, layout: Layout, table: ParameterTable) -> Box:
    """The box of the parameter that this rank's model has; `layout` has the outer cuts only."""
    if not info.outer:
        return Box.whole(info.shape)
    region = layout.local(table.rank_in(layout))
    if not region:
        # Along a dimension that is whole in every piece it is whole here; of the others there is nothing.
        sizes = zip(info.shape, *(box.size for piece in layout.regions for box in piece), strict=True)
        left = tuple(whole if set(parts) == {whole} else 0 for whole, *parts in sizes)
        return Box((0,) * len(left), left if 0 in left else (0, *left[1:]))
    if len(region) != 1:
        raise UsageError(
            f"Parameter {info.name!r}: the cuts {[axis for axis, _, _ in info.outer]} leave {len(region)} boxes on a rank. A module's own "
            "parameter must be one box: cut it along one dimension (row or column), or into blocks that are one."
        )
    return region[0]


def _region_at(info: ParameterInfo, mesh: Mesh, axes: Sequence[str], shard: int) -> Region:
    """What the rank number `shard` of the group over `axes` stores, this process's other coordinates being as they are."""
    layout = info.layout
    assert layout is not None
    coordinates = dict(mesh.coordinates)
    for axis in sorted(axes, key=list(mesh.sizes).index, reverse=True):
        shard, coordinates[axis] = divmod(shard, mesh.sizes[axis])
    rank = 0
    for axis, size in layout.axes:
        rank = rank * size + coordinates[axis]
    return layout.local(rank)
