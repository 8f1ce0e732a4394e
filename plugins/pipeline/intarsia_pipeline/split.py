"""Which stage has which blocks, and the rank's own part of the model. Torch.

    part = split(model, table, mesh, recipe, stages)

The model is on the meta device: nothing is copied and nothing that belongs to another stage is ever filled. Modules of other stages become None, the parameter table forgets them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intarsia.contracts import PipelinePart, Regions, StagePart
from intarsia.errors import PluginError, UsageError, did_you_mean
from torch import nn

from intarsia_pipeline.build import check_micro_batches, name_of, schedule_of
from intarsia_pipeline.config import PipelineConfig
from intarsia_pipeline.transfers import Edge, make_ways

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.config import Recipe
    from intarsia.mesh import Mesh
    from intarsia.parameters import ParameterTable


@dataclasses.dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several ranks of a pipeline have: its canonical name, the ranks in order, and its name here ("" where this rank is none of them)."""

    name: str
    ranks: tuple[int, ...]
    here: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Part(PipelinePart):
    """A PipelinePart with what the engine `pipeline` needs beside. `group` are the pipeline's ranks, `ways` the groups of two for messages from
    one rank to another. `micro_batches` is the number in a full step, `ties` are those of the whole pipeline, `costs` all stages' estimated costs. Stability: provisional."""

    group: Communicator
    ways: Mapping[Edge, Communicator]
    placement: tuple[int, ...]
    micro_batches: int
    ties: tuple[Tie, ...]
    costs: tuple[float, ...]


def split(model: nn.Module, table: ParameterTable, mesh: Mesh, recipe: Recipe, stages: Sequence[str] | None = None) -> Part:
    """Keep this rank's stages in `model` and in `table`, and say what they are.

    The schedule of `recipe.engine` says how many stages there are and on which ranks. `stages`: the names of the blocks with which a new stage begins (the first block may be
    left out); None: cut so that the costliest stage is as cheap as can be. A collective of the pipeline's ranks in as much as all must call it. UsageError for
    another engine, too few blocks, cuts where none may be, and fewer micro-batches than the schedule needs.
    """
    ranks = mesh.sizes["pp"]
    engine = recipe.engine
    if not isinstance(engine, PipelineConfig):
        raise UsageError(f"mesh.pp is {ranks}, and the engine is `{name_of(engine)}`, which runs whole models. Choose engine=pipeline.")
    micro_batches = micro_batches_of(recipe, mesh.data_ranks)
    check_micro_batches(engine.schedule, ranks, micro_batches, engine.few_micro_batches)
    placement = tuple(schedule_of(engine.schedule).placement(ranks))
    regions: Regions = model.regions()  # type: ignore[operator]
    costs = Costs.of(model, regions, recipe.train.sequence_length)
    if stages is None:
        cuts = balanced(regions, costs, len(placement), f"schedule {name_of(engine.schedule)!r} on {ranks} ranks")
    else:
        cuts = explicit(regions, stages, len(placement))
    bounds = [0, *cuts, len(regions.blocks)]
    parts = [
        StagePart(index, index == 0, index == len(placement) - 1, regions.blocks[begin:end])
        for index, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]
    rank = mesh.coordinates["pp"]
    mine = tuple(part for part, owner in zip(parts, placement, strict=True) if owner == rank)
    owners = owners_of(model, regions, parts)
    ties = ties_of(table, owners, placement, rank)
    keep_own(model, table, owners, {part.index for part in mine})
    # Made now: groups that join stages are made while all stages have made equally many.
    group = mesh.comm("pp")
    ways = make_ways(group, placement)
    return Part(mine, ranks, group, ways, placement, micro_batches, ties, tuple(costs.stage(*pair) for pair in itertools.pairwise(bounds)))


def micro_batches_of(recipe: Recipe, data_ranks: int) -> int:
    """How many micro-batches a full step has on each rank, as loaders cut it."""
    rows = math.ceil(recipe.train.global_batch / data_ranks)
    return max(1, math.ceil(rows / recipe.train.micro_batch))


# ---------------------------------------------------------------- where to cut


@dataclasses.dataclass(frozen=True)
class Costs:
    """FLOPs of one token's forward in each block, and in what comes before the first and after the last."""

    blocks: tuple[float, ...]
    before: float
    after: float

    @classmethod
    def of(cls, model: nn.Module, regions: Regions, sequence_tokens: int) -> Costs:
        """Two for each weight of each projection, and what mixers say of themselves (`mixing_flops_per_token`); the output projection once for each depth that the model
        predicts. A model of which nothing is known by that: its parameters."""
        blocks = tuple(flops(model.get_submodule(block), sequence_tokens) for block in regions.blocks)
        # What lies around blocks (a vision tower's ends) counts without them.
        outside = {name: flops(child, sequence_tokens) for name, child in model.named_children()}
        for block, cost in zip(regions.blocks, blocks, strict=True):
            outside[block.partition(".")[0]] -= cost
        first, last = ends_of(model, regions)
        before = sum(cost for name, cost in outside.items() if name in first)
        after = sum(cost for name, cost in outside.items() if name in last and name not in first)
        # Each depth of multi-token prediction multiplies by the head once more.
        head: Any = getattr(model, "head_weight_VD", None)
        after += 0.0 if head is None else getattr(model, "predicts_ahead", 0) * 2.0 * head.numel()
        if not any(blocks):
            blocks = tuple(2.0 * sum(each.numel() for each in model.get_submodule(block).parameters()) for block in regions.blocks)
        return cls(blocks, before, after)

    def stage(self, begin: int, end: int) -> float:
        """The cost of a stage of blocks `begin` to `end` - 1."""
        return sum(self.blocks[begin:end]) + self.before * (begin == 0) + self.after * (end == len(self.blocks))


def flops(module: nn.Module, sequence_tokens: int) -> float:
    """FLOPs of one token's forward through a module. One that does not run once for each token says so of all that is in it (`forward_flops_per_token`)."""
    whole = getattr(module, "forward_flops_per_token", None)
    if whole is not None:
        return float(whole(sequence_tokens))
    if isinstance(module, nn.Linear):
        return 2.0 * module.in_features * module.out_features
    mixing = getattr(module, "mixing_flops_per_token", None)
    own = 0.0 if mixing is None else float(mixing(sequence_tokens))
    return own + sum(flops(child, sequence_tokens) for child in module.children())


def allowed_cuts(regions: Regions) -> list[int]:
    """Numbers of the blocks before which a pipeline may be cut."""
    for name in regions.stages:
        if name not in regions.blocks:
            raise PluginError(f"regions().stages names {name!r}, which is no block. {did_you_mean(name, regions.blocks)}")
    return [number for number, block in enumerate(regions.blocks) if number and (not regions.stages or block in regions.stages)]


def balanced(regions: Regions, costs: Costs, stages: int, whose: str = "the schedule") -> list[int]:
    """Cuts, as numbers of blocks, such that the costliest stage is as cheap as can be, and among those the squares of costs are least. Every stage has a block."""
    allowed = allowed_cuts(regions)
    if len(allowed) + 1 < stages:
        blocks = len(regions.blocks)
        where = f"may be cut before {len(allowed)} of its {blocks} blocks" if regions.stages else f"has {blocks} blocks"
        raise UsageError(
            f"{whose} needs {stages} pipeline stages, and the model {where}: at most {len(allowed) + 1} stages. Choose a smaller mesh.pp, or a schedule with fewer stages a rank."
        )
    places = [0, *allowed, len(regions.blocks)]
    sums = [0.0, *itertools.accumulate(costs.blocks)]

    def cost(begin: int, end: int) -> float:
        total = sums[places[end]] - sums[places[begin]]
        return total + costs.before * (begin == 0) + costs.after * (end == len(places) - 1)

    limit = _best(len(places) - 1, stages, cost, max, math.inf)[0]
    limit += 1e-9 * abs(limit)
    return [places[cut] for cut in _best(len(places) - 1, stages, cost, lambda total, each: total + each * each, limit)[1]]


def _best(count: int, stages: int, cost: Any, join: Any, limit: float) -> tuple[float, list[int]]:
    """Cut 0..count into `stages` runs, none empty and none dearer than `limit`: the least joined cost, and where the cuts are."""
    table: list[list[tuple[float, int]]] = [[(math.inf, -1)] * (count + 1) for _ in range(stages + 1)]
    table[0][0] = (0.0, -1)
    for stage in range(1, stages + 1):
        for end in range(stage, count - (stages - stage) + 1):
            best = (math.inf, -1)
            for begin in range(end - 1, stage - 2, -1):
                each = cost(begin, end)
                if each > limit or join(0.0, each) > best[0]:
                    break  # Costs only grow with the run.
                before = table[stage - 1][begin][0]
                if before < math.inf:
                    best = min(best, (join(before, each), begin))
            table[stage][end] = best
    cuts = [count]
    for stage in range(stages, 0, -1):
        cuts.append(table[stage][cuts[-1]][1])
    return table[stages][count][0], cuts[-2:0:-1]


def explicit(regions: Regions, stages: Sequence[str], count: int) -> list[int]:
    """The cuts that a list of blocks says: each begins a stage; the first block may be left out."""
    numbers = []
    allowed = allowed_cuts(regions)
    for name in stages:
        if name not in regions.blocks:
            raise UsageError(f"parallel.stages names {name!r}, which is no block of the model. {did_you_mean(name, regions.blocks)}")
        numbers.append(regions.blocks.index(name))
    if numbers[:1] == [0]:
        numbers = numbers[1:]
    if numbers != sorted(set(numbers)):
        raise UsageError(f"parallel.stages must name blocks in the model's order, each once: {', '.join(stages)}.")
    forbidden = [number for number in numbers if number not in allowed]
    if forbidden:
        near = ", ".join(repr(regions.blocks[number]) for number in sorted(allowed, key=lambda number: abs(number - forbidden[0]))[:3])
        raise UsageError(
            f"The model may not be cut before {regions.blocks[forbidden[0]]!r} (regions().stages). Nearest blocks where it may: {near or 'none'}."
        )
    if len(numbers) != count - 1:
        raise UsageError(
            f"parallel.stages makes {len(numbers) + 1} stages, and the schedule has {count} on this mesh: name {count} blocks, or {count - 1} without the first."
        )
    return numbers


# ---------------------------------------------------------------- whose is what


def ends_of(model: nn.Module, regions: Regions) -> tuple[set[str], set[str]]:
    """Names of modules outside of the blocks that the first stage needs, and those that the last does; a module without parameters and buffers of its own is everybody's.

    A model says so by `stage_modules() -> (first, last)`. Else what was registered before the blocks is the first stage's, and what was after them the last's.
    """
    say = getattr(model, "stage_modules", None)
    children = [name for name, _ in model.named_children()]
    if say is not None:
        first, last = (set(names) for names in say())
        for name in first | last:
            if name not in children:
                raise PluginError(
                    f"{type(model).__name__}.stage_modules() names {name!r}, which is no module of it. {did_you_mean(name, children)}"
                )
        return first, last
    with_blocks = [place for place, name in enumerate(children) if any(block == name or _inside(block, name) for block in regions.blocks)]
    if not with_blocks:
        raise PluginError(f"{type(model).__name__}.regions() declares no blocks: a pipeline has nothing to cut between.")
    last_place = with_blocks[-1]
    weighty = [name for name in children if any(True for _ in model.get_submodule(name).parameters())]
    first = {name for name in weighty if children.index(name) < with_blocks[0]}
    return first, {name for name in weighty if children.index(name) > last_place}


def owners_of(model: nn.Module, regions: Regions, parts: Sequence[StagePart]) -> dict[str, set[int]]:
    """For each parameter's name (every name of a tie) the stages that have it. PluginError for one that nobody has."""
    first, last = ends_of(model, regions)
    block_stage = {block: part.index for part in parts for block in part.blocks}
    ends = {0: first, len(parts) - 1: last}
    owners: dict[str, set[int]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        found = {stage for block, stage in block_stage.items() if name.startswith(f"{block}.")}
        found |= {stage for stage, names in ends.items() if name.partition(".")[0] in names}
        if not found:
            raise PluginError(
                f"{type(model).__name__}: no pipeline stage has the parameter {name!r}, which is in no block. Name its module in `stage_modules()`, which returns the names "
                "of the modules of the first stage and of the last."
            )
        owners[name] = found
    return owners


def ties_of(table: ParameterTable, owners: dict[str, set[int]], placement: Sequence[int], rank: int) -> tuple[Tie, ...]:
    """The trained parameters that several ranks have, in one order everywhere."""
    ties = []
    for info in table.values():
        names = (info.name, *info.aliases)
        ranks = {placement[stage] for name in names for stage in owners[name]}
        here = [name for name in names if rank in {placement[stage] for stage in owners[name]}]
        if len(ranks) > 1 and info.trainable:
            ties.append(Tie(info.name, tuple(sorted(ranks)), here[0] if here else "", tuple(info.shape)))
    return tuple(ties)


def keep_own(model: nn.Module, table: ParameterTable, owners: dict[str, set[int]], mine: set[int]) -> None:
    """Take the modules of other stages out of the model and their parameters out of the table."""
    own = {name for name, stages in owners.items() if stages & mine}
    primary = {info.name: min(owners[info.name]) in mine for info in table.values()}
    table.keep(own)
    for info in table.values():
        # A parameter that several stages have under one name is saved by the first of them.
        info.is_copy = not primary[info.name]
    _remove(model, own)


def _remove(module: nn.Module, own: set[str], prefix: str = "") -> None:
    for name, child in list(module.named_children()):
        full = f"{prefix}{name}"
        names = [f"{full}.{each}" for each, _ in child.named_parameters(remove_duplicate=False)]
        if not names:
            continue
        if not any(each in own for each in names):
            module._modules[name] = None
        elif not all(each in own for each in names):
            _remove(child, own, f"{full}.")


def _inside(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.")
