"""The next-token cross-entropy as a sum over the tokens that count."""

from __future__ import annotations

import math

import torch
from intarsia import ops
from intarsia.contracts import IGNORE, Batch, LossSum, Model
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_eager.config import CrossEntropyConfig
from intarsia_eager.following import FOLLOWING_LABELS


class CrossEntropy:
    """sum over counted tokens t of -log softmax(W h_t)[label_t], in float32, in nats.

    Of a model that predicts K depths further ahead, ahead_weight / K times the sum of the depths' losses comes on top in training; they are the sums `ahead_1` to
    `ahead_K`.
    """

    def __init__(self, config: CrossEntropyConfig):
        if config.chunk < 1:
            raise UsageError(f"loss.chunk is {config.chunk}; it must be at least 1 token.")
        if not 0 <= config.ahead_weight < math.inf:
            raise UsageError(f"loss.ahead_weight is {config.ahead_weight}; it must be finite and at least 0.")
        self._chunk, self._ahead_weight = config.chunk, config.ahead_weight

    def __call__(self, model: Model, hidden_BSD: Tensor | tuple[Tensor, ...], batch: Batch) -> LossSum:
        """The sum for one micro-batch; 0, with a gradient of 0, where no token counts."""
        if isinstance(hidden_BSD, Tensor):
            return LossSum(self._one(model, hidden_BSD, batch.labels_BS))
        next_BSD, *ahead = hidden_BSD
        labels_BSK = batch.extra[FOLLOWING_LABELS]
        total = self._one(model, next_BSD, batch.labels_BS)
        further = [self._one(model, each_BSD, labels_BSK[..., depth]) for depth, each_BSD in enumerate(ahead)]
        if further and getattr(model, "training", True):
            total = total + self._ahead_weight / len(further) * torch.stack(further).sum()
        return LossSum(total, {f"ahead_{depth + 1}": value.detach() for depth, value in enumerate(further)})

    def _one(self, model: Model, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        function = getattr(model, "cross_entropy", ops.cross_entropy)
        return function(hidden_BSD.flatten(0, 1), model.head_weight_VD, labels_BS.flatten(), chunk=self._chunk)

    def count(self, batch: Batch) -> int:
        """Tokens whose label is not IGNORE."""
        return int((batch.labels_BS != IGNORE).sum())


def build(config: CrossEntropyConfig) -> CrossEntropy:
    """The entry's target."""
    return CrossEntropy(config)
