"""Recipes: typed values, how they are resolved, and who set what."""

from intarsia.config.bases import (
    CheckpointBackendConfig,
    ComponentConfig,
    Config,
    DataSourceConfig,
    EngineConfig,
    EnvironmentConfig,
    ExtensionConfig,
    LoaderConfig,
    LossConfig,
    MetricSinkConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PlacementConfig,
    RoleConfig,
    ScheduleConfig,
    SharderConfig,
    StorageConfig,
    TokenizerConfig,
    TransportConfig,
)
from intarsia.config.recipe import (
    CheckpointConfig,
    CompileConfig,
    ComponentOverride,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    MixturePart,
    ParameterGroup,
    PluginsConfig,
    PrecisionConfig,
    ProfileConfig,
    Recipe,
    RecomputeConfig,
    TrainConfig,
)
from intarsia.config.resolve import Resolution, Resolved, load_saved, resolve
from intarsia.config.tree import flatten, rebuild
from intarsia.config.values import Choice
