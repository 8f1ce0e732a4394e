"""Settings of the engine and of the schedules. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import Config, EngineConfig


@chz.chz(typecheck=True)
class PipelineScheduleConfig(Config):
    """Settings of a pipeline schedule; which entry of kind "pipeline schedule" it is follows from its class."""


@chz.chz(typecheck=True)
class GPipeConfig(PipelineScheduleConfig):
    """All forwards, then all backwards."""


@chz.chz(typecheck=True)
class OneFOneBConfig(PipelineScheduleConfig):
    """One forward, one backward."""


@chz.chz(typecheck=True)
class InterleavedConfig(PipelineScheduleConfig):
    """1F1B over several stages on each rank."""

    virtual_stages: int = chz.field(default=2, doc="Stages on each rank.")


@chz.chz(typecheck=True)
class ZBH1Config(PipelineScheduleConfig):
    """ZB-H1: 1F1B with weight gradients in its bubbles."""


@chz.chz(typecheck=True)
class ZBVConfig(PipelineScheduleConfig):
    """ZB-V: two stages on each rank, down and up again, without bubbles where F = I = W."""


@chz.chz(typecheck=True)
class DualPipeVConfig(PipelineScheduleConfig):
    """DualPipeV: two stages on each rank, down and up again, forwards and backwards in overlapping pairs."""


@chz.chz(typecheck=True)
class PipelineConfig(EngineConfig):
    """Runs the model in stages, by a schedule."""

    schedule: PipelineScheduleConfig = chz.field(default_factory=OneFOneBConfig, doc="In which order each rank computes.")
    few_micro_batches: bool = chz.field(
        default=False, doc="Run with fewer micro-batches than the schedule needs to keep every rank busy, instead of refusing."
    )
    split_backward: bool = chz.field(
        default=True, doc="Where the schedule splits backward into I and W: do so. False: I does all of it, W nothing."
    )
    unshard: str = chz.field(
        default="step",
        doc="When a stage's whole parameters are brought and given back: step (once in a step), or action (around its actions).",
    )
    unshard_ahead: int = chz.field(default=1, doc="How many actions before its use an unshard starts.")
    reduce: str = chz.field(
        default="last",
        doc="When a stage's gradients are summed over the ranks that share it: last (after its last backward), or each (after every one).",
    )
    max_live: int | None = chz.field(
        default=None,
        doc="Refuse a schedule that keeps activations of more micro-batches than this on any rank, counted for one stage each.",
    )
    capture: bool = chz.field(default=False, doc="CUDA: record the computation of each stage as graphs. Shapes must not change.")
