"""The staged build: one small function for each stage, with `before_build` and `after_build` around it."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import torch

from intarsia import ops
from intarsia.checkpoint import CheckpointManager
from intarsia.config import Config, ModelConfig, Resolved
from intarsia.contracts import BuildStage, Loader, StepState, Tokenizer
from intarsia.device import capabilities
from intarsia.discovery import import_reference
from intarsia.errors import UsageError
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import Plugins
from intarsia.train.built import DATA_AXES, Built
from intarsia.train.groups import freeze, optimizer_groups
from intarsia.train.state import ModelState, OptimizerState, RandomState


def build(built: Built, sizes: dict[str, int], facts: dict[str, Any]) -> None:
    """Build every part of the run, in the order of `BuildStage`. `facts` go into every checkpoint's manifest."""
    stages: dict[BuildStage, Callable[[], Any]] = {
        "mesh": lambda: build_mesh(built, sizes),
        "data": lambda: build_data(built),
        "model": lambda: build_model(built),
        "parameters": lambda: build_parameters(built),
        "optimizer": lambda: build_optimizer(built),
        "engine": lambda: build_engine(built),
        "checkpoint": lambda: build_checkpoint(built, facts),
    }
    for stage, action in stages.items():
        start = time.perf_counter()
        built.hooks.before_build(run=built.run, stage=stage)
        built.run.parts[stage] = action()
        built.hooks.after_build(run=built.run, stage=stage)
        built.event("build", stage=stage, seconds_s=time.perf_counter() - start, **_stage_facts(built, stage))
    check_framework(built)


def _stage_facts(built: Built, stage: BuildStage) -> dict[str, Any]:
    if stage == "data":
        return {"data": built.loader.facts(), "evaluation": built.evaluation.facts() if built.evaluation else None}
    if stage == "parameters":
        return dict(built.table.total)
    if stage == "optimizer":
        groups = collections.Counter(info.group for info in built.table.values() if info.group)
        slots = collections.Counter(", ".join(slots) for slots in built.optimizer.slots().values())
        work: dict[str, Any] = getattr(built.optimizer, "facts", dict)()
        return {"groups": groups, "slots": slots, "learning_rates": built.optimizer.learning_rates(), **({"work": work} if work else {})}
    return {}


def build_mesh(built: Built, sizes: dict[str, int]) -> Mesh:
    """Stage mesh."""
    built.mesh = Mesh(sizes, built.world)
    built.data = built.mesh.comm(*DATA_AXES)
    return built.mesh


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Refuse a tokenizer that makes ids the model has no embedding for. Errors: UsageError with both sizes. Stability: stable."""
    if tokenizer.vocab_size > model.vocab_size:
        raise UsageError(
            f"The tokenizer has {tokenizer.vocab_size} ids but the model's vocabulary holds {model.vocab_size}: ids {model.vocab_size} to "
            f"{tokenizer.vocab_size - 1} would have no embedding. Set model.vocab_size to at least {tokenizer.vocab_size}, or choose another tokenizer."
        )


def build_data(built: Built) -> Loader:
    """Stage data: the training loader and, where the recipe evaluates, the held-out one."""
    recipe, mesh = built.resolved.recipe, built.mesh

    def loader(split: str) -> Loader:
        return built.plugins.build(recipe.data.loader, recipe, built.plugins, mesh.data_rank, mesh.data_ranks, built.run.directory, split)

    built.loader = loader("train")
    check_vocabulary(built.loader.tokenizer, recipe.model)
    if recipe.evaluation.every != 0 and (recipe.data.evaluation or recipe.data.held_out > 0):
        built.evaluation = built.run.parts["evaluation"] = loader("evaluation")
    return built.loader


def build_model(built: Built) -> torch.nn.Module:
    """Stage model: shapes only, on the meta device; frozen groups stop training."""
    recipe = built.resolved.recipe
    with torch.device("meta"):
        built.model = built.plugins.build(recipe.model)
    freeze(recipe.parameter_groups, built.model)
    built.flops_per_token = built.model.flops_per_token(recipe.train.sequence_length)  # type: ignore[operator]
    return built.model


def choose_kernels(resolved: Resolved, plugins: Plugins) -> None:
    """Put the recipe's kernels in force, before any process group exists. What `auto` chose for a run stays chosen when it is resumed, but for
    operators that the recipe names."""
    recipe = resolved.recipe
    pinned = {path.removeprefix("kernels."): str(fact["value"]) for path, fact in resolved.pinned.items() if path.startswith("kernels.")}
    wanted = {**(pinned if recipe.kernels.get("*", "auto") == "auto" else {}), **recipe.kernels}
    selection = ops.select(wanted, plugins, capabilities(), recipe.precision.compute, compiled=recipe.compile.mode != "none")
    ops.install(selection)
    for op, choice in selection.facts().items():
        resolved.decide(f"kernels.{op}", choice["value"], choice["reason"])


def parallelise(built: Built) -> None:
    """Let the recipe's paralleliser cut the model, or `declared` where the recipe names none and the mesh needs one."""
    recipe, plugins = built.resolved.recipe, built.plugins
    sums = ("dp_replicate", "dp_shard") if getattr(built.model, "sums_over_batch", False) else ()
    needed = [f"{axis} {built.mesh.sizes[axis]}" for axis in ("pp", "cp", "tp", "ep", *sums) if built.mesh.sizes[axis] > 1]
    config: Config | None = recipe.parallel
    if config is None and needed:
        declared = [entry for entry in plugins.registry("paralleliser").entries() if entry.name == "declared"]
        if not declared:
            raise UsageError(
                f"mesh: {', '.join(needed)} needs a paralleliser, and no plugin offers the one called `declared`. Install intarsia-parallel, or use "
                "dp_replicate and dp_shard only, with a model whose losses look at one row at a time."
            )
        config = plugins.config_class(declared[0])()
        built.resolved.decide("parallel", declared[0].full_name, f"the mesh has {', '.join(needed)}")
    if config is not None:
        sharding = getattr(plugins.entry_of(recipe.model), "sharding", None)
        table = None if sharding is None else import_reference(sharding)
        built.parallel = plugins.build(config).apply(built.model, built.table, built.mesh, recipe, table)


def build_parameters(built: Built) -> Any:
    """Stage parameters: the table, the paralleliser that cuts the model, and the sharder that takes the parameters over and fills them."""
    recipe = built.resolved.recipe
    precision = recipe.precision
    built.table = built.run.parts["table"] = ParameterTable.from_model(
        built.model, precision.master, precision.compute, precision.reduce, recipe.train.seed
    )
    parallelise(built)
    config: Config = recipe.sharder
    whole = [entry for entry in built.plugins.registry("sharder").entries() if entry.name == "whole"]
    if whole and built.world.size == 1 and precision.master == precision.compute == precision.reduce:
        config = built.plugins.config_class(whole[0])()
        built.resolved.decide("sharder", whole[0].full_name, "one process and one dtype: there is nothing to shard or cast")
    built.sharded = built.plugins.build(config).shard(built.model, built.table, built.mesh, built.world)
    return built.sharded


def build_optimizer(built: Built) -> Any:
    """Stage optimizer: parameter groups, optimizer, schedule."""
    recipe = built.resolved.recipe
    trainable = [name for name in built.table.names() if built.table[name].trainable]
    groups = optimizer_groups(recipe.parameter_groups, built.sharded.parameters(), trainable)
    for group in groups:
        for name in group.parameters:
            built.table[name].group = group.name
    built.optimizer = built.plugins.build(recipe.optimizer, groups, built.table, built.world)
    if any(info.low is not None for info in built.table.values()) and not getattr(built.optimizer, "updates_split_masters", False):
        raise UsageError(
            f"The optimizer {type(recipe.optimizer).__name__} updates whole masters only, but the sharder keeps them split (sharder.master=split). Choose "
            "sharder.master=float32, or an optimizer that updates split masters."
        )
    built.schedule = built.plugins.build(recipe.schedule)
    return built.optimizer


def build_engine(built: Built) -> Any:
    """Stage engine: the loss, the engine, and modules with state of their own."""
    recipe = built.resolved.recipe
    built.loss = built.run.parts["loss"] = built.plugins.build(recipe.loss)
    built.engine = built.plugins.build(recipe.engine, built.model, built.loss, recipe, built.parallel)
    built.step_states = [module for module in built.model.modules() if isinstance(module, StepState)]
    built.model.train()
    return built.engine


def build_checkpoint(built: Built, facts: dict[str, Any]) -> CheckpointManager:
    """Stage checkpoint: the manager, and what has state. Generators come last, so that nothing after them draws."""
    recipe, run = built.resolved.recipe, built.run
    built.random = RandomState(recipe.train.seed, run.rank, built.device)
    built.components = [
        ModelState(built.model, built.sharded, built.table),
        OptimizerState(built.optimizer, built.table),
        built.loader,
        built.progress,
        built.random,
    ]
    facts["data"] = built.loader.facts()
    decisions = built.resolved.decisions.items()
    facts["kernels"] = {path.removeprefix("kernels."): decision["value"] for path, decision in decisions if path.startswith("kernels.")}
    built.manager = CheckpointManager(recipe.checkpoint, run.directory, built.world, built.plugins, facts, exclusive=True)
    return built.manager


def check_framework(built: Built) -> None:
    """Frozen stays frozen, ties stay tied, every parameter is in exactly one group and one bucket; no parameter was lost on the way."""
    groups = {name: built.table[name].group for name in built.table.names()}
    built.table.check(built.model, groups, built.sharded)
