"""What policy-gradient algorithms have in common. Torch-free at import. N trained tokens.

With l the trainer's log-probability of a token, l' the one that it was generated with, r = exp(l - l') and a the sample's advantage, a token's objective is

    min(r a, clip(r, 1 - clip_low, 1 + clip_high) a)          clipped, or r a where no bound is set
    w exp(l - l) a,  w = min(r, importance_cap)               truncated importance sampling: w and the second l have no gradient

The loss is the weighted sum of -objective + kl_coefficient times the divergence from the reference - entropy_coefficient times the entropy of the trainer's distribution at the token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intarsia.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from intarsia_rl.algorithms.config import PolicyGradientConfig
    from intarsia_rl.contracts import Sample

LARGEST = 1e100
"""Of a reward: sums of a group's are far from overflow."""


class PolicyGradient:
    """An `intarsia_rl.contracts.Algorithm` but for `advantages` and `token_weight`. Stability: provisional."""

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config
        self.needs_reference = config.kl_coefficient > 0

    def keeps(self, samples: Sequence[Sample], advantages: Sequence[float]) -> bool:
        """Whether there is a token to train on; with `skip_constant` also whether any advantage is not 0."""
        if not any(self.count(sample) for sample in samples):
            return False
        return not self.config.skip_constant or any(advantage != 0 for advantage in advantages)

    def is_trained(self, sample: Sample) -> bool:
        """Whether a sample's tokens are trained on."""
        return sample.trained_tokens > 0 and not (self.config.skip_truncated and sample.truncated)

    def count(self, sample: Sample) -> int:
        """A sample is one, where anything of it is trained on."""
        return int(self.is_trained(sample))

    def loss(self, log_probs_N: Any, extra: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """See `Algorithm`. Sums over tokens: `kl` (of the generating policy from the trainer's, k3), `ratio_mean`, `clip_share`; `importance_share` of tokens out of
        bounds, `reference_kl`. `extra` may have `over_sequence`, for importance weights of sequences: a function of [N] to each token's sum over its sequence."""
        return _loss(self.config, log_probs_N, extra)


def centred(samples: Sequence[Sample], rewards: Sequence[float]) -> tuple[list[float], float]:
    """(each reward minus their mean, their deviation): exactly 0 for a group of one or of equal rewards. UsageError for a reward that is no number."""
    for sample, reward in zip(samples, rewards, strict=True):
        if not abs(reward) <= LARGEST:
            raise UsageError(
                f"Sample {sample.id} of task {sample.task} has the reward {reward}. Rewards are numbers of at most {LARGEST:g}."
            )
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards), 0.0
    # In units of the largest, so that squares neither vanish nor overflow.
    unit = max(abs(reward) for reward in rewards)
    scaled = [reward / unit for reward in rewards]
    mean = math.fsum(scaled) / len(scaled)
    differences = [reward - mean for reward in scaled]
    deviation = math.sqrt(math.fsum(difference * difference for difference in differences) / len(differences))
    return [difference * unit for difference in differences], deviation * unit


def _loss(config: PolicyGradientConfig, log_probs_N: Tensor, extra: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    import torch

    advantages_N, weights_N = (extra[name].to(log_probs_N.dtype) for name in ("advantages", "weights"))
    log_ratio_N = log_probs_N - extra["old_log_probs"].to(log_probs_N.dtype)
    fixed_N = log_ratio_N.detach()
    sums = {"kl": (fixed_N.exp() - 1 - fixed_N).sum(), "ratio_mean": fixed_N.exp().sum()}
    if config.importance_cap is not None or config.importance_floor is not None:
        importance_N = _importance(config, fixed_N, extra)
        low = -math.inf if config.importance_floor is None else config.importance_floor
        high = math.inf if config.importance_cap is None else config.importance_cap
        inside_N = (importance_N >= low) & (importance_N <= high)
        sums["importance_share"] = (~inside_N).to(fixed_N.dtype).sum()
        if config.importance_outside == "mask":
            # What is left out has a ratio of 1: an infinite one times 0 would be no number.
            log_ratio_N = torch.where(inside_N, log_ratio_N, 0.0)
            advantages_N = torch.where(inside_N, advantages_N, 0.0)
        else:
            objective_N = importance_N.clamp(max=high) * (log_probs_N - log_probs_N.detach()).exp() * advantages_N
    if config.importance_cap is None or config.importance_outside == "mask":
        objective_N, clipped_N = _clipped(config, log_ratio_N.exp(), advantages_N)
        sums["clip_share"] = clipped_N.to(fixed_N.dtype).sum()
    terms_N = -objective_N
    if config.kl_coefficient > 0:
        divergence_N = _divergence(config.kl_estimator, log_probs_N - extra["reference_log_probs"].to(log_probs_N.dtype))
        terms_N = terms_N + config.kl_coefficient * divergence_N
        sums["reference_kl"] = divergence_N.detach().sum()
    if config.entropy_coefficient > 0:
        terms_N = terms_N - config.entropy_coefficient * extra["entropy"].to(log_probs_N.dtype)
    return (weights_N * terms_N).sum(), sums


def _importance(config: PolicyGradientConfig, log_ratio_N: Tensor, extra: Mapping[str, Any]) -> Tensor:
    """Each token's importance weight, without gradient."""
    if config.importance_level == "token":
        return log_ratio_N.exp()
    over_sequence = extra["over_sequence"]
    total_N = over_sequence(log_ratio_N)
    return (
        total_N / over_sequence(log_ratio_N.new_ones(log_ratio_N.shape)) if config.importance_level == "sequence_mean" else total_N
    ).exp()


def _clipped(config: PolicyGradientConfig, ratio_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, Tensor]:
    """The objective, and where its bound is what counts (there it has no gradient)."""
    plain_N = ratio_N * advantages_N
    low = None if config.clip_low is None else 1 - config.clip_low
    high = None if config.clip_high is None else 1 + config.clip_high
    if low is None and high is None:
        return plain_N, plain_N.detach() != plain_N.detach()
    bounded_N = ratio_N.clamp(low, high) * advantages_N
    is_bound_N = bounded_N.detach() < plain_N.detach()
    return bounded_N.where(is_bound_N, plain_N), is_bound_N


def _divergence(estimator: str, log_ratio_N: Tensor) -> Tensor:
    """KL(trainer || reference) estimated from tokens that the policy chose, `log_ratio_N` being log(p / reference)."""
    if estimator == "k3":
        return (-log_ratio_N).exp() - 1 + log_ratio_N
    half_square_N = 0.5 * log_ratio_N.square()
    if estimator == "k2":
        return half_square_N
    # The gradient of k1 itself is 0 in expectation.
    return log_ratio_N.detach() + half_square_N - half_square_N.detach()
