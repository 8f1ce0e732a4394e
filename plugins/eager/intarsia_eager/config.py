"""Settings of the loss, the engine and the sharder. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import EngineConfig, LossConfig, SharderConfig


@chz.chz(typecheck=True)
class CrossEntropyConfig(LossConfig):
    """Next-token cross-entropy, summed over the tokens that count."""

    chunk: int = chz.field(default=1024, doc="Tokens whose logits exist at one time; in backward they are computed again.")
    ahead_weight: float = chz.field(
        default=0.3, doc="Weight of the mean of the further depths' losses in training, for models that predict further ahead."
    )


@chz.chz(typecheck=True)
class EagerConfig(EngineConfig):
    """Runs forward and backward as the model is written."""


@chz.chz(typecheck=True)
class WholeConfig(SharderConfig):
    """No shards: one process holds every parameter whole, in one dtype."""
