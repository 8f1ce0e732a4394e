"""One pipeline stage of a run, as its first rank would have it, built on the meta device and traced block by block. Equal blocks are traced once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from intarsia import logical, ops
from intarsia.config import Recipe
from intarsia.contracts import Batch, StagePart
from intarsia.discovery import import_reference
from intarsia.errors import UsageError
from intarsia.mesh import Mesh
from intarsia.ops.operator import Choice
from intarsia.parameters import ParameterTable
from intarsia.plugins import Plugins
from intarsia.train.groups import freeze
from intarsia_eager.context import windows_of
from intarsia_eager.engine import prepare, recomputed_blocks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from intarsia_planner import fake, media
from intarsia_planner.trace import Memory, Traced, Work, leaves, run, saved_when_compiled


@dataclasses.dataclass
class Stage:
    """A rank's part of the model, cut as the run would cut it. `log` has what its groups would say."""

    recipe: Recipe
    mesh: Mesh
    log: fake.Log
    model: Any
    table: ParameterTable
    parallel: Any

    @property
    def parts(self) -> tuple[StagePart | None, ...]:
        """The stages that this rank has; None stands for the whole model."""
        part = None if self.parallel is None else self.parallel.part
        return (None,) if part is None else part.stages


def build(recipe: Recipe, sizes: Mapping[str, int], plugins: Plugins, stage: int) -> Stage:
    """The first rank of pipeline stage `stage`. UsageError as the run's build would raise it."""
    ranks = torch.Size([sizes[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp")]).numel()
    world, log = fake.world(stage * ranks, sizes)
    mesh = Mesh(sizes, world)
    with torch.device("meta"):
        model = plugins.build(recipe.model)
    freeze(recipe.parameter_groups, model)
    precision = recipe.precision
    table = ParameterTable.from_model(model, precision.master, precision.compute, precision.reduce, recipe.train.seed)
    return Stage(recipe, mesh, log, model, table, _parallelise(recipe, mesh, model, table, plugins))


def _parallelise(recipe: Recipe, mesh: Mesh, model: nn.Module, table: ParameterTable, plugins: Plugins) -> Any:
    """As `intarsia.train.build.parallelise`."""
    needed = [f"{axis} {mesh.sizes[axis]}" for axis in ("pp", "cp", "tp", "ep") if mesh.sizes[axis] > 1]
    config: Any = recipe.parallel
    if config is None and needed:
        entry = next((entry for entry in plugins.registry("paralleliser").entries() if entry.name == "declared"), None)
        if entry is None:
            raise UsageError(
                f"mesh: {', '.join(needed)} needs a paralleliser, and no plugin offers the one called `declared`. Install intarsia-parallel."
            )
        config = plugins.config_class(entry)()
    if config is None:
        return None
    sharding = getattr(plugins.entry_of(recipe.model), "sharding", None)
    return plugins.build(config).apply(model, table, mesh, recipe, None if sharding is None else import_reference(sharding))


def computed(stage: Stage) -> list[nn.Parameter]:
    """Give the model its parameters as forward sees them: whole along data parallelism, in the compute dtype, as a sharder does."""
    made: dict[int, nn.Parameter] = {}
    for module in stage.model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in made:
                    wide = name in getattr(type(module), "keeps_float32", ())
                    dtype = torch.float32 if wide else getattr(torch, stage.recipe.precision.compute)
                    new = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), parameter.requires_grad)
                    made[id(parameter)] = new
                    made[id(new)] = new
                module._parameters[name] = made[id(parameter)]
    return list({id(each): each for each in made.values()}.values())


def batch_of(recipe: Recipe, rows: int) -> Batch:
    """A micro-batch of rows of one document each, with images where the model sees."""
    length = recipe.train.sequence_length
    tokens, documents = (torch.zeros(rows, length, dtype=dtype, device="meta") for dtype in (torch.int64, torch.int32))
    return Batch(tokens, tokens.clone(), tokens.clone(), documents, ((length,),) * rows, extra=media.extra_of(recipe, rows))


@contextlib.contextmanager
def kernels(chosen: Mapping[str, Choice], on_device: bool, log: fake.Log) -> Iterator[None]:
    """The chosen kernels' stand-ins in force, in context parallelism's own attention too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ops.installed(chosen))
        if on_device:
            with contextlib.suppress(ImportError):
                import intarsia_parallel.context.block

                block: Any = intarsia_parallel.context.block
                obstacle = block.flash_obstacle
                stack.callback(setattr, block, "flash_obstacle", obstacle)
                block.flash_obstacle = lambda q, k, v, settings: obstacle(_As(q), k, v, settings)
                for name in ("forward", "backward"):
                    method = getattr(block.Block, name)
                    stack.callback(setattr, block.Block, name, method)
                    setattr(block.Block, name, _alone(method, log))
        yield


def _alone(method: Any, log: fake.Log) -> Any:
    """The method, which no compiled region takes in."""

    def run(*arguments: Any) -> Any:
        log.is_alone += 1
        try:
            return method(*arguments)
        finally:
            log.is_alone -= 1

    return run


class _As:
    """A tensor that says it lies on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.device = tensor, torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Something of a stage that runs forward and backward: `count` alike. `kind` is enter, block or leave."""

    kind: str
    name: str
    count: int
    traced: Traced


@dataclasses.dataclass(frozen=True)
class TracedStage:
    """What one stage of a rank does for one micro-batch. `carried` are bytes that come in and go out along the pipeline."""

    index: int
    pieces: tuple[Piece, ...]
    first: bool
    last: bool
    carried: tuple[int, int]

    def work(self, backward: bool) -> Work:
        """Of a whole micro-batch."""
        total = Work()
        for piece in self.pieces:
            total.add(piece.traced.backward if backward else piece.traced.forward, piece.count)
        return total

    @property
    def kept(self) -> int:
        """Bytes that wait for backward; what the loss keeps is not in them."""
        return sum(piece.traced.memory.kept * piece.count for piece in self.pieces if piece.kind != "leave")


def trace(stage: Stage, chosen: Mapping[str, Choice], on_device: bool, found: dict[Any, tuple[Traced, Any]]) -> list[TracedStage]:
    """Trace every stage of the rank. `found` keeps what has been traced with what came out, for other ranks too."""
    try:
        with kernels(chosen, on_device, stage.log):
            return [_trace_part(stage, part, computed(stage), found) for part in stage.parts]
    finally:
        logical.reset()


def _trace_part(
    stage: Stage, part: StagePart | None, parameters: Sequence[nn.Parameter], found: dict[Any, tuple[Traced, Any]]
) -> TracedStage:
    recipe, model = stage.recipe, stage.model
    model.train()
    ahead = getattr(model, "predicts_ahead", 0)
    stage.log.is_inside = True
    batch, context = prepare(batch_of(recipe, recipe.train.micro_batch), ahead, stage.parallel, windows_of(model))
    shared = model.shared(context)
    stage.log.is_inside = False
    known = [*leaves(shared), *leaves(vars(context)), *leaves(dataclasses.asdict(batch)), *model.buffers()]
    _note(model, batch_of(recipe, recipe.train.micro_batch) if stage.parallel is None else batch)
    pieces: list[Piece] = []
    first, last = part is None or part.first, part is None or part.last
    carry = None
    recomputed = set(recomputed_blocks(model, recipe.recompute))
    # What a vision tower's blocks do is part of `enter`.
    for name in recomputed if first else ():
        if name.startswith("visual."):
            tower_block = model.get_submodule(name)
            tower_block.forward = functools.partial(_recomputing, tower_block.forward)
    if first:
        traced, carry = run(lambda x: model.enter(batch.tokens_BS, context), (), parameters, known, stage.log)
        pieces.append(Piece("enter", "embedding", 1, traced))
    else:
        carry = _carry_of(stage, batch)
    carried = sum(each.nbytes for each in leaves(carry))
    names = [f"layers.{i}" for i in range(len(model.layers))] if part is None else list(part.blocks)
    names = [name for name in names if not name.startswith(("mtp.", "visual."))]
    alike: dict[Any, list[str]] = {}
    for name in names:
        key = (_signature(model.get_submodule(name)), name in recomputed, tuple(each.shape for each in leaves(carry)))
        if key not in found:
            found[key] = _trace_block(stage, name, carry, shared, context, parameters, known, name in recomputed)
        alike.setdefault(key, []).append(name)
        carry = found[key][1]
    pieces += [Piece("block", each[0], len(each), found[key][0]) for key, each in alike.items()]
    if last:
        loss = _loss(stage)

        def leave(x: Any) -> Tensor:
            with logical.micro_batch(1.0):
                return loss(model, model.leave(x, shared, context), batch).total

        traced, _ = run(leave, carry, parameters, known, stage.log)
        pieces.append(Piece("leave", "head and loss", 1, traced))
    return TracedStage(0 if part is None else part.index, tuple(pieces), first, last, (0 if first else carried, 0 if last else carried))


def _recomputing(forward: Any, *arguments: Any) -> Any:
    """As the engine recomputes a block; of a generator's state there is none on the meta device."""
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)


def _note(model: nn.Module, batch: Batch) -> None:
    with contextlib.suppress(ImportError):
        from intarsia_parallel import tokens

        tokens.note(batch.tokens_BS.shape[1])


def _loss(stage: Stage) -> Any:
    from intarsia import plugins

    return plugins.current().build(stage.recipe.loss)


def _carry_of(stage: Stage, batch: Batch) -> Tensor:
    """What comes from the stage before: the residual stream, this rank's part of it."""
    rows, tokens = batch.tokens_BS.shape
    ranks = stage.mesh.sizes["tp"]
    dtype = getattr(torch, stage.recipe.precision.compute)
    return torch.empty(rows, -(-tokens // ranks), cast(Any, stage.recipe.model).dim, dtype=dtype, device="meta")


def _signature(module: nn.Module) -> Any:
    """Equal for modules that compute alike."""
    return tuple(
        (name, type(each).__name__, tuple((key, tuple(value.shape)) for key, value in each._parameters.items() if value is not None))
        for name, each in module.named_modules()
    )


def _trace_block(
    stage: Stage, name: str, carry: Any, shared: Any, context: Any, parameters: Sequence[nn.Parameter], known: Sequence[Tensor], again: bool
) -> tuple[Traced, Any]:
    model, recipe = stage.model, stage.recipe
    own = list(model.get_submodule(name).parameters())

    def piece(x: Any) -> Any:
        return model.run_block(name, x, shared, context)

    with logical.micro_batch(1.0):
        traced, result = run(piece, carry, own, [*known, *parameters], stage.log, again)
        if recipe.compile.mode == "none":
            return traced, result
        compiled = _compiled_memory(stage, name, piece, carry, [*known, *parameters], traced.memory, again)
    return dataclasses.replace(traced, memory=compiled), result


def _compiled_memory(stage: Stage, name: str, piece: Any, carry: Any, known: Sequence[Tensor], eager: Memory, again: bool) -> Memory:
    module = stage.model.get_submodule(name)
    before, stage.log.is_inside = module.forward, True
    module.forward = torch.compile(before, backend="aot_eager_decomp_partition", dynamic=False)
    try:
        kept, widest, result = saved_when_compiled(piece, carry, known)
    finally:
        module.forward, stage.log.is_inside = before, False
    # Fused operators keep what matrix products read; a few of the widest are there at once.
    backward = eager.gradients + result + 2 * widest
    if again:
        return Memory(result, kept + widest, kept + backward, eager.gradients)
    return Memory(kept, kept + widest, backward, eager.gradients)


def count(recipe: Recipe, plugins: Plugins) -> tuple[int, int, int, float]:
    """The whole model's parameters, those of them that only predict further ahead, those that are trained, and FLOPs of a row's forward and backward, its images' included."""
    with torch.device("meta"):
        model: Any = plugins.build(recipe.model)
    freeze(recipe.parameter_groups, model)
    named = dict(model.named_parameters())
    ahead = sum(each.numel() for name, each in named.items() if name.startswith("mtp."))
    total = sum(each.numel() for each in named.values())
    trained = sum(each.numel() for each in named.values() if each.requires_grad)
    length, grids = recipe.train.sequence_length, media.grids_of(recipe)
    return total, ahead, trained, model.flops_per_token(length) * length + (model.media_flops({"grids": grids}) if grids else 0.0)
