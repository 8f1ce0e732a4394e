"""What `intarsia parallel check` does on each rank: one step on one process, the same step on the mesh, and the comparison of everything by name.

S tokens of a row, D model width. What ranks hold is put in its place in a tensor of zeros of the whole's shape, and those are added up: whatever is laid out how.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from intarsia import logical, plugins
from intarsia.comm import Communicator, SelfCommunicator, init_world
from intarsia.config import Recipe
from intarsia.contracts import IGNORE, Batch, Loss, LossSum, Model, Parallel, StepState
from intarsia.device import on_device
from intarsia.discovery import import_reference
from intarsia.errors import IntarsiaError, PluginError, UsageError
from intarsia.layout import region_parts, slices
from intarsia.mesh import Mesh, copies_along
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia.train.groups import freeze
from torch import Tensor, nn

from intarsia_parallel.apply import build as build_declared
from intarsia_parallel.check_command import Settings
from intarsia_parallel.collectives import even_counts
from intarsia_parallel.config import DeclaredConfig
from intarsia_parallel.table import told

# Where each token of a batch stands in the whole step: row * S + index. Named so that context parallelism cuts it.
INDEX = "index_BS"

# Gradients that are smaller than the largest of all by more than float32 has digits are rounding.
ROUNDING = torch.finfo(torch.float32).eps


@dataclasses.dataclass
class Outcome:
    """What a step gave, by name: outputs (hidden states of all tokens), sums, and gradients, all whole. `roles` by parameter. `drops`: modules that may leave out what a token was
    to get, by setting. `draws`: the step drew random numbers, as a router's jitter does."""

    outputs: dict[str, Tensor]
    sums: dict[str, Tensor]
    gradients: dict[str, Tensor]
    roles: dict[str, str] = dataclasses.field(default_factory=dict)
    drops: Sequence[str] = ()
    draws: bool = False


@dataclasses.dataclass(frozen=True)
class Difference:
    """One line of the report. `error` is the largest difference over the largest value of one process."""

    name: str
    sort: str
    role: str
    error: float
    hint: str = ""


def check(recipe: Recipe, sizes: Mapping[str, int], settings: Settings) -> int:
    """0 where the mesh computes what one process does, else 1. Rank 0 prints."""
    torch.manual_seed(settings.seed)
    world = init_world(settings.device)
    try:
        mesh = Mesh(sizes, world)
        batches = make_batches(recipe, settings, mesh.data_ranks)
        if not counted(batches):
            raise UsageError(
                f"No label counts in {settings.micro_batches} micro-batches of {settings.rows} rows of {settings.sequence} tokens (the last of a document, and one in "
                "eight, do not): loss and gradients would be 0 everywhere, and equal whatever the roles do. Take a larger --sequence, or another --seed."
            )
        # One process first, on rank 0: it knows of no group.
        logical.reset()
        whole = run_whole(recipe, batches, world.device) if world.rank == 0 else None
        mine = [batches[number][mesh.data_rank] for number in range(settings.micro_batches)]
        outcome = run_mesh(recipe, mesh, mine, counted(batches), settings)
        differences = compare(whole, outcome) if whole is not None else []
        failed = any(not each.error <= settings.tolerance for each in differences)
        if world.rank == 0:
            causes = causes_of(outcome.drops, whole is not None and whole.draws)
            print("\n".join([*report(recipe, sizes, settings, differences), *(causes if failed else ())]))
        return int(world.all_reduce(torch.tensor([int(failed)], device=world.device), "max", "verdict").item())
    finally:
        logical.reset()
        world.close()


# ---------------------------------------------------------------- the step


def make_batches(recipe: Recipe, settings: Settings, data_ranks: int) -> list[list[Batch]]:
    """By micro-batch and data-parallel rank: random tokens in documents of random lengths, one label in eight not counted."""
    generator = torch.Generator().manual_seed(settings.seed)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    made: list[list[Batch]] = []
    row = 0
    for _ in range(settings.micro_batches):
        made.append([])
        for _ in range(data_ranks):
            lengths = tuple(_lengths(settings.sequence, random) for _ in range(settings.rows))
            tokens_BS = random(0, recipe.model.vocab_size, settings.rows, settings.sequence)
            labels_BS = torch.cat((tokens_BS[:, 1:], tokens_BS[:, :1]), 1)
            documents_BS = torch.stack([torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(row)]) for row in lengths])
            positions_BS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
            ends_BS = torch.cat((documents_BS[:, 1:] != documents_BS[:, :-1], torch.ones(settings.rows, 1, dtype=torch.bool)), 1)
            labels_BS = labels_BS.masked_fill(ends_BS | (random(0, 8, settings.rows, settings.sequence) == 0), IGNORE)
            count = settings.rows * settings.sequence
            index_BS = torch.arange(row, row + count).view(settings.rows, settings.sequence)
            row += count
            made[-1].append(Batch(tokens_BS, labels_BS, positions_BS, documents_BS, lengths, extra={INDEX: index_BS}))
    return made


def _lengths(total: int, random: Any) -> tuple[int, ...]:
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(int(random(1, left + 1, 1)))
    return tuple(lengths)


def joined(ranks: Sequence[Batch]) -> Batch:
    """The ranks' rows as one micro-batch."""

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(each, name) for each in ranks])

    return Batch(
        rows("tokens_BS"),
        rows("labels_BS"),
        rows("positions_BS"),
        rows("documents_BS"),
        tuple(lengths for each in ranks for lengths in each.lengths),
        extra={INDEX: torch.cat([each.extra[INDEX] for each in ranks])},
    )


def counted(batches: Sequence[Sequence[Batch]]) -> int:
    """Labels that count in the whole step."""
    return sum(int((batch.labels_BS != IGNORE).sum()) for ranks in batches for batch in ranks)


class Recorded:
    """A loss that keeps the hidden states it was given, with where their tokens stand."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.seen: list[tuple[list[Tensor], Tensor]] = []

    def __call__(self, model: Model, hidden_BSD: Any, batch: Batch) -> LossSum:
        """The loss's own."""
        outputs = hidden_BSD if isinstance(hidden_BSD, tuple | list) else [hidden_BSD]
        self.seen.append(([each.detach().clone() for each in outputs], batch.extra[INDEX]))
        return self._loss(model, hidden_BSD, batch)

    def count(self, batch: Batch) -> int:
        """The loss's own."""
        return self._loss.count(batch)

    def put(self, tokens: int, comm: Communicator) -> Iterator[tuple[str, Tensor]]:
        """This rank's hidden states in their places among all `tokens` of the step; `comm` is the group that cuts rows once more."""
        depths = len(self.seen[0][0]) if self.seen else 0
        for depth in range(depths):
            whole_ND = self.seen[0][0][depth].new_zeros(tokens, self.seen[0][0][depth].shape[-1])
            for outputs, index_BS in self.seen:
                counts = even_counts(index_BS.shape[1], comm.size)
                whole_ND[index_BS.split(counts, 1)[comm.rank].flatten()] = outputs[depth].flatten(0, 1)
            yield f"hidden states{f', depth {depth}' if depth else ''}", whole_ND


def run_whole(recipe: Recipe, batches: Sequence[Sequence[Batch]], device: torch.device) -> Outcome:
    """The step on this process alone, by the model as it is written. A micro-batch has all data-parallel ranks' rows: losses that are no sums over tokens, such as a balance of experts, are those of the rows together."""
    from intarsia_eager import engine, whole
    from intarsia_eager.config import WholeConfig

    model, table = build_model(recipe)
    world = SelfCommunicator(device)
    mesh = Mesh({}, world)
    sharded = whole.build(WholeConfig()).shard(model, table, mesh, world)
    loss = Recorded(plugins.current().build(recipe.loss))
    running = engine.EagerEngine(model, loss)
    running_batches = [on_device(joined(ranks), device) for ranks in batches]
    model.train()
    state = torch.get_rng_state()
    sums = _sums(running.run(running_batches, 1.0 / max(1, counted(batches)), sharded))
    draws = not torch.equal(state, torch.get_rng_state())
    sharded.finish_gradients()
    gradients = {name: parameter.grad for name, parameter in sharded.parameters().items() if parameter.grad is not None}
    tokens = sum(batch.tokens_BS.numel() for ranks in batches for batch in ranks)
    return Outcome(dict(loss.put(tokens, world)), sums, gradients, draws=draws)


def run_mesh(recipe: Recipe, mesh: Mesh, batches: Sequence[Batch], count: int, settings: Settings) -> Outcome:
    """The step on the mesh; everything is whole, on every rank."""
    loaded, world = plugins.current(), mesh.world
    model, table = build_model(recipe)
    shapes = {name: (info.shape, info.trainable) for name, info in table.items()}
    parallel = parallelise(recipe, model, table, mesh)
    sharded = loaded.build(recipe.sharder).shard(model, table, mesh, world)
    loss = Recorded(loaded.build(recipe.loss))
    engine = loaded.build(recipe.engine, model, loss, recipe, parallel)
    model.train()
    local = [on_device(batch, mesh.device) for batch in batches]
    with explained(model, getattr(parallel, "roles", {}), recipe.compile.mode == "none"):
        sums = _sums(engine.run(local, 1.0 / max(1, count), sharded))
        sharded.finish_gradients()
    # What a step puts off to its end is told here as well: pairs that overflowed explain every difference.
    for state in [module for module in model.modules() if isinstance(module, StepState)]:
        state.reduce(lambda tensor: mesh.stage.all_reduce(tensor, what="step state"))
    names = sorted({name for each in world.gather_json(sorted(sums), what="names") for name in each})
    # Ranks along tp have the same sums: the first one's count.
    mine = [sums[name] if name in sums and not mesh.coordinates["tp"] else torch.zeros((), dtype=torch.float64) for name in names]
    totals = world.all_reduce(torch.stack([each.to(mesh.device) for each in mine]), "sum", "sums")
    tokens = settings.micro_batches * mesh.data_ranks * settings.rows * settings.sequence
    outputs = dict(loss.put(tokens, mesh.comm("tp")))
    described = {name: list(value.shape) for name, value in outputs.items()}
    everywhere = {name: shape for each in world.gather_json(described, what="outputs") for name, shape in each.items()}
    whole_outputs = {}
    for name, shape in sorted(everywhere.items()):
        mine_ND = outputs[name] if name in outputs else torch.zeros(shape, device=mesh.device)
        whole_outputs[name] = world.all_reduce(mine_ND, "sum", name)
    local_parameters = sharded.parameters()
    gradients = {}
    for name, (shape, trainable) in shapes.items():
        if trainable:
            info = table[name] if name in table else None  # noqa: SIM401 (an unknown name is a UsageError)
            parameter = local_parameters.get(name)
            gradients[name] = _whole_gradient(info, None if parameter is None else parameter.grad, shape, table, mesh)
    dropping = [name for name, module in model.named_modules() if _drops(module)]
    drops = sorted({name for each in world.gather_json(dropping, what="drops") for name in each})
    return Outcome(whole_outputs, dict(zip(names, totals.unbind(), strict=True)), gradients, dict(getattr(parallel, "roles", {})), drops)


def _drops(module: nn.Module) -> bool:
    """Whether its dispatcher owns up to leaving pairs out."""
    capabilities = getattr(getattr(module, "dispatcher", None), "capabilities", None)
    return bool(getattr(capabilities, "drops_tokens", False))


@contextlib.contextmanager
def explained(model: nn.Module, roles: Mapping[str, str], watched: bool = True) -> Iterator[None]:
    """What fails in here ran on one process: it becomes a PluginError that names the innermost module that was running, where modules may be `watched`, and the roles in it."""
    running: list[str] = []
    hooks = []

    def leave(*_: Any) -> None:  # What a hook returns would take the place of the module's output.
        running.pop()

    for name, module in model.named_modules() if watched else ():
        hooks.append(module.register_forward_pre_hook(lambda module, args, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    except IntarsiaError:
        raise
    except Exception as error:
        inside = f"{running[-1]}." if running and running[-1] else ""
        where = f"in the forward of {running[-1] or 'the model'}" if running else "in backward, or between modules"
        known = dict.fromkeys(
            f"{name.removeprefix(inside)} ({role})" for name, role in roles.items() if running and name.startswith(inside)
        )
        raise PluginError(
            f"The step runs on one process and fails on the mesh, {where}: {told(error)}. Look at the roles there"
            + (f": {', '.join([*known][:12])}." if known else " in the family's sharding table.")
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def build_model(recipe: Recipe) -> tuple[nn.Module, ParameterTable]:
    """The model on the meta device, and its table."""
    with torch.device("meta"):
        model = plugins.current().build(recipe.model)
    freeze(recipe.parameter_groups, model)
    precision = recipe.precision
    return model, ParameterTable.from_model(model, precision.master, precision.compute, precision.reduce, recipe.train.seed)


def parallelise(recipe: Recipe, model: nn.Module, table: ParameterTable, mesh: Mesh) -> Parallel:
    """By the recipe's paralleliser, or `declared`."""
    loaded = plugins.current()
    sharding = getattr(loaded.entry_of(recipe.model), "sharding", None)
    rows = None if sharding is None else import_reference(sharding)
    paralleliser = build_declared(DeclaredConfig()) if recipe.parallel is None else loaded.build(recipe.parallel)
    made: Parallel = paralleliser.apply(model, table, mesh, recipe, rows)
    return made


def _sums(results: Sequence[LossSum]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for result in results:
        for name, value in {"loss": result.total, **result.sums}.items():
            sums[name] = sums[name] + value.detach().double() if name in sums else value.detach().double()
    return sums


def _whole_gradient(info: ParameterInfo | None, local: Tensor | None, shape: Sequence[int], table: ParameterTable, mesh: Mesh) -> Tensor:
    """Every rank's primary part in its place, added up."""
    whole = torch.zeros(tuple(shape), device=mesh.device)
    if info is not None and not info.is_copy and info.layout is not None and local is not None:
        copies = any(mesh.coordinates[axis] for axis in copies_along(axis for axis, _ in info.layout.axes))
        rank = table.rank_in(info.layout)
        for box in info.layout.primary(rank) if not copies else ():
            for common, part in region_parts(local.detach().reshape(-1).float(), info.layout.local(rank), box):
                whole[slices(common)] = part
    return mesh.world.all_reduce(whole, "sum", "gradient")


# ---------------------------------------------------------------- the comparison


def compare(whole: Outcome, mesh: Outcome) -> list[Difference]:
    """Everything that one process has, and what only the mesh has, worst first."""
    found: list[Difference] = []
    scale = max((float(each.abs().max()) for each in whole.gradients.values() if each.numel()), default=0.0)
    for sort, expected, got in (
        ("output", whole.outputs, mesh.outputs),
        ("sum", whole.sums, mesh.sums),
        ("gradient", whole.gradients, mesh.gradients),
    ):
        for name in {**expected, **got}:
            role = mesh.roles.get(name, "") if sort == "gradient" else ""
            if name not in expected or name not in got:
                where = "one process" if name in expected else "the mesh"
                found.append(Difference(name, sort, role, float("inf"), f"only {where} has it"))
                continue
            floor = ROUNDING * scale if sort == "gradient" else 0.0
            error, hint = _error(expected[name].double().cpu(), got[name].double().cpu(), floor)
            found.append(Difference(name, sort, role, error, hint))
    return sorted(found, key=lambda each: -each.error if each.error == each.error else -float("inf"))


def _error(expected: Tensor, got: Tensor, floor: float = 0.0) -> tuple[float, str]:
    """The largest difference over the largest expected value, and what it looks like: a multiple says that something is summed too often, or not at all. Where neither side has a
    value above `floor`, both are what rounding left of sums that cancel, and no digit of them can agree: 0, as for values that are."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    distance = float((got - expected).abs().max()) if expected.numel() else 0.0
    if 0.0 < largest <= floor and float(got.abs().max()) <= floor:
        return 0.0, "rounding alone on both sides"
    if largest == 0.0:
        return distance, "0 on one process" if distance else ""
    factor = float((got * expected).sum() / expected.square().sum())
    is_multiple = abs(factor - 1) > 1e-3 and float((got - factor * expected).abs().max()) < 1e-4 * largest
    return distance / largest, f"{factor:.4g} times what one process has" if is_multiple else ""


def report(recipe: Recipe, sizes: Mapping[str, int], settings: Settings, differences: Sequence[Difference]) -> list[str]:
    """The table as lines: the verdict last."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one process"
    lines = [
        f"{recipe.name} on {mesh}: {settings.micro_batches} micro-batches of {settings.rows} rows of {settings.sequence} tokens for each "
        "data-parallel rank, float32"
    ]
    failed = [each for each in differences if not each.error <= settings.tolerance]
    shown = differences if settings.show_all else differences[: max(10, len(failed))]
    width = max((len(each.name) for each in shown), default=0)
    roles = max((len(each.role) for each in shown), default=0)
    for each in shown:
        mark = "" if each.error <= settings.tolerance else "  DIFFERS"
        lines.append(
            f"  {each.sort:8}  {each.name:{width}}  {each.role:{roles}}  {each.error:.1e}{mark}{f'  ({each.hint})' if each.hint else ''}"
        )
    if len(shown) < len(differences):
        lines.append(f"  and {len(differences) - len(shown)} more, each at most {differences[len(shown)].error:.1e}")
    gradients = sum(each.sort == "gradient" for each in differences)
    if failed:
        worst = failed[0]
        role = f" (role {worst.role})" if worst.role else ""
        lines.append(
            f"FAILED: {len(failed)} of {len(differences)} differ by more than {settings.tolerance:g}, {worst.sort} {worst.name}{role} by {worst.error:.1e}."
        )
    else:
        lines.append(f"Equal to one process within {settings.tolerance:g}: outputs, loss and {gradients} gradients.")
    return lines


def causes_of(drops: Sequence[str], draws: bool) -> list[str]:
    """What no role can help, where something differs: a line for each."""
    lines = []
    if drops:
        lines.append(
            f"The dispatchers of {len(drops)} layers ({drops[0]} first) may leave pairs of tokens and experts out, as one process never does: take one that drops "
            "none (all_to_all, or overflow=error) to check the rest."
        )
    if draws:
        lines.append(
            "The step draws random numbers (a router's jitter, a dropout), other ones on each rank than one process does: switch that off to check the rest."
        )
    return lines
