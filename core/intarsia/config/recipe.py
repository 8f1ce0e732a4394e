"""The Recipe: one immutable value that says everything about a run.

Reference documentation of every field is generated from the `doc=` texts here.

Stability: stable, classes and fields; later versions add fields.
"""

from __future__ import annotations

from collections.abc import Mapping

import chz

from intarsia.config.bases import (
    CheckpointBackendConfig,
    Config,
    DataSourceConfig,
    EngineConfig,
    ExtensionConfig,
    LoaderConfig,
    LossConfig,
    MetricSinkConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    SharderConfig,
    StorageConfig,
    TokenizerConfig,
)
from intarsia.config.values import Choice


@chz.chz(typecheck=True)
class TrainConfig(Config):
    """The run loop."""

    steps: int = chz.field(default=100, doc="Optimizer steps of the whole run.")
    seed: int = chz.field(default=0, doc="Seed of initial weights, data order and every named random stream.")
    sequence_length: int = chz.field(default=512, doc="Tokens in a row.")
    micro_batch: int = chz.field(default=4, doc="Rows in one forward pass on one data-parallel rank.")
    global_batch: int = chz.field(
        default=8, doc="Rows in one optimizer step over all ranks. The last micro-batches may be smaller or empty on some ranks."
    )
    clip_norm: float | None = chz.field(default=1.0, doc="Gradients are scaled down to this global norm; none: measured only.")
    clip_norm_type: float = chz.field(default=2.0, doc="p of the norm; inf is the largest absolute value.")
    deterministic: bool = chz.field(default=False, doc="Ask torch for deterministic algorithms and fail where there is none.")
    device: str = chz.field(default="auto", doc="auto, cpu or cuda.")
    threads: int | None = chz.field(default=None, doc="CPU threads for each process; none: torch's own choice.")
    init_from: str | None = chz.field(
        default=None,
        doc="Where the weights of a new run come from: a run, a checkpoint, or a Hugging Face folder. None: they are drawn by the seed.",
    )
    log_every: int = chz.field(default=1, doc="Steps between step events.")


@chz.chz(typecheck=True)
class PrecisionConfig(Config):
    """Dtypes, as torch names them."""

    master: str = chz.field(default="float32", doc="Dtype of the parameters that the optimizer updates.")
    compute: str = chz.field(default="float32", doc="Dtype of parameters and activations in forward and backward.")
    reduce: str = chz.field(default="float32", doc="Dtype in which gradients are summed over ranks and micro-batches.")


@chz.chz(typecheck=True)
class MeshConfig(Config):
    """Degrees of parallelism. Their product (ep is folded out of dp_shard x cp x tp) must equal the number of processes."""

    pp: int = chz.field(default=1, doc="Pipeline stages.")
    dp_replicate: int = chz.field(default=1, doc="Whole replicas (of a sharded group).")
    dp_shard: int = chz.field(default=-1, doc="Ranks over which parameters are sharded; -1: all that are left.")
    cp: int = chz.field(default=1, doc="Context-parallel ranks.")
    tp: int = chz.field(default=1, doc="Tensor-parallel ranks.")
    ep: int = chz.field(default=1, doc="Expert-parallel ranks.")


@chz.chz(typecheck=True)
class CompileConfig(Config):
    """torch.compile."""

    mode: str = chz.field(default="none", doc="none; model: the whole model; local: the regions that the model declares.")
    backend: str = chz.field(default="inductor", doc="Backend of torch.compile.")
    dynamic: bool = chz.field(default=False, doc="Compile for any shape.")


@chz.chz(typecheck=True)
class RecomputeConfig(Config):
    """Activation checkpointing: what is thrown away in forward and recomputed in backward."""

    mode: str = chz.field(default="none", doc="none; blocks: every n-th declared block.")
    every: int = chz.field(default=1, doc="Recompute one block in this many.")


@chz.chz(typecheck=True)
class MixturePart(Config):
    """One source and its share."""

    source: DataSourceConfig = chz.field(doc="Where documents come from.")
    weight: float = chz.field(default=1.0, doc="Share of the tokens, relative to the other parts.")


@chz.chz(typecheck=True)
class DataConfig(Config):
    """From documents to batches."""

    loader: LoaderConfig = chz.field(doc="What makes batches of documents.")
    tokenizer: TokenizerConfig = chz.field(doc="The tokenizer.")
    mixture: tuple[MixturePart, ...] = chz.field(doc="Sources and their weights.")
    held_out: float = chz.field(
        default=0.05, doc="Share of each source's documents that only evaluation sees; chosen by a hash of their index."
    )
    evaluation: tuple[MixturePart, ...] = chz.field(default=(), doc="Sources of evaluation; empty: the held-out share.")
    packing: str = chz.field(
        default="concatenate", doc="concatenate: documents fill rows without gaps; one_per_row: one document, cut or padded."
    )
    shuffle: bool = chz.field(default=True, doc="Shuffle documents, and the rows that they fill, anew in each epoch, by seed.")
    epochs: int | None = chz.field(default=None, doc="Passes over the data after which it ends; none: as many as the steps take.")
    prefetch: int = chz.field(default=2, doc="Batches prepared in the background; 0: none.")
    cache: str = chz.field(default="", doc="Folder for tokenised data; empty: in the run directory.")


@chz.chz(typecheck=True)
class EvaluationConfig(Config):
    """Evaluation on held-out data."""

    every: int | None = chz.field(default=None, doc="Steps between evaluations; none: at the end only; 0: never.")
    at_start: bool = chz.field(default=False, doc="Evaluate before the first step as well.")
    batches: int = chz.field(default=8, doc="Global batches in one evaluation, always the same ones.")


@chz.chz(typecheck=True)
class CheckpointConfig(Config):
    """Checkpoints."""

    every: int | None = chz.field(default=None, doc="Steps between saves; none: at the end only; 0: never.")
    keep_last: int = chz.field(default=2, doc="How many of the newest durable checkpoints stay; 0: all.")
    keep_every: int | None = chz.field(default=None, doc="Checkpoints at multiples of this step stay for ever.")
    background: bool = chz.field(default=True, doc="Write while training goes on.")
    backend: CheckpointBackendConfig = chz.field(doc="Format of the data files.")
    storage: StorageConfig = chz.field(doc="Where the bytes go.")


@chz.chz(typecheck=True)
class ParameterGroup(Config):
    """Optimizer settings for the parameters that a glob matches. First match wins; what nothing matches is the group `default`."""

    name: str = chz.field(doc="The group's name, unique.")
    match: tuple[str, ...] = chz.field(doc="Globs on canonical parameter names.")
    options: Mapping[str, Choice] = chz.field(
        default_factory=dict, doc="Fields of the optimizer's config to override (lr, weight_decay ...)."
    )
    frozen: bool = chz.field(default=False, doc="These parameters do not train.")


@chz.chz(typecheck=True)
class ComponentOverride(Config):
    """Replace a part of the model config where type and name match."""

    match: str = chz.field(doc="Glob on the path below `model` (`layers.*.attention`).")
    type: str = chz.field(default="*", doc="Entry name of the component that must stand there now; * any.")
    replace: str = chz.field(doc="Entry name of the component to put there; fields of the same name keep their values.")
    values: Mapping[str, Choice] = chz.field(default_factory=dict, doc="Fields of the new component.")
    owner: str = chz.field(default="recipe", doc="Who claims it, for messages.")


@chz.chz(typecheck=True)
class ProfileConfig(Config):
    """Profiler traces."""

    steps: tuple[int, ...] = chz.field(default=(), doc="Steps (0-based) to trace into traces/ in Chrome format.")
    memory: bool = chz.field(default=False, doc="Record allocations as well.")


@chz.chz(typecheck=True)
class PluginsConfig(Config):
    """Which plugins a run uses."""

    require: tuple[str, ...] = chz.field(default=(), doc="Plugins that must be loaded though no entry of theirs is chosen.")
    disable: tuple[str, ...] = chz.field(default=(), doc="Plugins (distribution, or distribution/entry point) not to load.")
    allow: tuple[str, ...] = chz.field(default=(), doc="If not empty: only these distributions are imported at all.")


@chz.chz(typecheck=True)
class Recipe(Config):
    """A whole run."""

    name: str = chz.field(doc="What the run is called; part of its directory's name.")
    model: ModelConfig = chz.field(doc="The model family and its sizes.")
    data: DataConfig = chz.field(doc="Data.")
    optimizer: OptimizerConfig = chz.field(doc="The optimizer.")
    schedule: ScheduleConfig = chz.field(doc="The learning-rate schedule.")
    loss: LossConfig = chz.field(doc="The loss.")
    engine: EngineConfig = chz.field(doc="What runs forward and backward.")
    sharder: SharderConfig = chz.field(doc="What keeps parameters as shards when there are several processes or dtypes.")
    checkpoint: CheckpointConfig = chz.field(doc="Checkpoints.")
    train: TrainConfig = chz.field(default_factory=TrainConfig, doc="The run loop.")
    mesh: MeshConfig = chz.field(default_factory=MeshConfig, doc="Parallelism.")
    parallel: ParallelConfig | None = chz.field(
        default=None, doc="What cuts the model for pp, cp, tp and ep; none: `declared` where the mesh needs one."
    )
    precision: PrecisionConfig = chz.field(default_factory=PrecisionConfig, doc="Dtypes.")
    compile: CompileConfig = chz.field(default_factory=CompileConfig, doc="torch.compile.")
    recompute: RecomputeConfig = chz.field(default_factory=RecomputeConfig, doc="Activation checkpointing.")
    evaluation: EvaluationConfig = chz.field(default_factory=EvaluationConfig, doc="Evaluation.")
    profile: ProfileConfig = chz.field(default_factory=ProfileConfig, doc="Profiler traces.")
    parameter_groups: tuple[ParameterGroup, ...] = chz.field(default=(), doc="Optimizer settings by glob.")
    overrides: tuple[ComponentOverride, ...] = chz.field(default=(), doc="Replaced parts of the model config.")
    kernels: Mapping[str, str] = chz.field(
        default_factory=lambda: {"*": "auto"}, doc="Operator (or *) to kernel name, `reference` or `auto`."
    )
    sinks: tuple[MetricSinkConfig, ...] = chz.field(default=(), doc="Further receivers of the run's events.")
    plugins: PluginsConfig = chz.field(default_factory=PluginsConfig, doc="Plugins.")
    extensions: Mapping[str, ExtensionConfig] = chz.field(default_factory=dict, doc="Third parties' own sections, by entry name.")
