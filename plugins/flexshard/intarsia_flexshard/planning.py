"""The plan of a recipe: its model's shapes on the meta device, cut as the runtime would cut them, counted by `intarsia_flexshard.accounting`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from intarsia.comm import SelfCommunicator
from intarsia.config import Recipe
from intarsia.contracts import Placement
from intarsia.errors import UsageError
from intarsia.layout import DTYPE_BYTES, Layout
from intarsia.mesh import AXES, coordinates, full_sizes
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia.plugins import Plugins
from intarsia.train.groups import freeze, optimizer_groups
from torch import nn

from intarsia_flexshard.accounting import BucketBytes, RankBytes, Ring, Settings, Slots, count_gathers, measure, rank_bytes
from intarsia_flexshard.assign import BucketSpec, assign, kept_wide, read_outside, unmatched
from intarsia_flexshard.bucket import balanced, lay_out, make_geometries
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.gathers import needs_weights
from intarsia_flexshard.parameters import check_masters, read_in_forward, running
from intarsia_flexshard.plan import Geometry
from intarsia_flexshard.quantised import reads_payload
from intarsia_flexshard.sharing import group, may_lend, slots_needed, turns_of
from intarsia_flexshard.wire import check_quantisation, make_wire, tile_of

# Elements up to which an optimizer is built on the CPU to see its state, where it cannot be built on the meta device.
CHEAP = 2**24


@dataclasses.dataclass(frozen=True)
class MeshPlace:
    """The mesh as one of its ranks sees it, without any group."""

    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe's buckets on a mesh. `placements` and `gathers` (a step's, by bucket) are in the order of `buckets`; `ranks` has every process. `optimizer` says what state
    there is, or why that is not known."""

    recipe: Recipe
    sizes: Mapping[str, int]
    elements: int
    trained: int
    settings: Settings
    reductions: int
    buckets: tuple[BucketBytes, ...]
    placements: tuple[str, ...]
    gathers: tuple[int, ...]
    ranks: tuple[RankBytes, ...]
    optimizer: str


def make_plan(recipe: Recipe, sizes: Mapping[str, int], plugins: Plugins, on_device: bool = True) -> Plan:
    """The plan of a recipe whose sharder is FlexShard, over a mesh of checked `sizes` that only shares data out, for GPUs or else for processes that compute on CPUs.
    Raises UsageError as the build of a run would."""
    with torch.device("meta"):
        model = plugins.build(recipe.model)
    freeze(recipe.parameter_groups, model)
    precision = recipe.precision
    table = ParameterTable.from_model(model, precision.master, precision.compute, precision.reduce, recipe.train.seed)
    return plan_stage(recipe, model, table, place_in(sizes), plugins, on_device)


def place_in(sizes: Mapping[str, int]) -> MeshPlace:
    """The mesh of these sizes as its first rank sees it."""
    full = full_sizes(sizes)
    return MeshPlace(full, coordinates(full, 0))


def plan_stage(
    recipe: Recipe, model: nn.Module, table: ParameterTable, mesh: Any, plugins: Plugins, on_device: bool = True, driven: int | None = None
) -> Plan:
    """The plan of what is in `model` and `table`, which a paralleliser may have cut, and of the ranks of the pipeline stage that has it. `mesh` has `sizes` and `coordinates` of one
    of them; `driven` is how often a schedule gathers each bucket in a step (None: hooks do, as passes need them). UsageError as of the build of a run. Stability: provisional."""
    config: Any = recipe.sharder
    sizes, train = mesh.sizes, recipe.train
    modules = dict(model.named_modules(remove_duplicate=False))
    outside = read_outside(model)
    blocks = model.regions().blocks  # type: ignore[operator]
    elsewhere = unmatched(config, table.values()) if sizes["pp"] > 1 else ()
    wide, dtypes = kept_wide(model), (table.compute, table.reduce)
    specs = assign(config, table.values(), blocks, running(modules), *dtypes, outside, sizes, elsewhere, wide)
    check_quantisation(config.tile, config.scales)
    check_masters(config.master == "split", table, specs)
    table.mesh = mesh
    slots, optimizer = optimizer_slots(recipe, model, table, plugins)
    data_ranks = sizes["dp_replicate"] * sizes["dp_shard"]
    settings = Settings(
        master=table.dtype,
        is_split=config.master == "split",
        is_sharded_accumulation=config.gradients == "sharded",
        micro_batches=max(math.ceil(math.ceil(train.global_batch / data_ranks) / train.micro_batch), 1),
        slots=slots,
        on_device=on_device,
    )
    read = {name: reads_payload(readers) for name, readers in read_in_forward(table, modules, outside).items()}
    buckets, placements = cut(specs, table, mesh, settings, config, plugins, read)
    only = [not any(needs_weights(modules[name]) for name in spec.modules) for spec in specs]
    places, rings = lay_rings(buckets, only)
    gathers = count_gathers(buckets, places, settings.micro_batches, only)
    if driven is not None:
        gathers = [0 if bucket.is_alias else driven for bucket in buckets]
    reductions = settings.micro_batches if settings.is_sharded_accumulation else 1
    # Ranks at the same places of all groups are alike: each kind is counted once.
    kinds: dict[tuple[int, ...], RankBytes] = {}
    ranks = []
    for each in all_coordinates(sizes, mesh.coordinates["pp"]):
        by_axes = {spec.axes: 0 for spec in specs}
        for axes in by_axes:
            for axis in sizes:
                if axis in axes:
                    by_axes[axes] = by_axes[axes] * sizes[axis] + each[axis]
        key = tuple(by_axes.values())
        if key not in kinds:
            at = [by_axes[bucket.spec.axes] if bucket.is_cut else 0 for bucket in buckets]
            kinds[key] = rank_bytes(buckets, at, gathers, rings, reductions, settings)
        ranks.append(kinds[key])
    return Plan(
        recipe=recipe,
        sizes=dict(sizes),
        elements=sum(math.prod(info.shape) for info in table.values()),
        trained=sum(math.prod(info.shape) for info in table.values() if info.trainable),
        settings=settings,
        reductions=reductions,
        buckets=tuple(buckets),
        placements=tuple(placements),
        gathers=tuple(gathers),
        ranks=tuple(ranks),
        optimizer=optimizer,
    )


def cut(
    specs: Sequence[BucketSpec],
    table: ParameterTable,
    mesh: Any,
    settings: Settings,
    config: FlexShardConfig,
    plugins: Plugins,
    read: Mapping[str, bool],
) -> tuple[list[BucketBytes], list[str]]:
    """Each bucket's numbers and its placement's name. `read` says which parameters are read as float8 where they are gathered so."""
    # Any rank's view of a bucket has the sizes of all that are in its groups.
    table.mesh, sizes = mesh, mesh.sizes
    loads: dict[tuple[str, ...], list[float]] = {}
    buckets, names = [], []
    known: dict[Any, tuple[bool, Geometry, Geometry, list[Layout | None]]] = {}
    for spec in specs:
        placement = balanced(plugins.build(spec.placement), loads, spec.axes, math.prod(sizes[axis] for axis in spec.axes))
        names.append(placement.name)
        infos: list[ParameterInfo] = spec.members
        likeness = _likeness(spec, infos, placement)
        if likeness is None or likeness not in known:
            shapes, regions, is_cut = lay_out(spec, infos, placement, table, mesh, config)
            geometry, reduction = make_geometries(spec, shapes, regions, table.dtype, settings.is_split)
            known[likeness] = is_cut, geometry, reduction, [info.layout for info in infos]
        else:  # As another block's: of a model of many equal blocks over thousands of ranks a few are laid out.
            is_cut, geometry, reduction, layouts = known[likeness]
            for info, layout in zip(infos, layouts, strict=True):
                info.layout, info.bucket = layout, spec.name
        replicas = [math.prod(sizes[axis] for axis in spec.replicas)]
        replicas += [] if is_cut else [math.prod(sizes[axis] for axis in spec.axes)]
        wire = None
        if spec.payload == "fp8":
            wire = make_wire(geometry, [tile_of(info.shape, config.tile) for info in infos], DTYPE_BYTES[spec.compute])
        buckets.append(measure(spec, geometry, reduction, is_cut, replicas, settings, wire, [read[info.name] for info in infos]))
    return buckets, names


def _likeness(spec: BucketSpec, infos: Sequence[ParameterInfo], placement: Placement) -> Any:
    """What a bucket's layouts and geometries follow from, names left out; None where not every placement promises that they do (`by_shape`)."""
    outer = [[(axis, size, cut if isinstance(cut, str) else (type(cut), cut.name)) for axis, size, cut in info.outer] for info in infos]
    placements = [placement, *(cut for info in infos for _, _, cut in info.outer if not isinstance(cut, str))]
    if not all(getattr(each, "by_shape", False) for each in placements):
        return None
    members = tuple((info.shape, info.dtype, info.trainable, tuple(cuts)) for info, cuts in zip(infos, outer, strict=True))
    return type(placement), placement.name, spec.axes, spec.replicas, spec.compute, spec.reduce, spec.payload, members


def lay_rings(buckets: Sequence[BucketBytes], forward_only: Sequence[bool]) -> tuple[list[tuple[int, int] | None], list[Ring]]:
    """The (ring, slot) of each bucket as the runtime gives them out, None for those that are their own shard; and the rings. `forward_only` are buckets whose backward
    reads no parameters."""
    places: list[tuple[int, int] | None] = [None] * len(buckets)
    turns = [index for index, bucket in enumerate(buckets) if not (bucket.is_alias or bucket.is_kept)]
    depth = max((bucket.spec.prefetch for bucket in buckets), default=0)
    keys = {axes: number for number, axes in enumerate(dict.fromkeys(buckets[index].spec.axes for index in turns))}
    numbers, only = turns_of([buckets[index].spec.modules for index in turns]), [forward_only[index] for index in turns]
    rings = []
    for number, members in enumerate(group([(buckets[index].whole, keys[buckets[index].spec.axes]) for index in turns])):
        ring = [turns[member] for member in members]
        count = slots_needed([numbers[member] for member in members], depth, [buckets[index].spec.keep for index in ring])
        for turn, index in enumerate(ring):
            places[index] = (number, turn % count)
        rings.append(_ring(buckets, ring, count, may_lend(members, numbers, count, only)))
    for index, bucket in enumerate(buckets):
        if bucket.is_kept and not bucket.is_alias:
            places[index] = (len(rings), 0)
            rings.append(_ring(buckets, [index], 1, False))
    return places, rings


def _ring(buckets: Sequence[BucketBytes], members: Sequence[int], count: int, is_lender: bool) -> Ring:
    return Ring(count, max(buckets[index].whole for index in members), max(buckets[index].staged for index in members), is_lender)


def all_coordinates(sizes: Mapping[str, int], stage: int = 0) -> list[dict[str, int]]:
    """The coordinates of every process of a pipeline stage along all axes, in the order of ranks. `sizes` are those of `full_sizes`."""
    count = math.prod(sizes[axis] for axis in AXES[1:])
    return [coordinates(sizes, rank) for rank in range(stage * count, (stage + 1) * count)]


# ---------------------------------------------------------------- the optimizer's state


def optimizer_slots(recipe: Recipe, model: nn.Module, table: ParameterTable, plugins: Plugins) -> tuple[dict[str, Slots] | None, str]:
    """Bytes of optimizer state by parameter, and in words what there is; None and the reason where it cannot be known without the run.

    The optimizer is built over whole parameters on the meta device (on the CPU where it refuses and they are few): elements of its state correspond to those of
    the local parameters, so that a share of a parameter has its share of the state. Raises UsageError for settings that it refuses.
    """
    trained = [name for name in table if table[name].trainable]
    few = sum(math.prod(table[name].shape) for name in trained) <= CHEAP
    reason = ""
    before = {name: table[name].layout for name in trained}
    for device in ("meta", "cpu") if few else ("meta",):
        try:
            return _probe(recipe, table, trained, plugins, device)
        except UsageError:
            raise
        except Exception as error:  # Whatever a third party's optimizer does there: the rest of the plan is right without it.
            reason = reason or f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            for name, layout in before.items():
                table[name].layout = layout
    return None, f"unknown, since the optimizer cannot be built without the run ({reason})"


def _probe(recipe: Recipe, table: ParameterTable, trained: Sequence[str], plugins: Plugins, device: str) -> tuple[dict[str, Slots], str]:
    parameters = {}
    for name in trained:
        info = table[name]
        info.layout = Layout.whole(info.shape, info.dtype)
        parameters[name] = nn.Parameter(torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=device))
    groups = optimizer_groups(recipe.parameter_groups, parameters, trained)
    optimizer = plugins.build(recipe.optimizer, groups, table, SelfCommunicator(device))
    found, kinds = {}, {}
    for name, state in optimizer.slots().items():
        numel = math.prod(table[name].shape)
        alike = {slot: tensor for slot, tensor in state.items() if tensor.numel() == numel and numel > 1}
        element = sum(tensor.element_size() for tensor in alike.values())
        found[name] = Slots(element, sum(tensor.numel() * tensor.element_size() for slot, tensor in state.items() if slot not in alike))
        for slot, tensor in alike.items():
            kinds[slot] = str(tensor.dtype).removeprefix("torch.")
    return found, ", ".join(f"{slot} {dtype}" for slot, dtype in kinds.items()) or "no state"
