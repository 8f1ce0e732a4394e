"""Base classes of config nodes: what a plugin's config classes derive from. Immutable, typed, torch-free (dtypes are strings).

Stability: stable.
"""

from __future__ import annotations

import chz


@chz.chz(typecheck=True)
class Config:
    """Any node of a recipe. Fields are plain values (bool, int, float, str, None), tuples of them, nodes, tuples of nodes, or mappings from str.

    `metadata={"computes": False}` on a field of a model's configs: a model computes the same from the same weights whatever it is (how parameters start, say).
    """


@chz.chz(typecheck=True)
class ComponentConfig(Config):
    """A replaceable part of a model config; which entry of kind "component" it is follows from its class."""


@chz.chz(typecheck=True)
class ModelConfig(Config):
    """A model family's settings. Every family has these fields by these names."""

    vocab_size: int = chz.field(doc="Token ids that the model knows; the tokenizer has at most as many.")
    dim: int = chz.field(doc="Width of the residual stream.")
    max_positions: int = chz.field(doc="Longest sequence.", metadata={"computes": False})


@chz.chz(typecheck=True)
class PlacementConfig(Config):
    """Settings of a placement."""


@chz.chz(typecheck=True)
class StorageConfig(Config):
    """Settings of a storage."""


@chz.chz(typecheck=True)
class CheckpointBackendConfig(Config):
    """Settings of a checkpoint backend."""


@chz.chz(typecheck=True)
class EnvironmentConfig(Config):
    """Settings of an environment."""


@chz.chz(typecheck=True)
class OptimizerConfig(Config):
    """Settings of an optimizer; every one has a learning rate `lr` and a decoupled `weight_decay`."""

    lr: float = chz.field(doc="Learning rate before the schedule's factor.")
    weight_decay: float = chz.field(default=0.0, doc="Decoupled weight decay.")


@chz.chz(typecheck=True)
class LossConfig(Config):
    """Settings of a loss."""


@chz.chz(typecheck=True)
class DataSourceConfig(Config):
    """Settings of a data source."""


@chz.chz(typecheck=True)
class TokenizerConfig(Config):
    """Settings of a tokenizer."""


@chz.chz(typecheck=True)
class LoaderConfig(Config):
    """Settings of a loader."""


@chz.chz(typecheck=True)
class ScheduleConfig(Config):
    """Settings of a learning-rate schedule; `warmup_steps` rise linearly from 0 (the first step is not 0)."""

    warmup_steps: int = chz.field(default=0, doc="Steps that rise linearly from 0; the first is not 0.")


@chz.chz(typecheck=True)
class EngineConfig(Config):
    """Settings of an engine."""


@chz.chz(typecheck=True)
class SharderConfig(Config):
    """Settings of a sharder."""


@chz.chz(typecheck=True)
class TransportConfig(Config):
    """Settings of a transport."""


@chz.chz(typecheck=True)
class ParallelConfig(Config):
    """Settings of a paralleliser."""


@chz.chz(typecheck=True)
class RoleConfig(Config):
    """Settings of a parallel role."""


@chz.chz(typecheck=True)
class MetricSinkConfig(Config):
    """Settings of a metric sink."""


@chz.chz(typecheck=True)
class ExtensionConfig(Config):
    """A third party's own section of the recipe."""
