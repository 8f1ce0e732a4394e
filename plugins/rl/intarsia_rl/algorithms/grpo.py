"""GRPO (arXiv 2402.03300), Dr. GRPO (arXiv 2503.20783) and DAPO (arXiv 2503.14476). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia_rl.algorithms.config import DAPOConfig, DrGRPOConfig, GRPOConfig
from intarsia_rl.algorithms.gradient import PolicyGradient, centred
from intarsia_rl.contracts import Sample


class GRPO(PolicyGradient):
    """See `GRPOConfig`."""

    config: GRPOConfig

    def advantages(self, samples: Sequence[Sample]) -> list[float]:
        """(reward - mean) / (deviation + epsilon)."""
        return self._scaled(samples, [sample.reward for sample in samples])

    def token_weight(self, sample: Sample) -> float:
        """1 / the sample's number of trained tokens."""
        return 1.0 / sample.trained_tokens if self.is_trained(sample) else 0.0

    def _scaled(self, samples: Sequence[Sample], rewards: Sequence[float]) -> list[float]:
        differences, deviation = centred(samples, rewards)
        # A deviation of 0 has differences of 0.
        return [difference / (deviation + self.config.epsilon) if difference else 0.0 for difference in differences]


class DrGRPO(PolicyGradient):
    """See `DrGRPOConfig`."""

    config: DrGRPOConfig

    def advantages(self, samples: Sequence[Sample]) -> list[float]:
        """reward - mean."""
        return centred(samples, [sample.reward for sample in samples])[0]

    def token_weight(self, sample: Sample) -> float:
        """1 / a constant, the same for all samples."""
        return 1.0 / self.config.length if self.is_trained(sample) else 0.0


class DAPO(GRPO):
    """See `DAPOConfig`."""

    config: DAPOConfig

    def advantages(self, samples: Sequence[Sample]) -> list[float]:
        """GRPO's, of rewards less the penalty of length."""
        return self._scaled(samples, [sample.reward - self.penalty(sample) for sample in samples])

    def penalty(self, sample: Sample) -> float:
        """From 0, up to `longest - length_buffer` tokens, to 1, from `longest` tokens on."""
        longest, buffer = self.config.longest, self.config.length_buffer
        if longest is None or sample.trained_tokens <= longest - buffer:
            return 0.0
        return 1.0 if sample.trained_tokens >= longest or not buffer else (sample.trained_tokens - longest + buffer) / buffer

    def token_weight(self, sample: Sample) -> float:
        """1: every token of the step has the same."""
        return 1.0 if self.is_trained(sample) else 0.0

    def count(self, sample: Sample) -> int:
        """Its trained tokens."""
        return sample.trained_tokens if self.is_trained(sample) else 0
