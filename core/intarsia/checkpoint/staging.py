"""Copies of the state that a save owns until it ends, and the way back from bytes into tensors."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from intarsia.checkpoint.manifest import TensorRecord, tensor_head
from intarsia.checkpoint.planning import Read, first_of_stage, layout_rank, plan_reads
from intarsia.contracts import Box, Region, Stateful, StateItem
from intarsia.errors import CheckpointError, PluginError
from intarsia.layout import DTYPE_BYTES, region_numel, region_parts, whole_region


def dtype_name(dtype: torch.dtype, key: str) -> str:
    """The name in manifests; CheckpointError for dtypes that the format does not have."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(
            f"The state item {key!r} has dtype {dtype}, which checkpoints cannot hold. They hold: {', '.join(DTYPE_BYTES)}."
        )
    return name


@dataclasses.dataclass
class Staged:
    """One rank's share of one save. `tensors` are for the backend's `write`; `records` those of all its tensor items, without pieces; `replicated`
    its copies of replicated tensors; `values` the JSON of the other `items`; `events` mark the ends of device copies that may still run."""

    step: int
    tensors: list[tuple[StateItem, list[tuple[Box, Tensor]]]] = dataclasses.field(default_factory=list)
    records: dict[str, TensorRecord] = dataclasses.field(default_factory=dict)
    replicated: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    items: list[StateItem] = dataclasses.field(default_factory=list)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    events: list[Any] = dataclasses.field(default_factory=list)

    def finish_copies(self) -> None:
        """Wait until all copies off devices have arrived."""
        for event in self.events:
            event.synchronize()

    def heads(self) -> dict[str, dict[str, Any]]:
        """The heads of all items for the rank's part. Hashes, so it belongs on the background thread."""
        heads = {item.key: {"owner": item.owner, "name": item.name, "kind": item.kind, "version": item.version} for item in self.items}
        heads |= {key: tensor_head(record) for key, record in self.records.items()}
        for key, tensor in self.replicated.items():
            heads[key]["sha256"] = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        return heads


def collect(components: Sequence[Stateful]) -> dict[str, tuple[Stateful, StateItem]]:
    """Every component's items by key. PluginError for a key that two have, and for names that one component's `load_state` could not tell apart."""
    found: dict[str, tuple[Stateful, StateItem]] = {}
    for component in components:
        names: set[str] = set()
        for item in component.state():
            if not item.owner or not item.name or "@rank" in item.key:
                raise PluginError(f"The state item {item.key!r} needs an owner and a name, and no '@rank' in them.")
            if item.key in found or item.name in names:
                raise PluginError(
                    f"Two state items are called {item.key!r}: the names of an owner's and of a component's items must be unique."
                )
            if (item.kind == "tensor") != (item.layout is not None and isinstance(item.value, Tensor)):
                raise PluginError(
                    f"The state item {item.key!r} of kind {item.kind}: kind tensor has a torch tensor and a layout, the others no layout."
                )
            names.add(item.name)
            found[item.key] = component, item
    return found


def stage(items: Iterable[StateItem], step: int, rank: int, world: int, mesh: Mapping[str, int]) -> Staged:
    """Copy what this rank has to write. Returns when the copies are made or, off a device, queued behind the work that is already on its stream."""
    staged = Staged(step)
    devices: set[torch.device] = set()
    for item in items:
        if item.kind == "keyed" and not isinstance(item.value, Mapping):
            raise PluginError(f"The state item {item.key!r} of kind keyed must be a JSON object, is {type(item.value).__name__}.")
        if not isinstance(item.value, Tensor):
            staged.items.append(dataclasses.replace(item, value=None))
            staged.values[item.key] = plain(item.value, item.key)
            continue
        pieces = _stage_tensor(item, staged, rank, world, mesh)
        if item.kind == "replicated":
            staged.replicated[item.key] = pieces[0][1] if pieces else torch.empty(0)
        if pieces and (first_of_stage(mesh, rank, world) or item.kind != "replicated"):
            name = f"{item.name}@rank{rank}" if item.kind == "rank" else item.name
            staged.tensors.append((dataclasses.replace(item, name=name, value=None), pieces))
        devices |= {item.value.device} if item.value.is_cuda else set()
    staged.events = [torch.cuda.current_stream(device).record_event() for device in devices]
    return staged


def _stage_tensor(item: StateItem, staged: Staged, rank: int, world: int, mesh: Mapping[str, int]) -> list[tuple[Box, Tensor]]:
    value, key = item.value.detach(), item.key
    dtype = dtype_name(value.dtype, key)
    if item.layout is None:
        shape = tuple(value.shape)
        local = region = whole_region(shape)
    else:
        shape, local = local_region(item, mesh, rank, world)
        index, first = layout_rank(item.layout, mesh, rank, world, key)
        region = item.layout.primary(index) if first and not item.is_copy else ()
    own = rank if item.kind == "rank" else None
    head = TensorRecord(item.owner, item.name, item.kind, item.version, shape, dtype, (), own)
    staged.records[head.key] = head
    flat = value.reshape(-1)
    pieces = []
    for box in region:
        for common, part in region_parts(flat, local, box):
            buffer = torch.empty(common.size, dtype=value.dtype, pin_memory=value.is_cuda)
            pieces.append((common, buffer.copy_(part, non_blocking=value.is_cuda)))
    return pieces


def local_region(item: StateItem, mesh: Mapping[str, int], rank: int, world: int) -> tuple[tuple[int, ...], Region]:
    """Global shape and this rank's region of an item of kind tensor, checked against its value."""
    layout = item.layout
    if layout is None or layout.pending:
        raise PluginError(f"The state item {item.key!r} has a reduction pending; reduce it before it is saved or loaded.")
    if dtype_name(item.value.dtype, item.key) != layout.dtype:
        raise PluginError(f"The state item {item.key!r} has dtype {item.value.dtype}, its layout says {layout.dtype}.")
    region = layout.local(layout_rank(layout, mesh, rank, world, item.key)[0])
    if item.value.numel() != region_numel(region):
        raise PluginError(
            f"The state item {item.key!r} has {item.value.numel()} elements on rank {rank}, its layout gives this rank {region_numel(region)}."
        )
    return layout.shape, region


def plain(value: Any, key: str) -> Any:
    """An own copy of a JSON value; PluginError, naming the item, for what JSON would change (tuples become lists)."""
    if isinstance(value, Mapping):
        if any(not isinstance(name, str) for name in value):
            raise PluginError(f"The state item {key!r} is not JSON: an object's keys must be strings.")
        return {name: plain(inner, key) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, key) for inner in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        raise PluginError(f"The state item {key!r} is not JSON: it holds {value}. Store None or a string instead.")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise PluginError(f"The state item {key!r} is neither a tensor nor JSON: it holds a {type(value).__name__}.")
    return value


class Target:
    """A local tensor that is being filled: `region` in storage order, from a stored tensor `record`."""

    def __init__(self, record: TensorRecord, region: Region, value: Tensor):
        self.record, self.region, self.value = record, region, value.detach()
        self.dtype = getattr(torch, record.dtype)
        # What is not contiguous or on another device is filled in a buffer first and copied over once.
        direct = value.is_contiguous() and value.device.type == "cpu"
        self.flat = self.value.view(-1) if direct else torch.empty(value.numel(), dtype=value.dtype)
        self.direct = direct

    def reads(self) -> Iterable[Read]:
        """What to read."""
        return plan_reads(self.record, self.region)

    def deliver(self, read: Read, data: memoryview) -> None:
        """Put the wanted part of the bytes in place, converting the dtype where it differs."""
        if len(data) != read.piece.length:
            raise CheckpointError(
                f"Tensor {read.piece.key!r}: the backend gave {len(data)} bytes of {read.piece.file!r} at {read.piece.offset}, not {read.piece.length}."
            )
        bytes_ = torch.empty(len(data), dtype=torch.uint8)
        bytes_.numpy()[:] = numpy.frombuffer(data, dtype=numpy.uint8)
        run = bytes_.view(self.dtype)
        held = (Box(read.piece.box_start, read.piece.box_size),)
        for common, part in region_parts(run, held, read.want):
            for _, place in region_parts(self.flat, self.region, common):
                place.copy_(part)

    def finish(self) -> None:
        """Copy a buffered tensor over."""
        if not self.direct:
            self.value.copy_(self.flat.view(self.value.shape))
