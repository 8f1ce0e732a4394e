"""The paralleliser `declared`: a model that is written for one device, cut by its family's sharding table for this process's place in the mesh.

The order is what the rest relies on: every row is checked before anything is cut; parameters are cut (on the meta device) before modules are wrapped; modules are wrapped
before a sharder adds hooks and an engine compiles and recomputes; what makes groups of processes does so in one order on all ranks, and the pipeline is split last.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from intarsia import logical
from intarsia.contracts import Batch, Mixer, PipelinePart, Placement, SequenceContext
from intarsia.errors import IntarsiaError, PluginError, UsageError, did_you_mean
from torch import Tensor, nn

from intarsia_parallel import tokens
from intarsia_parallel.collectives import sum_both
from intarsia_parallel.config import DeclaredConfig
from intarsia_parallel.context import choose, parallel_context, ulysses
from intarsia_parallel.context.choose import cut_for
from intarsia_parallel.context.cut import SequenceCut
from intarsia_parallel.cuts import Cuts, cut_parameters, local_box
from intarsia_parallel.overlap import overlap, products_of
from intarsia_parallel.table import Placed, inside, place, rows_of

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.config import Recipe
    from intarsia.mesh import Mesh
    from intarsia.parameters import ParameterTable

# Axes that modules are cut or wrapped for. A pipeline cuts between blocks, which any model allows.
_NEEDS_TABLE = ("cp", "tp", "ep")


class Declared:
    """See `intarsia.contracts.Paralleliser`."""

    def __init__(self, config: DeclaredConfig) -> None:
        choose.check(config.context)
        self._config = config

    def apply(self, model: nn.Module, table: ParameterTable, mesh: Mesh, recipe: Recipe, sharding: Any) -> DeclaredParallel:
        """Cut, wrap, and split. Raises UsageError with everything that is wrong with rows and sizes at once."""
        family = type(model).__name__
        needed = [f"{axis} {mesh.sizes[axis]}" for axis in _NEEDS_TABLE if mesh.sizes[axis] > 1]
        if sharding is None and needed:
            raise UsageError(
                f"mesh: {', '.join(needed)} needs a sharding table, and the family of {family} has none. Give its ModelEntry one (`sharding=`), or use pp, "
                "dp_replicate and dp_shard, which any family can."
            )
        # Groups first: making one is a collective, and what a rank does below may depend on its coordinates.
        groups = Groups(mesh)
        placed: list[Placed] = []
        if needed:
            placed, problems = place(rows_of(sharding, recipe.model, family), model)
            problems += check(placed, model, mesh)
            problems += check_heads(placed, self._config.context, mesh)
            # What does not stand up to its check cannot be asked for its cuts.
            cuts = {} if problems else cuts_of(placed, table, mesh, problems)
            if problems:
                told = "".join(f"\n  - {each}" for each in folded(problems))
                raise UsageError(f"{family} cannot be cut for the mesh ({', '.join(needed)}):{told}")
            cut_parameters(model, table, mesh, cuts)
        self._prepare_roles(placed, recipe)
        for each in placed:
            each.ask("apply", groups)
        if mesh.sizes["tp"] > 1:
            if self._config.async_tensor:
                overlap(placed, groups("tp"), products_of(groups("tp"), mesh.device))
            _note_tokens(model)
            _install_losses(model, placed, groups)
        _install_logical(mesh)
        # What kinds of mixers a model has is asked of the whole of it: stages must agree.
        parallel = DeclaredParallel(self._config, mesh, model, _roles_of(placed, table))
        parallel.part = self._split(model, table, mesh, recipe)
        return parallel

    def _prepare_roles(self, placed: Sequence[Placed], recipe: Recipe) -> None:
        """Roles that depend on the paralleliser's settings (experts on the dispatcher) take them by their method `prepare(config, recipe)`."""
        for role in {id(each.role): each.role for each in placed}.values():
            prepare = getattr(role, "prepare", None)
            if prepare is not None:
                prepare(self._config, recipe)

    def _split(self, model: nn.Module, table: ParameterTable, mesh: Mesh, recipe: Recipe) -> PipelinePart | None:
        if mesh.sizes["pp"] == 1:
            return None
        try:
            from intarsia_pipeline.split import split
        except ImportError as error:
            raise UsageError(f"mesh: pp {mesh.sizes['pp']} needs the distribution intarsia-pipeline, which is not installed.") from error
        part: PipelinePart = split(model, table, mesh, recipe, self._config.stages)
        return part


class Groups:
    """Mesh axes to the group of ranks that differ along them. Stability: provisional."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        for axes in (("tp",), ("cp",), ("ep",), ("cp", "tp"), ("dp_replicate", "dp_shard")):
            mesh.comm(*axes)

    def __call__(self, *axes: str) -> Communicator:
        return self._mesh.comm(*axes)


class DeclaredParallel:
    """See `intarsia.contracts.Parallel`. `roles` says for every parameter name which role decided on it, for messages."""

    def __init__(self, config: DeclaredConfig, mesh: Mesh, model: nn.Module, roles: Mapping[str, str]) -> None:
        self.part: PipelinePart | None = None
        self.roles = roles
        self._config, self._comm = config, mesh.comm("cp")
        self._method = cut_for(model)[0] if self._comm.size > 1 else ""

    def local(self, batch: Batch) -> Batch:
        """This rank's part of every row."""
        return self._cut(batch.tokens_BS.shape[1]).local(batch, self._comm.rank) if self._method else batch

    def context(self, batch: Batch, windows: Sequence[int | None]) -> SequenceContext | None:
        """Mixers see whole rows; without context parallelism the engine's own context shows them."""
        if not self._method:
            return None
        return parallel_context.build(self._config, batch, windows, self._cut(sum(batch.lengths[0]) if batch.lengths else 0), self._comm)

    def _cut(self, length: int) -> SequenceCut:
        return SequenceCut.of(length, self._comm.size, self._method)


# ---------------------------------------------------------------- before anything is cut


def check(placed: Sequence[Placed], model: nn.Module, mesh: Mesh) -> list[str]:
    """What the roles, and the rows together, have against these sizes."""
    problems: list[str] = []
    for each in placed:
        try:
            each.ask("check", mesh.sizes)
        except IntarsiaError as error:
            problems.append(str(error))
    problems += twice(placed)
    if mesh.sizes["tp"] == 1:
        return problems
    names = {each.name for each in placed}
    enders = [each.name for each in placed if getattr(each.role, "ends_region", False)]
    for each in placed:
        if getattr(each.role, "is_region", False) and not any(inside(ender, each.name) for ender in enders):
            problems.append(
                f"{each.name} ({each.role_name}) sees all tokens, and nothing inside ends that: its output projection needs the role row, or every rank would "
                "add the whole of it."
            )
    bare = [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and not any(name == other or inside(name, other) for other in names)
    ]
    if bare:
        problems.append(
            f"no row says what {', '.join(bare[:4])}{f' and {len(bare) - 4} more modules' if len(bare) > 4 else ''} with parameters do under tp={mesh.sizes['tp']}. "
            "A module that works token by token has the role sequence."
        )
    return problems


def twice(placed: Sequence[Placed]) -> list[str]:
    """Modules that rows would wrap twice for one purpose: two rows with one role, or two roles that gather all tokens, or two that sum."""
    problems: list[str] = []
    seen: dict[tuple[str, object], Placed] = {}
    for each in placed:
        gathers = getattr(each.role, "is_region", False) or getattr(each.role, "gathers_all", False)
        purposes: dict[object, bool] = {type(each.role): True, "gathers": gathers, "sums": getattr(each.role, "ends_region", False)}
        before = [seen.setdefault((each.name, purpose), each) for purpose, is_so in purposes.items() if is_so]
        if other := next((found for found in before if found is not each), None):
            alike = "one role" if type(other.role) is type(each.role) else "roles that both gather, or both sum"
            problems.append(
                f"{each.name} has {alike} by two rows, {other.pattern!r} ({other.role_name}) and {each.pattern!r} ({each.role_name}): it would be wrapped "
                "twice. Leave one row out."
            )
    return problems


def check_heads(placed: Sequence[Placed], method: str, mesh: Mesh) -> list[str]:
    """What context parallelism by heads has against the heads that tensor parallelism leaves to a rank. Latents are gathered whatever the method is."""
    if method != "ulysses" or mesh.sizes["cp"] == 1:
        return []
    problems = []
    for each in placed:
        count, module = getattr(each.role, "heads", None), each.module
        if count is None or not isinstance(module, Mixer) or module.cache_spec().kind != "softmax":
            continue
        heads, rest = divmod(count(each.name, module), mesh.sizes["tp"])
        problem = None if rest else ulysses.obstacle(heads, mesh.sizes["cp"])
        if problem is not None:
            left = f" (tp {mesh.sizes['tp']} leaves {heads} heads to a rank)" if mesh.sizes["tp"] > 1 else ""
            problems.append(f"{each.name}: parallel.context=ulysses: {problem}{left}. Or choose ring or gather.")
    return problems


def folded(problems: Sequence[str]) -> list[str]:
    """Problems that differ by a layer's number only, told once."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", problem), []).append(problem)
    return [texts[0] + (f" ({len(texts) - 1} more alike)" if len(texts) > 1 else "") for texts in alike.values()]


def cuts_of(placed: Sequence[Placed], table: ParameterTable, mesh: Mesh, problems: list[str]) -> dict[str, Cuts]:
    """Each parameter's cuts by canonical name, as its roles say. A role that speaks for a parameter of a module inside its own (`overrules`) has the say there."""
    overruled: dict[str, str] = {}
    for each in placed:
        for local in each.ask("overrules") if hasattr(each.role, "overrules") else ():
            overruled.setdefault(f"{each.name}.{local}", each.name)
    found: dict[str, dict[str, tuple[Placement, str]]] = {}
    for each in placed:
        try:
            cuts = checked_cuts(each, each.ask("cut", mesh.sizes), mesh)
        except IntarsiaError as error:
            problems.append(str(error))
            continue
        for local, (axis, placement) in cuts.items():
            full = f"{each.name}.{local}"
            if full not in table:
                problems.append(
                    f"{each.name}: the role {each.role_name} cuts {local!r}, which is no parameter of {type(each.module).__name__}."
                )
                continue
            if overruled.get(full, each.name) != each.name or mesh.sizes.get(axis, 1) == 1:
                continue
            before = found.setdefault(table[full].name, {}).setdefault(axis, (placement, full))
            if before[0] != placement:
                problems.append(f"{full} is cut twice over {axis}: as {placement.name} here, and as {before[0].name} for {before[1]}.")
    if mesh.sizes["ep"] > 1 and not any("ep" in cuts for cuts in found.values()):
        problems.append(
            f"ep is {mesh.sizes['ep']}, and no row cuts anything over ep: the model has no module with the role expert. Set mesh.ep=1."
        )
    result = {name: tuple((axis, placement) for axis, (placement, _) in cuts.items()) for name, cuts in found.items()}
    for name, steps in result.items() if not problems else ():
        try:
            local_box(name, table[name].shape, steps, mesh)
        except UsageError as error:
            problems.append(str(error))
    return result


def checked_cuts(placed: Placed, cuts: Any, mesh: Mesh) -> Mapping[str, tuple[str, Placement]]:
    """What a role's `cut` gave, held against the contract."""
    axes = [axis for axis in mesh.sizes if axis not in ("pp", "dp_replicate", "dp_shard")]
    whose = f"{placed.name}: the role {placed.role_name}"
    if not isinstance(cuts, Mapping):
        raise PluginError(f"{whose} gave {cuts!r} as its cuts; they are parameter name -> (mesh axis, placement), {{}} for none.")
    for local, cut in cuts.items():
        if not (isinstance(cut, tuple) and len(cut) == 2 and isinstance(cut[0], str) and hasattr(cut[1], "partition")):
            raise PluginError(f"{whose} cuts {local!r} by {cut!r}; a cut is (mesh axis, placement).")
        if cut[0] not in axes:
            raise PluginError(
                f"{whose} cuts {local!r} over {cut[0]!r}, which is no axis that parameters are cut over. {did_you_mean(cut[0], axes)}"
            )
    return cuts


# ---------------------------------------------------------------- after everything is wrapped


def _note_tokens(model: nn.Module) -> None:
    """The model and each of its blocks, which recomputation may run by themselves, say how many tokens the pass has."""
    tokens.notes(model)
    for block in model.regions().blocks:  # type: ignore[operator]
        tokens.notes(model.get_submodule(block))


def _roles_of(placed: Sequence[Placed], table: ParameterTable) -> dict[str, str]:
    """For every parameter the roles of its module, or of the nearest module around it that has one."""
    roles: dict[str, list[str]] = {}
    for each in placed:
        roles.setdefault(each.name, []).append(each.role_name)
    found = {}
    for name in table:
        place = name.rpartition(".")[0]
        while place and place not in roles:
            place = place.rpartition(".")[0]
        found[name] = ", ".join(roles.get(place, ["none"]))
    return found


def _install_losses(model: Any, placed: Sequence[Placed], groups: Groups) -> None:
    """The role of whoever holds the head weight makes the model's cross-entropy, and, where it knows of them, tokens' log-probabilities."""
    head = model.head_weight_VD
    for each in placed:
        make = getattr(each.role, "cross_entropy", None)
        if make is not None and isinstance(each.module, nn.Linear) and each.module.weight is head:
            model.cross_entropy = make(each.name, each.module, groups)
            if hasattr(each.role, "token_log_probs"):
                model.token_log_probs = each.role.token_log_probs(each.name, each.module, groups)
            return
    raise UsageError(
        f"No row of the sharding table gives the output projection of {type(model).__name__} (whose weight is head_weight_VD) a role with a cross-entropy. Give it "
        "the role vocab."
    )


def _install_logical(mesh: Mesh) -> None:
    axes: dict[Any, Any] = {}
    for name, members in (("sequence", ("cp", "tp")), ("batch", ("dp_replicate", "dp_shard"))):
        comm = mesh.comm(*members)
        if comm.size > 1:
            axes[name] = (functools.partial(sum_both, comm=comm, what=f"logical sum, {name}"), comm.size)
    logical.install(axes, functools.partial(_complete, mesh.comm("tp")) if mesh.sizes["tp"] > 1 else None)


def _complete(comm: Communicator, sums: dict[str, Tensor]) -> None:
    """What modules recorded of their parts of the sequence, added up: along tp every rank then says the same, as of the loss itself."""
    names = sorted(sums)
    if names:
        total = comm.all_reduce(torch.stack([sums[name].double() for name in names]), "sum", "sums of the micro-batch")
        sums.update(zip(names, total.unbind(), strict=True))


def build(config: DeclaredConfig) -> Declared:
    """The entry's target."""
    return Declared(config)
