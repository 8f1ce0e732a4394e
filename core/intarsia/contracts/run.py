"""What hooks see of a run. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import random

    from intarsia.config import Recipe

# The stages in which a run is built, in this order.
BuildStage = Literal["mesh", "data", "model", "parameters", "optimizer", "engine", "checkpoint"]


@dataclasses.dataclass
class Run:
    """A run, as every hook is handed it. Stability: provisional.

    `step` counts finished optimizer steps. `parts` holds what has been built so far, by stage ("model" -> nn.Module ...), and `table`, the ParameterTable, `loss`, and `evaluation`, the held-out
    loader where the run evaluates: read it, don't replace it.
    `record(event, **fields)` writes an event of a name of your own into events.jsonl and to the sinks, on rank 0, and does nothing on others.
    """

    recipe: Recipe
    directory: Path
    rank: int = 0
    world: int = 1
    step: int = 0
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop_reason: str | None = None
    record: Callable[..., object] = lambda event, **fields: None

    def request_stop(self, reason: str) -> None:
        """Ask for an orderly end with a checkpoint, on any rank. Ranks agree on it within a step: it is this one when asked before the update; from
        `after_step` on it is the next where there are several ranks, and where no step is left the run is simply done. The reason is recorded."""
        self.stop_reason = self.stop_reason or reason

    def rng(self, stream: str, owner: str) -> random.Random:
        """A private random stream, equal on every rank, a function of the run's seed, `owner` and `stream` alone."""
        import hashlib
        import random

        text = f"{self.recipe.train.seed}/{owner}/{stream}".encode()
        return random.Random(int.from_bytes(hashlib.sha256(text).digest()[:8], "little"))


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """What one optimizer step gave; global numbers. Stability: provisional.

    `loss` is nats for each counted token; `gradient_norm` before clipping; `tokens` trained in this step over all ranks; `seconds_s` wall time of the step.
    `media_flops` are the FLOPs that the model spent on images and videos besides those of its tokens.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    counted_tokens: int
    seconds_s: float
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    media_flops: float = 0.0
