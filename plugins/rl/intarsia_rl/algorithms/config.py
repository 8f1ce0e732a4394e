"""Settings of losses on rollouts and on preferences, and of the algorithms. Torch-free."""

from __future__ import annotations

import math

import chz
from intarsia.config.bases import LossConfig, ModelConfig
from intarsia.errors import UsageError, did_you_mean

from intarsia_rl.bases import AlgorithmConfig

ESTIMATORS = ("k1", "k2", "k3")
OUTSIDE = ("cap", "mask")
PAIR_LOSSES = ("sigmoid", "hinge", "ipo")
LEVELS = ("token", "sequence", "sequence_mean")


@chz.chz(typecheck=True)
class PolicyLossConfig(LossConfig):
    """The policy-gradient loss of an algorithm, on rollouts."""

    algorithm: AlgorithmConfig = chz.field(doc="What rewards mean, and the loss of a token.")
    chunk: int = chz.field(default=1024, doc="Tokens whose logits exist at one time; in backward they are computed again.")

    @chz.validate
    def _chunk_fits(self) -> None:
        at_least("loss.chunk", self.chunk, 1)


@chz.chz(typecheck=True)
class PolicyGradientConfig(AlgorithmConfig):
    """What the algorithms here have in common. The ratio r is the trainer's probability of a token over the one that it was generated with."""

    clip_low: float | None = chz.field(
        default=0.2, doc="A ratio below 1 - clip_low is worth no more where the advantage is negative; none: no bound."
    )
    clip_high: float | None = chz.field(
        default=0.2, doc="A ratio above 1 + clip_high is worth no more where the advantage is positive; none: no bound."
    )
    importance_cap: float | None = chz.field(
        default=None, doc="Largest importance weight, against samples of old policies; none: no bound."
    )
    importance_floor: float | None = chz.field(
        default=None, doc="With importance_outside=mask: the smallest importance weight; none: no bound."
    )
    importance_outside: str = chz.field(
        default="cap",
        doc="What becomes of importance weights out of bounds. cap: the weight is lowered to the cap and multiplies the gradient of the log-probability, in the place of clipping; mask: its tokens are left out.",
    )
    importance_level: str = chz.field(
        default="token",
        doc="What has an importance weight: token, sequence (the product over a segment's tokens), or sequence_mean (their geometric mean).",
    )
    kl_coefficient: float = chz.field(
        default=0.0, doc="Weight of the divergence from the reference, the run's initial weights; 0: no reference."
    )
    kl_estimator: str = chz.field(
        default="k3",
        doc="How the divergence is estimated from a token: k1, log(p/reference); k2, half its square; k3, reference/p - 1 + log(p/reference). k1 has the gradient of k2.",
    )
    entropy_coefficient: float = chz.field(
        default=0.0,
        doc="Weight of the mean entropy of the policy's tokens, which is added to the objective and keeps the policy from narrowing; 0: nothing is added.",
    )
    skip_constant: bool = chz.field(default=False, doc="Leave out groups whose samples all have one reward: others take their place.")
    skip_truncated: bool = chz.field(
        default=False, doc="Do not train on samples that a limit ended; they still count among their group's rewards."
    )

    @chz.validate
    def _bounds_fit(self) -> None:
        for field, most in (("clip_low", 1.0), ("clip_high", math.inf), ("importance_cap", math.inf), ("importance_floor", math.inf)):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= most:
                raise UsageError(f"algorithm.{field} is {value}; it must be {_range(0, most)}, or none.")
        at_least("algorithm.kl_coefficient", self.kl_coefficient, 0)
        at_least("algorithm.entropy_coefficient", self.entropy_coefficient, 0)
        for field, known in (("kl_estimator", ESTIMATORS), ("importance_outside", OUTSIDE), ("importance_level", LEVELS)):
            if getattr(self, field) not in known:
                raise UsageError(f"algorithm.{field} is {getattr(self, field)!r}. {did_you_mean(getattr(self, field), known)}")

    @chz.validate
    def _bounds_go_together(self) -> None:
        if self.importance_outside == "cap" and self.importance_floor is not None:
            raise UsageError("algorithm.importance_floor is for importance_outside=mask; a cap has no lower bound.")
        clips = self.clip_low is not None or self.clip_high is not None
        if self.importance_cap is not None and self.importance_outside == "cap" and clips:
            raise UsageError(
                "algorithm.importance_cap takes the place of clipping: set clip_low=None and clip_high=None as well, or importance_outside=mask, which goes with clipping."
            )
        low, high = self.importance_floor, self.importance_cap
        if low is not None and high is not None and low > high:
            raise UsageError(f"algorithm.importance_floor is {low}, above importance_cap {high}: everything would be left out.")


@chz.chz(typecheck=True)
class GRPOConfig(PolicyGradientConfig):
    """Group-relative policy optimisation: a = (reward - mean) / (deviation + epsilon) over a group; the mean over samples of the mean over a sample's tokens."""

    epsilon: float = chz.field(
        default=1e-6, doc="Added to the deviation, which is that of the group's rewards themselves (divided by their number)."
    )

    @chz.validate
    def _epsilon_fits(self) -> None:
        at_least("algorithm.epsilon", self.epsilon, 0)


@chz.chz(typecheck=True)
class DrGRPOConfig(PolicyGradientConfig):
    """GRPO done right: a = reward - mean; the mean over samples of the sum over a sample's tokens divided by a constant."""

    length: int = chz.field(default=1024, doc="What every sample's sum is divided by: the most tokens that a sample may have, say.")

    @chz.validate
    def _length_fits(self) -> None:
        at_least("algorithm.length", self.length, 1)


@chz.chz(typecheck=True)
class DAPOConfig(GRPOConfig):
    """DAPO: GRPO's advantages; the mean over all tokens of the step; a wider bound upwards; groups that teach something; a penalty for length that sets in softly."""

    clip_high: float | None = chz.field(
        default=0.28, doc="A ratio above 1 + clip_high is worth no more where the advantage is positive; none: no bound."
    )
    skip_constant: bool = chz.field(default=True, doc="Leave out groups whose samples all have one reward: others take their place.")
    longest: int | None = chz.field(
        default=None,
        doc="Tokens of a sample from which on its reward is 1 lower; the penalty sets in length_buffer before. None: no penalty.",
    )
    length_buffer: int = chz.field(default=0, doc="Tokens over which the penalty of length rises from 0 to 1.")

    @chz.validate
    def _penalty_fits(self) -> None:
        at_least("algorithm.length_buffer", self.length_buffer, 0)
        if self.longest is not None and self.length_buffer > self.longest:
            raise UsageError(f"algorithm.length_buffer is {self.length_buffer}, more than algorithm.longest = {self.longest}.")
        if self.longest is None and self.length_buffer:
            raise UsageError(
                f"algorithm.length_buffer is {self.length_buffer}, but without algorithm.longest there is no penalty of length."
            )


@chz.chz(typecheck=True)
class RLOOConfig(PolicyGradientConfig):
    """REINFORCE with the mean of the other tries as its baseline: a = reward - mean of the others; the mean over samples of the sum over a sample's tokens."""

    clip_low: float | None = chz.field(
        default=None, doc="A ratio below 1 - clip_low is worth no more where the advantage is negative; none: no bound."
    )
    clip_high: float | None = chz.field(
        default=None, doc="A ratio above 1 + clip_high is worth no more where the advantage is positive; none: no bound."
    )
    importance_cap: float | None = chz.field(default=2.0, doc="Largest importance weight, against samples of old policies; none: no bound.")


@chz.chz(typecheck=True)
class DPOConfig(LossConfig):
    """Direct preference optimisation: with m = beta (log-ratio of the chosen answer - log-ratio of the rejected one), log-ratios against the reference and over whole answers."""

    beta: float = chz.field(default=0.1, doc="How far the policy may move from the reference: the larger, the nearer it stays.")
    kind: str = chz.field(
        default="sigmoid", doc="The loss of a pair: sigmoid, -log sigmoid(m); hinge, max(0, 1 - m); ipo, (m / beta - 1 / (2 beta))^2."
    )
    label_smoothing: float = chz.field(
        default=0.0, doc="With sigmoid: the share of pairs whose preference is taken to be the wrong way round."
    )
    likelihood: float = chz.field(
        default=0.0,
        doc="Weight of the chosen answer's mean cross-entropy, which keeps its probability from falling with that of the rejected one.",
    )
    chunk: int = chz.field(default=1024, doc="Tokens whose logits exist at one time; in backward they are computed again.")

    @chz.validate
    def _numbers_fit(self) -> None:
        at_least("loss.chunk", self.chunk, 1)
        at_least("loss.likelihood", self.likelihood, 0)
        if not 0 < self.beta < math.inf:
            raise UsageError(f"loss.beta is {self.beta}; it must be finite and above 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise UsageError(f"loss.label_smoothing is {self.label_smoothing}; it must be at least 0 and below 0.5.")
        if self.kind not in PAIR_LOSSES:
            raise UsageError(f"loss.kind is {self.kind!r}. {did_you_mean(self.kind, PAIR_LOSSES)}")
        if self.label_smoothing and self.kind != "sigmoid":
            raise UsageError(f"loss.label_smoothing is for loss.kind=sigmoid, and the kind is {self.kind}.")


def check_routes(model: ModelConfig) -> int:
    """How many layers choose experts, whose choices can be replayed. UsageError, naming the model, where none does."""
    try:
        from intarsia_models_common.moe.config import routed_layers
    except ImportError:
        raise UsageError("data.loader.replay_routes needs the distribution intarsia-models-common, which is not installed.") from None
    return routed_layers(model)


def at_least(name: str, value: float, least: float) -> None:
    """UsageError where a setting is below `least`, or not finite."""
    if not least <= value < math.inf:
        raise UsageError(f"{name} is {value}; it must be finite and at least {least}.")


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
