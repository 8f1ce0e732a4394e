"""RLOO (arXiv 2402.14740). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia_rl.algorithms.config import RLOOConfig
from intarsia_rl.algorithms.gradient import PolicyGradient, centred
from intarsia_rl.contracts import Sample


class RLOO(PolicyGradient):
    """See `RLOOConfig`."""

    config: RLOOConfig

    def advantages(self, samples: Sequence[Sample]) -> list[float]:
        """reward - mean of the others' = (reward - mean) n / (n - 1); 0 in a group of one."""
        differences, _ = centred(samples, [sample.reward for sample in samples])
        scale = len(samples) / max(1, len(samples) - 1)
        return [difference * scale for difference in differences]

    def token_weight(self, sample: Sample) -> float:
        """1: a sample's log-probability is the sum of its tokens'."""
        return 1.0 if self.is_trained(sample) else 0.0
