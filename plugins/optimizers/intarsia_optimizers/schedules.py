"""Learning-rate schedules as pure functions of the step.

Every schedule rises linearly over `warmup_steps` (factor (step + 1) / warmup_steps, so that the first step is not 0) and then follows its own
shape over the remaining steps. Decaying shapes come down to `floor` where the step after the last would be: no step is wasted on a factor of 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from intarsia.errors import UsageError, did_you_mean

from intarsia_optimizers.config import ConstantConfig, CosineConfig, LinearConfig, SqrtConfig, WSDConfig


@dataclasses.dataclass(frozen=True)
class WarmedUp:
    """Warm-up, then `shape(position, length)`: the factor at `position` (0-based) of the `length` steps after warm-up."""

    warmup_steps: int
    shape: Callable[[int, int], float]

    def factor(self, step: int, steps: int) -> float:
        """See `intarsia.contracts.Schedule`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.shape(step - self.warmup_steps, max(1, steps - self.warmup_steps))


def linear(progress: float) -> float:
    """1 at progress 0, 0 at progress 1."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def inverse_root(progress: float) -> float:
    """1 - sqrt(progress): steep at first."""
    return 1.0 - math.sqrt(progress)


DECAYS: dict[str, Callable[[float], float]] = {"linear": linear, "cosine": cosine, "sqrt": inverse_root}


def decaying(warmup_steps: int, floor: float, decay: Callable[[float], float], start: Callable[[int], int] = lambda length: 0) -> WarmedUp:
    """Factor 1 until `start(length)` steps after warm-up, then `decay` down to `floor`."""
    if not 0.0 <= floor <= 1.0:
        raise UsageError(f"schedule.floor is {floor}; it is a factor of the learning rate and must lie between 0 and 1.")

    def shape(position: int, length: int) -> float:
        first = start(length)
        progress = min(1.0, max(0.0, (position - first) / max(1, length - first)))
        return floor + (1.0 - floor) * decay(progress)

    return WarmedUp(checked(warmup_steps), shape)


def checked(warmup_steps: int) -> int:
    """`warmup_steps`, which is not negative."""
    if warmup_steps < 0:
        raise UsageError(f"schedule.warmup_steps is {warmup_steps}; it must be 0 or more.")
    return warmup_steps


def build_constant(config: ConstantConfig) -> WarmedUp:
    """The entry `constant`."""
    return WarmedUp(checked(config.warmup_steps), lambda position, length: 1.0)


def build_linear(config: LinearConfig) -> WarmedUp:
    """The entry `linear`."""
    return decaying(config.warmup_steps, config.floor, linear)


def build_cosine(config: CosineConfig) -> WarmedUp:
    """The entry `cosine`."""
    return decaying(config.warmup_steps, config.floor, cosine)


def build_sqrt(config: SqrtConfig) -> WarmedUp:
    """The entry `sqrt`: sqrt(timescale / (timescale + position))."""
    timescale = config.warmup_steps if config.timescale is None else config.timescale
    if timescale < 1:
        raise UsageError(f"schedule.timescale is {timescale}; the schedule `sqrt` needs at least 1 (or warm-up steps to take it from).")
    return WarmedUp(checked(config.warmup_steps), lambda position, length: math.sqrt(timescale / (timescale + position)))


def build_wsd(config: WSDConfig) -> WarmedUp:
    """The entry `wsd`. A decay longer than what follows warm-up begins right after it."""
    if config.shape not in DECAYS:
        raise UsageError(f"schedule.shape {config.shape!r} is unknown. {did_you_mean(config.shape, DECAYS)}")
    if config.decay < 0:
        raise UsageError(f"schedule.decay is {config.decay}; it must be 0 or more.")

    def start(length: int) -> int:
        steps = config.decay if config.decay >= 1 else config.decay * (length + config.warmup_steps)
        return max(0, length - round(steps))

    return decaying(config.warmup_steps, config.floor, DECAYS[config.shape], start)
