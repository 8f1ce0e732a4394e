"""Settings of core's own schedules, loss, engine and sharder. Torch-free."""

from __future__ import annotations

import chz

from intarsia.config.bases import EngineConfig, LossConfig, ScheduleConfig, SharderConfig


@chz.chz(typecheck=True)
class ConstantConfig(ScheduleConfig):
    """The learning rate stays where warm-up left it."""


@chz.chz(typecheck=True)
class LinearConfig(ScheduleConfig):
    """A straight line from the full learning rate down to `floor` times it at the last step."""

    floor: float = chz.field(default=0.0, doc="Factor that the last step comes down to.")


@chz.chz(typecheck=True)
class CosineConfig(ScheduleConfig):
    """Half a cosine from the full learning rate down to `floor` times it at the last step."""

    floor: float = chz.field(default=0.0, doc="Factor that the last step comes down to.")


@chz.chz(typecheck=True)
class SqrtConfig(ScheduleConfig):
    """The inverse square root of the step: factor 1 at the end of warm-up, 1/2 at four times as many steps."""

    timescale: int | None = chz.field(
        default=None, doc="Steps after which the factor is 1/sqrt(2) of that after warm-up; none: the warm-up."
    )


@chz.chz(typecheck=True)
class WSDConfig(ScheduleConfig):
    """Warm-up, stable, decay: constant after warm-up, then down to `floor` over the last steps."""

    decay: float = chz.field(default=0.2, doc="How long the decay is: below 1 a share of all steps, from 1 on a number of steps.")
    floor: float = chz.field(default=0.0, doc="Factor that the last step comes down to.")
    shape: str = chz.field(
        default="linear", doc="Shape of the decay: linear, cosine or sqrt (1 - sqrt of the share of the decay that is over)."
    )


@chz.chz(typecheck=True)
class CrossEntropyConfig(LossConfig):
    """Next-token cross-entropy, summed over the tokens that count."""

    chunk: int = chz.field(default=1024, doc="Tokens whose logits exist at one time; in backward they are computed again.")


@chz.chz(typecheck=True)
class EagerConfig(EngineConfig):
    """Runs forward and backward as the model is written."""


@chz.chz(typecheck=True)
class WholeConfig(SharderConfig):
    """No shards: one process holds every parameter whole, in one dtype."""
