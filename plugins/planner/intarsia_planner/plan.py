"""The plan of a run: memory, communication and time of every pipeline stage's first rank, which stands for the stage's others."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.config import Recipe
from intarsia.errors import UsageError
from intarsia.layout import DTYPE_BYTES
from intarsia.mesh import AXES, full_sizes
from intarsia.plugins import Plugins
from intarsia_flexshard import planning
from intarsia_flexshard.config import FlexShardConfig

from intarsia_planner import rates, stage, stand_ins, transfers
from intarsia_planner.devices import Device
from intarsia_planner.fake import Message
from intarsia_planner.memory import Held, held
from intarsia_planner.trace import Work

# Seconds of a step in which the device waits for the host: the norm is read before the update (llama3-1b-h200.json: 8 ms of idle device).
BORDER = 8e-3
# Host seconds of one bucket's collectives and hooks in a pass (flexshard-h200/host.json).
BUCKET = 0.4e-3


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds of a step on one rank. `exposed` is communication that computation waits for, `shared` what communication beside computation takes from it, `bubble` the wait for other stages,
    `update` the optimizer, casts, norms and sums of gradients, `border` the wait for the host."""

    compute: float
    exposed: float
    shared: float
    bubble: float
    update: float
    border: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.exposed + self.shared + self.bubble + self.update + self.border


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One pipeline stage's ranks. `wire` has the bytes that a rank receives in a step by (mesh axes, what)."""

    number: int
    ranks: int
    blocks: tuple[str, ...]
    elements: int
    flexshard: Any
    traced: tuple[stage.TracedStage, ...]
    held: Held
    wire: Mapping[tuple[str, str], int]
    flops: float
    spent: Spent


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """`elements` are the whole model's parameters, `ahead` those of them that only predict further ahead. `flops` are what MFU counts, of one step on all devices."""

    recipe: Recipe
    device: Device
    sizes: Mapping[str, int]
    devices: int
    elements: int
    ahead: int
    trained: int
    micro_batches: int
    tokens: int
    flops: float
    stages: tuple[StagePlan, ...]
    bubble: float
    schedule: str
    optimizer: str

    @property
    def step(self) -> float:
        """Seconds of a step: the slowest stage's."""
        return max(each.spent.step for each in self.stages)

    @property
    def mfu(self) -> float:
        """Counted FLOPs over the devices' peak."""
        peak = self.device.peak.get(self.recipe.precision.compute, self.device.peak["float32"])
        return self.flops / (self.step * self.devices * peak)

    @property
    def fullest(self) -> StagePlan:
        """The stage whose ranks need most memory."""
        return max(self.stages, key=lambda each: each.held.peak)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays within what the device has, less the reserve."""
        return self.fullest.held.peak <= self.device.usable


def make_plan(recipe: Recipe, sizes: Mapping[str, int], device: Device, plugins: Plugins) -> RunPlan:
    """Plan a run on a mesh of checked `sizes`. UsageError as the run's build would raise it, and for a sharder whose bytes are not known."""
    if not isinstance(recipe.sharder, FlexShardConfig):
        raise UsageError(
            f"`intarsia plan` counts the buckets of FlexShard, but the sharder of the recipe is {plugins.entry_of(recipe.sharder).name}. Add sharder=flexshard."
        )
    full = full_sizes(sizes)
    elements, ahead, trained, per_row = stage.count(recipe, plugins)
    chosen = stand_ins.choices(recipe, plugins, device.capabilities)
    found: dict[Any, Any] = {}
    built = [_Rank.of(recipe, sizes, device, plugins, chosen, number, found) for number in range(full["pp"])]
    first = built[0]
    timeline = _timeline(recipe, full, device, built)
    stages = tuple(each.plan(device, full, timeline, number) for number, each in enumerate(built))
    tokens = recipe.train.sequence_length * recipe.train.global_batch
    return RunPlan(
        recipe=recipe,
        device=device,
        sizes=full,
        devices=math.prod(full[axis] for axis in AXES),
        elements=elements,
        ahead=ahead,
        trained=trained,
        micro_batches=first.micro_batches,
        tokens=tokens,
        flops=per_row * recipe.train.global_batch,
        stages=stages,
        bubble=timeline.bubble,
        schedule=timeline.name,
        optimizer=first.flexshard.optimizer,
    )


@dataclasses.dataclass(frozen=True)
class _Timeline:
    """A step's schedule: for each rank of the pipeline how long it computes and waits, and how many micro-batches of its stages are in flight at most."""

    name: str
    makespan: float
    bubble: float
    live: Mapping[int, int]
    idle: Sequence[float]


@dataclasses.dataclass
class _Rank:
    """The first rank of a stage, built and traced."""

    recipe: Recipe
    blocks: tuple[str, ...]
    part: Any
    flexshard: Any
    traced: list[stage.TracedStage]
    spans: dict[str, int]
    asked: transfers.Asked
    moved: list[Message]

    @classmethod
    def of(cls, recipe: Recipe, sizes: Any, device: Device, plugins: Plugins, chosen: Any, number: int, found: dict[Any, Any]) -> _Rank:
        """Build and trace."""
        made = stage.build(recipe, sizes, plugins, number)
        part = None if made.parallel is None else made.parallel.part
        driven = None
        if part is not None:  # A schedule brings a stage's parameters once in a step, or around each of its actions.
            driven = 1 if getattr(recipe.engine, "unshard", "step") == "step" else 2 * part.micro_batches
        flexshard = planning.plan_stage(recipe, made.model, made.table, made.mesh, plugins, device.is_accelerator, driven)
        # Where its state is unknown the optimizer cannot be built without the run.
        asked = transfers.Asked() if flexshard.settings.slots is None else transfers.ask(made, plugins)
        names = tuple(name for part in made.parts if part is not None for name in part.blocks) or tuple(made.model.regions().blocks)
        traced = stage.trace(made, chosen, device.is_accelerator, found)
        spans = spans_of(made.mesh.sizes)
        return cls(recipe, names, part, flexshard, traced, spans, asked, transfers.messages(asked.transfers))

    @property
    def micro_batches(self) -> int:
        """Of a rank in a step."""
        return self.flexshard.settings.micro_batches

    def pass_seconds(self, device: Device, each: stage.TracedStage, backward: bool) -> tuple[float, float]:
        """Seconds of computation, and of communication in between that it waits for, of one micro-batch's pass through a stage."""
        dtype, compiled = self.recipe.precision.compute, self.recipe.compile.mode != "none"
        seconds = waiting = 0.0
        for piece in each.pieces:
            work: Work = piece.traced.backward if backward else piece.traced.forward
            own = rates.compute(device, work, dtype, compiled and piece.kind == "block")
            # Context parallelism's messages run beside blocks of attention; tensor and expert parallelism's are waited for.
            beside = [message for message in work.messages if message.axes == "cp" and message.call == "exchange"]
            alone = [message for message in work.messages if message not in beside]
            attention = sum(flops / rates.attention(device, *key) for key, flops in work.attention.items())
            hidden = rates.messages(device, beside, self.spans, False)
            seconds += own * piece.count
            waiting += (
                rates.messages(device, alone, self.spans, True) + max(hidden - attention / 2, device.sharing * hidden)
            ) * piece.count
        if backward and self.micro_batches > 1 and self.flexshard.settings.is_accumulating:
            # Each micro-batch's gradients are added to those before.
            whole = sum(bucket.accumulated for bucket in self.flexshard.buckets) / max(len(self.traced), 1)
            compute = DTYPE_BYTES[self.recipe.precision.compute]
            width = DTYPE_BYTES[self.recipe.precision.reduce]
            seconds += whole / width * (2 * width + compute) / device.adding
        return seconds, waiting

    def wire(self) -> dict[tuple[str, str], int]:
        """Bytes that a rank receives in a step by (axes, what)."""
        found: collections.Counter[tuple[str, str]] = collections.Counter()
        for each in self.traced:
            for backward in (False, True):
                for message in each.work(backward).messages:
                    found[message.axes, message.call] += message.received * self.micro_batches
            found["pp", "receive"] += sum(each.carried) * self.micro_batches
        rank = max(self.flexshard.ranks, key=lambda each: each.gather + each.reduce)
        axes = "+".join(axis for axis in ("dp_shard", "cp", "tp") if self.flexshard.sizes[axis] > 1) or "dp_shard"
        for what in ("gather", "reduce", "replicas"):
            found[axes if what != "replicas" else "dp_replicate", f"FlexShard {what}"] += getattr(rank, what)
        for message in self.moved:
            found[message.axes, "optimizer exchange"] += message.received
        return {key: size for key, size in found.items() if size}

    def plan(self, device: Device, sizes: Mapping[str, int], timeline: _Timeline, number: int) -> StagePlan:
        """The stage's figures."""
        whole = None
        if self.part is not None:  # A schedule holds all of its stages' parameters from first use to last.
            whole = sum(max(bucket.whole, 0) for bucket in self.flexshard.buckets) + max(
                (bucket.staged for bucket in self.flexshard.buckets), default=0
            )
        live = {each.index: timeline.live.get(each.index, 1) for each in self.traced}
        memory = held(self.flexshard.ranks, self.traced, live, whole, self.micro_batches, device.workspace)
        work = Work()
        for each in self.traced:
            for backward in (False, True):
                work.add(each.work(backward), self.micro_batches)
        return StagePlan(
            number=number,
            ranks=len(self.flexshard.ranks),
            blocks=self.blocks,
            elements=sum(bucket.elements for bucket in self.flexshard.buckets),
            flexshard=self.flexshard,
            traced=tuple(self.traced),
            held=memory,
            wire=self.wire(),
            flops=work.flops,
            spent=self._spent(device, timeline, number),
        )

    def _spent(self, device: Device, timeline: _Timeline, number: int) -> Spent:
        passes = [self.pass_seconds(device, each, backward) for each in self.traced for backward in (False, True)]
        compute, waiting = (sum(each[which] for each in passes) * self.micro_batches for which in (0, 1))
        gathers, reductions, tail = self._sharding(device)
        beside = gathers + reductions
        exposed = waiting + tail + max(beside - compute, 0.0) + rates.messages(device, self.moved, self.spans, True)
        return Spent(
            compute=compute,
            exposed=exposed,
            shared=device.sharing * min(beside, compute),
            bubble=timeline.idle[number] if timeline.idle else 0.0,
            update=self._update(device),
            border=BORDER if device.is_accelerator else 0.0,
        )

    def _sharding(self, device: Device) -> tuple[float, float, float]:
        """Seconds of FlexShard's gathers and of its reductions in a step, and of the reduction behind the last backward, which nothing hides."""
        plan = self.flexshard
        gathers = reductions = tail = 0.0
        for bucket, count in zip(plan.buckets, plan.gathers, strict=True):
            axes = [axis for axis in (*AXES, "ep_shard") if axis in bucket.spec.axes and plan.sizes[axis] > 1]
            span = self.spans.get("+".join(axes), 1)
            far = span > device.domain
            latency = device.far_latency if far else device.latency
            gathers += (latency + max(bucket.gather) / (device.joining if far else device.gathering)) * count if max(bucket.gather) else 0.0
            one = (latency + max(bucket.reduce) / (device.joining if far else device.reducing)) if max(bucket.reduce) else 0.0
            one += (device.far_latency + max(bucket.replicas) / device.joining) if max(bucket.replicas) else 0.0
            reductions += one * plan.reductions
            if bucket.spec.is_root:
                tail += one
        return gathers, reductions - tail, tail

    def _update(self, device: Device) -> float:
        """Seconds of what comes behind the last backward, and of sums of gradients: bound by memory, but for the optimizer's products of matrices."""
        rank = max(self.flexshard.ranks, key=lambda each: each.device)
        gradient = rank.gradients
        whole = sum(sum(bucket.counts) for bucket in self.flexshard.buckets)
        wide = DTYPE_BYTES[self.recipe.precision.reduce]
        # Masters and state are read and written, gradients read for the norm, read and written to be clipped, and read again; the copy in the compute dtype is written.
        moved = (
            2 * rank.masters
            + 2 * (rank.optimizer or 0)
            + (4 if self.recipe.train.clip_norm is not None else 2) * gradient
            + rank.cast
            + rank.masters
        )
        # Gradients are packed (read and written whole) and what arrives is added.
        moved += 2 * whole * wide + (rank.reduce + 2 * gradient if rank.reduce else 0)
        return moved / device.streaming + rates.matrices(device, self.asked.load, self.asked.dtype)


def spans_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """For every joint of axes how many neighbouring ranks its groups reach over: what decides whether they leave a domain of fast links."""
    spans: dict[str, int] = {}
    for count in range(1, len(AXES) + 1):
        for chosen in itertools.combinations(AXES, count):
            named = [axis for axis in chosen if sizes[axis] > 1]
            if named:
                spans["+".join(named)] = math.prod(sizes[axis] for axis in AXES[AXES.index(named[0]) :])
    spans["ep"] = sizes["ep"]
    spans["ep_shard"] = math.prod(sizes[axis] for axis in ("dp_shard", "cp", "tp"))
    return spans


def _timeline(recipe: Recipe, sizes: Mapping[str, int], device: Device, ranks: Sequence[_Rank]) -> _Timeline:
    if sizes["pp"] == 1:
        return _Timeline("", 0.0, 0.0, {}, ())
    from intarsia_pipeline.build import Knobs, name_of, ready
    from intarsia_pipeline.simulate import Times, simulate

    engine: Any = recipe.engine
    schedule, _ = ready(engine.schedule, sizes["pp"], ranks[0].micro_batches, Knobs.of(engine))
    stages = sorted((each.index, rank, each) for rank in ranks for each in rank.traced)
    forward, backward = ([sum(rank.pass_seconds(device, each, which)) for _, rank, each in stages] for which in (False, True))
    message = max(sum(each.carried) for _, _, each in stages) / 2
    far = math.prod(sizes[axis] for axis in AXES) > device.domain
    comm = (device.far_latency if far else device.latency) + message / (device.joining if far else device.gathering)
    times = Times(f=forward, i=[each / 2 for each in backward], w=[each / 2 for each in backward], b=backward, comm=comm)
    found = simulate(schedule, times)
    live = {each.index: found.peak_live[number] for number, rank in enumerate(ranks) for each in rank.traced}
    if any(len(rank.traced) > 1 for rank in ranks):
        # Activations of all a rank's stages are counted together: shared out evenly among them.
        live = {
            each.index: math.ceil(found.peak_live[number] / len(rank.traced)) for number, rank in enumerate(ranks) for each in rank.traced
        }
    return _Timeline(name_of(engine.schedule), found.makespan, found.idle_share, live, found.idle)
