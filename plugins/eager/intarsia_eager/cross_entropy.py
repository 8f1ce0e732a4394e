"""The next-token cross-entropy as a sum over the tokens that count."""

from __future__ import annotations

from intarsia import ops
from intarsia.contracts import IGNORE, Batch, LossSum, Model
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_eager.config import CrossEntropyConfig


class CrossEntropy:
    """sum over counted tokens t of -log softmax(W h_t)[label_t], in float32, in nats."""

    def __init__(self, config: CrossEntropyConfig):
        if config.chunk < 1:
            raise UsageError(f"loss.chunk is {config.chunk}; it must be at least 1 token.")
        self._chunk = config.chunk

    def __call__(self, model: Model, hidden_BSD: Tensor, batch: Batch) -> LossSum:
        """The sum for one micro-batch; 0, with a gradient of 0, where no token counts."""
        hidden_ND, labels_N = hidden_BSD.flatten(0, 1), batch.labels_BS.flatten()
        return LossSum(ops.cross_entropy(hidden_ND, model.head_weight_VD, labels_N, chunk=self._chunk))

    def count(self, batch: Batch) -> int:
        """Tokens whose label is not IGNORE."""
        return int((batch.labels_BS != IGNORE).sum())


def build(config: CrossEntropyConfig) -> CrossEntropy:
    """The entry's target."""
    return CrossEntropy(config)
