"""Settings of the optimizers and the learning-rate schedules. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import OptimizerConfig, ScheduleConfig


@chz.chz(typecheck=True)
class AdamWConfig(OptimizerConfig):
    """AdamW: Adam with decoupled weight decay."""

    lr: float = chz.field(default=3e-4, doc="Learning rate before the schedule's factor.")
    weight_decay: float = chz.field(default=0.1, doc="Decoupled weight decay: a parameter shrinks by lr x weight_decay in each step.")
    betas: tuple[float, float] = chz.field(default=(0.9, 0.95), doc="Decay of the running means of the gradient and of its square.")
    eps: float = chz.field(default=1e-8, doc="Added to the root of the second mean.")
    decay_vectors: bool = chz.field(default=False, doc="Decay parameters with fewer than two dimensions (norm weights, biases) as well.")
    implementation: str = chz.field(default="auto", doc="fused, foreach, or auto: fused where torch has it for the device.")


@chz.chz(typecheck=True)
class MuonConfig(OptimizerConfig):
    """Muon for matrices (momentum, then the nearest orthogonal matrix by Newton-Schulz), AdamW for everything else."""

    lr: float = chz.field(default=0.02, doc="Learning rate of the matrices before the schedule's factor.")
    weight_decay: float = chz.field(default=0.1, doc="Decoupled weight decay of the matrices.")
    momentum: float = chz.field(default=0.95, doc="Decay of the running mean of the gradient.")
    nesterov: bool = chz.field(default=True, doc="Nesterov momentum.")
    newton_schulz_steps: int = chz.field(default=5, doc="Newton-Schulz iterations.")
    newton_schulz_dtype: str = chz.field(
        default="bfloat16", doc="Dtype of the iteration; float32 is faster on CPUs without bfloat16 arithmetic."
    )
    eps: float = chz.field(default=1e-7, doc="Least norm by which the matrix is divided first.")
    adjust: str = chz.field(
        default="original",
        doc="How lr is scaled for a matrix's shape: original (sqrt(max(1, rows/columns))) or match_rms_adamw (0.2 sqrt(max(rows, columns)): AdamW's lr can be reused).",
    )
    not_matrices: tuple[str, ...] = chz.field(
        default=("*embed*", "*head*", "output.*"),
        doc="Globs on a parameter's dotted name, or on any part of it: these are updated by AdamW although they have two dimensions.",
    )
    adamw_lr: float = chz.field(default=3e-3, doc="Learning rate of the rest.")
    adamw_weight_decay: float = chz.field(default=0.0, doc="Decoupled weight decay of the rest.")
    adamw_betas: tuple[float, float] = chz.field(default=(0.9, 0.95), doc="AdamW's betas.")
    adamw_eps: float = chz.field(default=1e-8, doc="AdamW's eps.")


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
