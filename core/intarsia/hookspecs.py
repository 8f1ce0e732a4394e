"""Every hook of core, on one page. Read this first.

Two sorts, never both for one thing:

* an **offer** returns entries for a registry, of which a run chooses by name (one of N);
* an **event** is many-to-many. A *participant* may change or stop the run; one that raises ends it, and its owner is named.
  An *observer* only looks; one that raises is switched off and reported once, and the run goes on.

A plugin is a module (or object) named by an entry point in the group `intarsia`, whose functions are marked with `hookimpl`. It
declares `INTARSIA_API = 1`. Loading it must import nothing heavy: entries name code as `"module:attribute"` strings.
An implementation may take fewer arguments than its spec, by name.

Plugins that own a further kind declare it with `add_hookspecs` and the decorators below, and get a registry and the checks of core's own.
No event may call a collective unless its spec says so.

Stability: stable, every hook and decorator here; what a kind's `target` is handed is as stable as the contract that it names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pluggy

from intarsia.contracts import Entry, KernelEntry, ModelEntry

if TYPE_CHECKING:
    from intarsia.contracts import BuildStage, Run, StepSummary

hookspec = pluggy.HookspecMarker("intarsia")
hookimpl = pluggy.HookimplMarker("intarsia")

Spec = TypeVar("Spec", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class SpecFacts:
    """What the decorators below record on a spec as `spec_facts` (pluggy keeps its own options in `intarsia_spec`)."""

    sort: Literal["offer", "participant", "observer", "declaration"]
    kind: str = ""
    base: str = ""
    ranks: Literal["zero", "all"] = "zero"
    entry: type[Entry] = Entry


def _spec(facts: SpecFacts) -> Callable[[Spec], Spec]:
    def mark(function: Spec) -> Spec:
        function.spec_facts = facts  # type: ignore[attr-defined]
        return hookspec(function)

    return mark


def offer(kind: str, base: str = "", entry: type[Entry] = Entry) -> Callable[[Spec], Spec]:
    """Mark a spec as an offer of entries of `kind` (singular, as messages call it). `base` names the config classes' base, `"module:Class"`."""
    return _spec(SpecFacts("offer", kind, base, entry=entry))


# Mark a spec as a participant event: called on every rank, in declared order; an exception ends the run.
participant = _spec(SpecFacts("participant", ranks="all"))


def observer(ranks: Literal["zero", "all"] = "zero") -> Callable[[Spec], Spec]:
    """Mark a spec as an observer event, called on rank 0 or on all ranks; an exception switches the implementation off."""
    return _spec(SpecFacts("observer", ranks=ranks))


# ---------------------------------------------------------------- declarations


@_spec(SpecFacts("declaration"))
def add_hookspecs() -> Sequence[str]:
    """Declare further hooks.

    When: first pass of loading, before any other hook of any plugin. Where: every process.
    Returns: module names whose functions marked by `offer`, `participant` or `observer` become hooks (an offer becomes a registry).
    On error: the plugin is rejected. An implementation of a hook whose owner may be absent is marked `@hookimpl(optionalhook=True)`.
    """


# ---------------------------------------------------------------- offers
# All: when: second pass of loading; where: every process; returns: entries (an iterable, may be empty);
# on error: the whole plugin is rejected and listed in the failure report, none of its entries is registered.


@offer("model", base="intarsia.config:ModelConfig", entry=ModelEntry)
def offer_models() -> Sequence[ModelEntry]:
    """Model families. Target: `build(config) -> nn.Module` (an `intarsia.contracts.Model`), called under the meta device as well."""


@offer("component", base="intarsia.config:ComponentConfig")
def offer_components() -> Sequence[Entry]:
    """Building blocks that model configs nest and overrides replace. Target: `build(config, **context) -> nn.Module`; context is the family's."""


@offer("placement", base="intarsia.config:PlacementConfig")
def offer_placements() -> Sequence[Entry]:
    """Placements. Target: `build(config) -> Placement`."""


@offer("operator")
def offer_operators() -> Sequence[Entry]:
    """Operators that a plugin owns: kernels may replace them as they may those of `intarsia.ops`. Target: the `intarsia.ops.Operator`, of the entry's name."""


@offer("kernel", entry=KernelEntry)
def offer_kernels() -> Sequence[KernelEntry]:
    """Kernels for operators. Target: a callable with the reference's signature."""


@offer("checkpoint backend", base="intarsia.config:CheckpointBackendConfig")
def offer_checkpoint_backends() -> Sequence[Entry]:
    """Formats of checkpoint data. Target: `build(config) -> CheckpointBackend`."""


@offer("checkpoint format")
def offer_checkpoint_formats() -> Sequence[Entry]:
    """Formats that `intarsia checkpoint export` and `import` know besides our own. Target: `build() -> CheckpointFormat`."""


@offer("storage", base="intarsia.config:StorageConfig")
def offer_storages() -> Sequence[Entry]:
    """Places where checkpoints go. Target: `build(config, root) -> Storage`, root being the run directory or the location the user named.
    The entry called `posix` is what opens a checkpoint that is named by a path alone."""


@offer("environment", base="intarsia.config:EnvironmentConfig")
def offer_environments() -> Sequence[Entry]:
    """Environments for reinforcement learning. Target: `build(config) -> Environment`."""


@offer("optimizer", base="intarsia.config:OptimizerConfig")
def offer_optimizers() -> Sequence[Entry]:
    """Optimizers. Target: `build(config, groups, table, comm) -> Optimizer`."""


@offer("loss", base="intarsia.config:LossConfig")
def offer_losses() -> Sequence[Entry]:
    """Losses. Target: `build(config) -> Loss`."""


@offer("data source", base="intarsia.config:DataSourceConfig")
def offer_data_sources() -> Sequence[Entry]:
    """Sources of documents. Target: `build(config) -> DataSource`."""


@offer("loader", base="intarsia.config:LoaderConfig")
def offer_loaders() -> Sequence[Entry]:
    """Loaders, which own order, packing and the exact position. Target: `build(config, recipe, plugins, rank, ranks, directory, split) -> Loader`;
    rank and ranks count those that share the data, split is "train" or "evaluation", which has at least one step."""


@offer("tokenizer", base="intarsia.config:TokenizerConfig")
def offer_tokenizers() -> Sequence[Entry]:
    """Tokenizers. Target: `build(config) -> Tokenizer`."""


@offer("schedule", base="intarsia.config:ScheduleConfig")
def offer_schedules() -> Sequence[Entry]:
    """Learning-rate schedules. Target: `build(config) -> Schedule`."""


@offer("engine", base="intarsia.config:EngineConfig")
def offer_engines() -> Sequence[Entry]:
    """Engines that run forward and backward. Target: `build(config, model, loss, recipe, parallel) -> Engine`, which also does what the
    recipe's `compile` and `recompute` ask for."""


@offer("sharder", base="intarsia.config:SharderConfig")
def offer_sharders() -> Sequence[Entry]:
    """Runtimes that keep parameters as shards. Target: `build(config) -> Sharder`."""


@offer("transport", base="intarsia.config:TransportConfig")
def offer_transports() -> Sequence[Entry]:
    """Ways from rank to rank other than through the process group. Target: `build(config) -> Transport`."""


@offer("paralleliser", base="intarsia.config:ParallelConfig")
def offer_parallelisers() -> Sequence[Entry]:
    """What makes a model ready for a mesh with tensor, context, expert or pipeline parallelism. Target: `build(config) -> Paralleliser`.
    The entry called `declared` is used where the recipe names none and the mesh needs one."""


@offer("role", base="intarsia.config:RoleConfig")
def offer_roles() -> Sequence[Entry]:
    """Roles that a family's sharding table gives to modules. Target: `build(config) -> Role`."""


@offer("metric sink", base="intarsia.config:MetricSinkConfig")
def offer_metric_sinks() -> Sequence[Entry]:
    """Receivers of a run's events. Target: `build(config, run_directory) -> MetricSink`, on rank 0."""


@offer("extension", base="intarsia.config:ExtensionConfig")
def offer_extensions() -> Sequence[Entry]:
    """A plugin's own section in the recipe (`extensions.NAME`). Target: the config class itself."""


@offer("launcher")
def offer_launchers() -> Sequence[Entry]:
    """What starts the processes of `intarsia train --processes N`. Target: `launch(arguments, processes) -> exit code`, which runs
    `intarsia ARGUMENTS` as that many ranks. The entry called `local` is the one that is used."""


@offer("recipe")
def offer_recipes() -> Sequence[Entry]:
    """Recipes, named `family/size` by custom. Target: a function without required arguments that returns a `Recipe`."""


@offer("transform")
def offer_transforms() -> Sequence[Entry]:
    """Functions Recipe -> Recipe, chosen by `--with NAME`. Target: the function."""


@offer("command")
def offer_commands() -> Sequence[Entry]:
    """Commands of `intarsia`. Target: an `intarsia.cli.Command` (`add_arguments(parser)`, `run(arguments) -> int`); doc is its help line."""


# ---------------------------------------------------------------- events: participants


@participant
def before_run(run: Run) -> None:
    """When: once, before anything is built; the recipe is final, the run directory exists. Where: every rank. On error: the run ends."""


@participant
def before_build(run: Run, stage: BuildStage) -> None:
    """When: before each stage of the build. Where: every rank; collectives are allowed from stage "model" on, in the same order everywhere. On error: the run ends."""


@participant
def after_build(run: Run, stage: BuildStage) -> None:
    """When: after each stage; `run.parts[stage]` is its product, which may be adjusted in place. Where: every rank; collectives as in `before_build`. On error: the run ends."""


@participant
def before_step(run: Run, step: int) -> None:
    """When: before the first micro-batch of optimizer step `step` (0-based). Where: every rank; collectives allowed. On error: the run ends; the last checkpoint stays."""


@participant
def before_update(run: Run, step: int) -> None:
    """When: gradients are reduced, clipped and finite; the optimizer has not stepped. Where: every rank; collectives allowed. On error: the run ends; the step is not applied."""


@participant
def before_checkpoint(run: Run, step: int) -> None:
    """When: before state is collected for a save after `step` finished steps. Where: every rank; collectives allowed. On error: the run ends without this checkpoint."""


# ---------------------------------------------------------------- events: observers


@observer()
def after_step(run: Run, summary: StepSummary) -> None:
    """When: after each optimizer step. Where: rank 0. Arguments: global numbers, see StepSummary."""


@observer("all")
def on_step_error(run: Run, step: int, error: BaseException) -> None:
    """When: a step raised; the run is about to end. Where: rank 0, and any rank on which it was raised."""


@observer()
def after_evaluation(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """When: after each evaluation. Arguments: `metrics` hold at least `loss` (nats per counted token) and `bits_per_byte` where the tokenizer allows. Where: rank 0."""


@observer()
def after_checkpoint(run: Run, step: int, location: str) -> None:
    """When: a checkpoint has become durable (later than the step that asked for it). Where: rank 0."""


@observer()
def on_checkpoint_error(run: Run, step: int, error: BaseException) -> None:
    """When: saving the checkpoint of `step` failed; the run is about to end. Where: rank 0."""


@observer()
def after_load(run: Run, step: int, location: str) -> None:
    """When: a checkpoint was loaded and training is about to go on at `step`. Where: rank 0."""


@observer()
def after_run(run: Run, outcome: str) -> None:
    """When: once, at the end; `outcome` is "done", "stopped" or "failed". Where: rank 0."""


@observer("all")
def on_run_error(run: Run, error: BaseException) -> None:
    """When: the run ends by an error, before `after_run`. Where: rank 0, and the rank on which it was raised."""
