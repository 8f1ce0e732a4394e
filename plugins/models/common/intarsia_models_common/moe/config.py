"""Settings of mixtures of experts. Torch-free."""

from __future__ import annotations

from typing import Any

import chz
from intarsia.config import ComponentConfig, Config
from intarsia.errors import UsageError, did_you_mean

from intarsia_models_common.config import FeedForwardConfig, SwiGLUConfig, check_between

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")
SEQUENCES = ("row", "document")

JOINT_LOSS = 1e-3
"""Coefficient of the balance loss of all layers together, `router_aux_loss_coef` in Qwen's configs."""


@chz.chz(typecheck=True)
class RouterConfig(ComponentConfig):
    """What chooses experts: module(x_ND, where) -> Routed. Every router has these settings."""

    experts: int = chz.field(doc="Routed experts.")
    top_k: int = chz.field(doc="Experts that each token goes to.")
    norm_topk: bool = chz.field(default=True, doc="Divide a token's weights by their sum.")
    scale: float = chz.field(default=1.0, doc="Multiplier of the weights, after they were normalised.")
    bias_rate: float | None = chz.field(
        default=None,
        doc="Balance by a bias on selection alone, moved by this much against each expert's load once a step; none: no bias; 0: one that stays.",
        metadata={"computes": False},
    )
    balance_loss: float = chz.field(
        default=0.0, doc="Coefficient of the auxiliary loss over the batch, in units of the loss for a token.", metadata={"computes": False}
    )
    joint_loss: float = chz.field(
        default=0.0,
        doc="Coefficient of the auxiliary loss over the batch and over all layers that have it together, whose value is top_k where experts are balanced (Mixtral, Qwen).",
        metadata={"computes": False},
    )
    sequence_loss: float = chz.field(
        default=0.0, doc="Coefficient of the auxiliary loss within each sequence.", metadata={"computes": False}
    )
    sequence: str = chz.field(default="row", doc="What a sequence is to sequence_loss: row or document.", metadata={"computes": False})
    z_loss: float = chz.field(
        default=0.0, doc="Coefficient of the mean squared logsumexp of a token's logits.", metadata={"computes": False}
    )
    jitter: float = chz.field(
        default=0.0,
        doc="In training the router's input is multiplied by numbers drawn from 1 - jitter to 1 + jitter.",
        metadata={"computes": False},
    )

    @property
    def sums_over_batch(self) -> bool:
        """Whether its losses look at more than a sequence."""
        return bool(self.balance_loss or self.joint_loss)

    @chz.validate
    def _numbers_fit(self) -> None:
        check_between("router.experts", self.experts, 1)
        if not 1 <= self.top_k <= self.experts:
            raise UsageError(
                f"router.top_k = {self.top_k}: a token goes to at least 1 and at most router.experts = {self.experts} experts."
            )
        for field in ("balance_loss", "joint_loss", "sequence_loss", "z_loss", "scale"):
            check_between(f"router.{field}", getattr(self, field), 0)
        check_between("router.jitter", self.jitter, 0, 1)
        if self.bias_rate is not None:
            check_between("router.bias_rate", self.bias_rate, 0)
        if self.sequence not in SEQUENCES:
            raise UsageError(f"router.sequence is {self.sequence!r}. {did_you_mean(self.sequence, SEQUENCES)}")


@chz.chz(typecheck=True)
class SoftmaxRouterConfig(RouterConfig):
    """The experts of the largest logits, weighted by the softmax over all."""


@chz.chz(typecheck=True)
class SigmoidRouterConfig(RouterConfig):
    """Each expert scored by a sigmoid of its own."""


@chz.chz(typecheck=True)
class GroupLimitedRouterConfig(RouterConfig):
    """Experts come from the best few of several groups, which lie on few nodes (DeepSeek-V2 and V3)."""

    scoring: str = chz.field(default="sigmoid", doc="sigmoid (V3) or softmax (V2).")
    groups: int = chz.field(doc="Groups of experts, contiguous and of equal size.")
    top_groups: int = chz.field(doc="Groups that a token's experts come from.")
    group_score: str = chz.field(
        default="top2", doc="What a group is worth: top2, the sum of its two largest scores with their bias (V3), or max (V2)."
    )

    @chz.validate
    def _groups_fit(self) -> None:
        for field, known in (("scoring", SCORINGS), ("group_score", GROUP_SCORES)):
            if getattr(self, field) not in known:
                raise UsageError(f"router.{field} is {getattr(self, field)!r}. {did_you_mean(getattr(self, field), known)}")
        if self.groups < 1 or self.experts % self.groups:
            legal = [n for n in range(1, self.experts + 1) if self.experts % n == 0]
            raise UsageError(
                f"router.groups = {self.groups} does not divide router.experts = {self.experts}. {near_text(self.groups, legal)}"
            )
        if not 1 <= self.top_groups <= self.groups:
            raise UsageError(f"router.top_groups = {self.top_groups}: it must be from 1 to router.groups = {self.groups}.")
        size = self.experts // self.groups
        if self.group_score == "top2" and size < 2:
            raise UsageError(
                f"router.group_score = top2 needs groups of 2 experts or more; {self.experts} experts in {self.groups} groups leave {size}."
            )
        if self.top_k > self.top_groups * size:
            raise UsageError(
                f"router.top_k = {self.top_k}: {self.top_groups} groups of {size} experts hold only {self.top_groups * size}. Raise top_groups, or lower top_k."
            )


@chz.chz(typecheck=True)
class ForcedBalancedRouterConfig(RouterConfig):
    """For benchmarks: tokens go round the experts in turn whatever the scores are; weights and gradients are the softmax router's."""


def near_text(value: int, legal: list[int]) -> str:
    """The legal numbers around `value`, as a sentence."""
    below, above = [n for n in legal if n < value][-1:], [n for n in legal if n > value][:1]
    return f"Nearest: {' or '.join(map(str, below + above))}."


@chz.chz(typecheck=True)
class GatedSwiGLUConfig(SwiGLUConfig):
    """A shared expert that each token takes as much of as a sigmoid of its own says (Qwen)."""


@chz.chz(typecheck=True)
class DispatcherConfig(Config):
    """Settings of a dispatcher: how tokens come to their experts' ranks."""


@chz.chz(typecheck=True)
class LocalConfig(DispatcherConfig):
    """Every expert is here."""


@chz.chz(typecheck=True)
class MoEConfig(FeedForwardConfig):
    """A mixture of experts: routed SwiGLU experts, and shared ones that every token goes to."""

    router: RouterConfig = chz.field(doc="What chooses experts.")
    hidden: int = chz.field(doc="Width of a routed expert.")
    shared: FeedForwardConfig | None = chz.field(default=None, doc="What every token goes through as well; none: nothing.")
    dispatcher: DispatcherConfig = chz.field(
        default_factory=LocalConfig,
        doc="How tokens come to their experts where all are on one rank; parallel.dispatcher says it for several.",
        metadata={"computes": False},
    )

    @chz.validate
    def _hidden_is_positive(self) -> None:
        check_between("moe.hidden", self.hidden, 1)


def softmax_experts(
    count: int,
    top_k: int,
    hidden: int,
    *,
    shared: FeedForwardConfig | None = None,
    norm_topk: bool = True,
    joint_loss: float = JOINT_LOSS,
) -> MoEConfig:
    """A softmax over all experts, balanced by a loss over all layers together (Qwen)."""
    router = SoftmaxRouterConfig(experts=count, top_k=top_k, norm_topk=norm_topk, joint_loss=joint_loss)
    return MoEConfig(router=router, hidden=hidden, shared=shared)


__all__ = [
    "JOINT_LOSS",
    "DispatcherConfig",
    "ForcedBalancedRouterConfig",
    "GatedSwiGLUConfig",
    "GroupLimitedRouterConfig",
    "LocalConfig",
    "MoEConfig",
    "RouterConfig",
    "SigmoidRouterConfig",
    "SoftmaxRouterConfig",
    "near_text",
    "softmax_experts",
]


def routers_of(model: Any) -> list[RouterConfig]:
    """Of a model config's `layers`, then of the blocks that predict further `ahead`, where it has some. Stability: provisional."""
    blocks = [getattr(block, "feed_forward", None) for block in (*getattr(model, "layers", ()), *getattr(model, "ahead", ()))]
    return [block.router for block in blocks if isinstance(block, MoEConfig)]


def routed_layers(model: Any) -> int:
    """How many of a model config's `layers` choose experts: as many layers have the routes of a token (see `replay`). UsageError, naming the model, where none does, or one
    chooses among more experts than routes can name. Stability: provisional."""
    blocks = [getattr(block, "feed_forward", None) for block in getattr(model, "layers", ())]
    found = [block.router.experts for block in blocks if isinstance(block, MoEConfig)]
    name = type(model).__name__.removesuffix("Config")
    if not found:
        raise UsageError(
            f"{name} has no layer that chooses experts: there are no routes to report or to replay. Set data.loader.replay_routes=False."
        )
    if max(found) > 2**15:
        raise UsageError(
            f"{name} has layers of {max(found)} experts, and routes name at most {2**15}. Set data.loader.replay_routes=False."
        )
    return len(found)
