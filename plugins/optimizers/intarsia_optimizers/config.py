"""Settings of the optimizers and the learning-rate schedules. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import Config, OptimizerConfig, ScheduleConfig


@chz.chz(typecheck=True)
class StatefulConfig(OptimizerConfig):
    """What every optimizer here is asked about its state."""

    state_dtype: str = chz.field(
        default="master",
        doc="Dtype of the optimizer's state: master (that of the masters), or bfloat16, rounded to nearest after each update.",
    )


@chz.chz(typecheck=True)
class ElementwiseConfig(StatefulConfig):
    """An optimizer that updates each element by itself."""

    decay_vectors: bool = chz.field(default=False, doc="Decay parameters with fewer than two dimensions (norm weights, biases) as well.")


@chz.chz(typecheck=True)
class MomentsConfig(ElementwiseConfig):
    """An optimizer that follows the gradient's first two moments."""

    betas: tuple[float, float] = chz.field(default=(0.9, 0.95), doc="Decay of the running means of the gradient and of its square.")
    eps: float = chz.field(default=1e-8, doc="Added to the root of the second mean.")
    implementation: str = chz.field(
        default="auto",
        doc="fused, foreach, the name of an installed optimizer kernel, or auto: fused where torch has it for device and dtypes, a kernel for split masters and narrow state where one fits.",
    )


@chz.chz(typecheck=True)
class AdamWConfig(MomentsConfig):
    """AdamW: Adam with decoupled weight decay."""

    lr: float = chz.field(default=3e-4, doc="Learning rate before the schedule's factor.")
    weight_decay: float = chz.field(default=0.1, doc="Decoupled weight decay: a parameter shrinks by lr x weight_decay in each step.")


@chz.chz(typecheck=True)
class AdamConfig(MomentsConfig):
    """Adam, with its original defaults; decay by the penalty's gradient (`l2`) or decoupled."""

    lr: float = chz.field(default=1e-3, doc="Learning rate before the schedule's factor.")
    weight_decay: float = chz.field(default=0.0, doc="Decoupled weight decay.")
    l2: float = chz.field(default=0.0, doc="Weight decay that is not decoupled: l2 times the parameter is added to its gradient.")
    betas: tuple[float, float] = chz.field(default=(0.9, 0.999), doc="Decay of the running means of the gradient and of its square.")


@chz.chz(typecheck=True)
class LionConfig(ElementwiseConfig):
    """Lion: the sign of an interpolation of momentum and gradient. Its learning rate is three to ten times smaller than AdamW's, its decay larger by as much."""

    lr: float = chz.field(default=1e-4, doc="Learning rate before the schedule's factor.")
    weight_decay: float = chz.field(default=0.3, doc="Decoupled weight decay.")
    betas: tuple[float, float] = chz.field(
        default=(0.9, 0.99), doc="Share of the momentum in the update, and decay of the momentum afterwards."
    )


@chz.chz(typecheck=True)
class SGDConfig(ElementwiseConfig):
    """Stochastic gradient descent."""

    lr: float = chz.field(default=0.1, doc="Learning rate before the schedule's factor.")
    weight_decay: float = chz.field(default=0.0, doc="Decoupled weight decay.")
    l2: float = chz.field(default=0.0, doc="Weight decay that is not decoupled: l2 times the parameter is added to its gradient.")
    momentum: float = chz.field(default=0.9, doc="Share of the momentum that stays; 0: none is kept.")
    nesterov: bool = chz.field(default=False, doc="Nesterov momentum.")
    implementation: str = chz.field(default="auto", doc="fused, foreach, or auto: fused where torch has it for device and dtypes.")


@chz.chz(typecheck=True)
class SplitConfig(Config):
    """A parameter that is several matrices side by side, each of which Muon makes orthogonal by itself: fused projections, heads. Set exactly one of blocks, head_dim and sizes."""

    match: tuple[str, ...] = chz.field(doc="Globs on canonical parameter names.")
    blocks: int = chz.field(default=0, doc="Into so many equal blocks (3 for a fused query, key and value of equal sizes).")
    head_dim: int = chz.field(default=0, doc="Into blocks of so many rows: one for each head.")
    sizes: tuple[int, ...] = chz.field(
        default=(), doc="Into blocks of these many rows, in order (query, key and value of grouped queries)."
    )
    columns: bool = chz.field(default=False, doc="Cut columns instead of rows (the output projection of heads).")


@chz.chz(typecheck=True)
class MuonConfig(StatefulConfig):
    """Muon for matrices (momentum, then the nearest orthogonal matrix by Newton-Schulz), AdamW for everything else."""

    lr: float = chz.field(default=0.02, doc="Learning rate of the matrices before the schedule's factor.")
    weight_decay: float = chz.field(default=0.1, doc="Decoupled weight decay of the matrices.")
    momentum: float = chz.field(default=0.95, doc="Decay of the running mean of the gradient.")
    nesterov: bool = chz.field(default=True, doc="Nesterov momentum.")
    newton_schulz_steps: int = chz.field(default=5, doc="Newton-Schulz iterations.")
    newton_schulz_dtype: str = chz.field(
        default="bfloat16", doc="Dtype of the iteration; float32 is faster on CPUs without bfloat16 arithmetic."
    )
    newton_schulz_kernel: str = chz.field(
        default="auto",
        doc="What carries the iteration out: reference, the name of an installed optimizer kernel, or auto: the best that fits.",
    )
    coefficients: tuple[float, float, float] = chz.field(
        default=(3.4445, -4.7750, 2.0315),
        doc="Of the quintic a x + b x^3 + c x^5; the default's slope at zero is as large as possible, and singular values end between about 0.5 and 1.5.",
    )
    eps: float = chz.field(default=1e-7, doc="Least norm by which the matrix is divided first.")
    adjust: str = chz.field(
        default="original",
        doc="How lr is scaled for a matrix's shape: original (sqrt(max(1, rows/columns))), match_rms_adamw (0.2 sqrt(max(rows, columns)): AdamW's lr can be reused), spectral (sqrt(rows/columns)) or none.",
    )
    split: tuple[SplitConfig, ...] = chz.field(default=(), doc="Parameters that are several matrices; the first that matches wins.")
    batch_elements: int = chz.field(
        default=2**27,
        doc="Matrices of one shape are worked on together, at most so many elements at a time: it bounds the step's own memory.",
    )
    not_matrices: tuple[str, ...] = chz.field(
        default=("*embed*", "*head*", "output.*"),
        doc="Globs on a parameter's dotted name, or on any part of it: these are updated by AdamW although they have two dimensions.",
    )
    adamw_lr: float = chz.field(default=3e-3, doc="Learning rate of the rest.")
    adamw_weight_decay: float = chz.field(default=0.0, doc="Decoupled weight decay of the rest.")
    adamw_betas: tuple[float, float] = chz.field(default=(0.9, 0.95), doc="AdamW's betas.")
    adamw_eps: float = chz.field(default=1e-8, doc="AdamW's eps.")
    adamw_implementation: str = chz.field(default="auto", doc="What carries AdamW out, as for the optimizer `adamw`.")


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
