"""Routers. N tokens, D model width, E experts, K chosen, G groups of experts.

    z = x W^T in float32;  s = softmax(z) or sigmoid(z);  c = s + b;  experts = the K largest c (of the best groups);  w = s[experts], normalised, times scale

The bias b acts on selection alone and is moved once an optimizer step by -rate sign(load - mean load) (arXiv 2408.15664).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import ClassVar

import torch
from intarsia import logical
from intarsia.contracts import Init
from torch import Tensor, nn

from intarsia_models_common.build import Scope, parameter
from intarsia_models_common.moe import balance, joint
from intarsia_models_common.moe.balance import Sequences
from intarsia_models_common.moe.config import (
    ForcedBalancedRouterConfig,
    GroupLimitedRouterConfig,
    RouterConfig,
    SigmoidRouterConfig,
    SoftmaxRouterConfig,
)
from intarsia_models_common.moe.operators import EXPERT_WEIGHTS, ROUTER_LINEAR, ROUTER_SIGMOID, TOP_EXPERTS


@dataclasses.dataclass
class Routed:
    """A router's choice: `experts_NK` int64, distinct within a token; `weights_NK` float32; `scores_NE` float32, of all experts. Stability: provisional."""

    experts_NK: Tensor
    weights_NK: Tensor
    scores_NE: Tensor


class Router(nn.Module):
    """What routers share; a subclass says how logits are scored and which experts are chosen. An `intarsia.contracts.StepState`.

    `load_E` holds the last finished step's counters over all ranks (None before the first): each expert's pairs, then tokens, entropy, dropped pairs.
    """

    # Parameters that keep float32 through mixed precision, whoever casts the others.
    keeps_float32: ClassVar[tuple[str, ...]] = ("weight",)
    scoring: ClassVar[str] = "softmax"

    def __init__(self, config: RouterConfig, scope: Scope) -> None:
        super().__init__()
        self.settings, self.std = config, scope.std
        self.label = label_of(scope.name)
        self.weight = parameter(config.experts, scope.dim)
        self.bias: Tensor | None
        self.register_buffer("bias", None if config.bias_rate is None else torch.zeros(config.experts, dtype=torch.float32))
        self.register_buffer("counters", torch.zeros(config.experts + balance.FURTHER, dtype=torch.float64), persistent=False)
        self.counters: Tensor
        self.load_E: Tensor | None = None

    def inits(self) -> dict[str, Init]:
        """The weight is normal, the bias zero."""
        return {"weight": Init("normal", std=self.std)} | ({} if self.bias is None else {"bias": Init("zeros")})

    def fill_buffers(self) -> None:
        """Nothing is counted yet."""
        self.counters.zero_()

    def forward(self, x_ND: Tensor, where: Sequences | None = None, forced_NK: Tensor | None = None) -> Routed:
        """Choose. In training the losses that the settings ask for are attached to the weights. `forced_NK` (any integers): the experts of the tokens whose numbers are not
        negative, in the place of a choice; weights and gradients are this router's."""
        logits_NE = ROUTER_LINEAR(self._jittered(x_ND), self.weight)
        scores_NE = self.score(logits_NE)
        with torch.no_grad():
            biased_NE = scores_NE.detach() if self.bias is None else scores_NE.detach() + self.bias
            experts_NK = self.choose(biased_NE)
            if forced_NK is not None:
                experts_NK = torch.where(forced_NK[:, :1] >= 0, forced_NK.long(), experts_NK)
        weights_NK = EXPERT_WEIGHTS(scores_NE, experts_NK, self.settings.norm_topk, self.settings.scale)
        if self.training and torch.is_grad_enabled():
            weights_NK = self._with_losses(weights_NK, logits_NE, scores_NE, experts_NK, where or Sequences(1))
        return Routed(experts_NK, weights_NK.float(), scores_NE)

    def score(self, logits_NE: Tensor) -> Tensor:
        """Scores of all experts, each positive."""
        return ROUTER_SIGMOID(logits_NE) if self.scoring == "sigmoid" else torch.softmax(logits_NE, -1)

    def choose(self, biased_NE: Tensor) -> Tensor:
        """K experts of each token from its scores with their bias, without gradient."""
        return TOP_EXPERTS(biased_NE, self.settings.top_k)

    # ------------------------------------------------------------ a step's counts

    def count(self, counts_E: Tensor, scores_NE: Tensor, dropped: Tensor | None = None) -> None:
        """Note what was chosen, in training, once for each token whatever recomputation does."""
        if self.training and torch.is_grad_enabled():
            balance.count(self.counters, counts_E, scores_NE.detach(), dropped)

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Sum this step's counts over the ranks."""
        self.load_E = all_reduce_sum(self.counters.clone())
        self.counters.zero_()

    def commit(self) -> None:
        """Move the bias against the load."""
        rate = self.settings.bias_rate
        if self.load_E is not None and self.bias is not None and rate:
            load_E = self.load_E[: self.settings.experts]
            self.bias += rate * torch.sign(load_E.mean() - load_E).to(self.bias.dtype)

    # ------------------------------------------------------------ help

    def _jittered(self, x_ND: Tensor) -> Tensor:
        """x times uniform noise of a stream of this router's own. Its seed is drawn from the process's CPU generator, which checkpoints keep and recomputation replays."""
        jitter = self.settings.jitter
        if not jitter or not self.training or not torch.is_grad_enabled():
            return x_ND
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        seed = hashlib.sha256(f"{drawn}/moe.{self.label}.jitter".encode()).digest()[:8]
        generator = torch.Generator(x_ND.device).manual_seed(int.from_bytes(seed, "little") >> 1)
        noise_ND = torch.empty_like(x_ND, dtype=torch.float32).uniform_(1 - jitter, 1 + jitter, generator=generator)
        return x_ND * noise_ND.to(x_ND.dtype)

    def _with_losses(self, weights_NK: Tensor, logits_NE: Tensor, scores_NE: Tensor, experts_NK: Tensor, where: Sequences) -> Tensor:
        config = self.settings
        keep_N = where.keep_N
        probabilities_NE = scores_NE
        if self.scoring == "sigmoid" and (config.balance_loss or config.sequence_loss or config.joint_loss):
            probabilities_NE = scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)
        if keep_N is not None:
            probabilities_NE = probabilities_NE * keep_N[:, None]
        if config.balance_loss:
            value = config.balance_loss * balance.balance_loss(probabilities_NE, experts_NK, keep_N)
            weights_NK = self._add_loss(weights_NK, "balance_loss", value)
        if config.joint_loss:
            weights_NK = self._add_joint(weights_NK, *balance.statistics(probabilities_NE, experts_NK, keep_N))
        if config.sequence_loss:
            where = where if config.sequence == "document" else dataclasses.replace(where, documents_BS=None)
            value = config.sequence_loss * balance.sequence_loss(probabilities_NE, experts_NK, where)
            weights_NK = self._add_loss(weights_NK, "sequence_loss", value)
        if config.z_loss:
            weights_NK = self._add_loss(weights_NK, "z_loss", config.z_loss * balance.z_loss(logits_NE, keep_N))
        return weights_NK

    # Left out of compiled code, which would be compiled anew for the name of every layer.
    @torch.compiler.disable
    def _add_loss(self, weights_NK: Tensor, name: str, value: Tensor) -> Tensor:
        return logical.add_loss(weights_NK, f"moe.{self.label}.{name}", value)

    @torch.compiler.disable
    def _add_joint(self, weights_NK: Tensor, pairs_E: Tensor, mass_E: Tensor, tokens: Tensor) -> Tensor:
        return joint.add(weights_NK, pairs_E, mass_E, tokens)


class SoftmaxRouter(Router):
    """See `SoftmaxRouterConfig`."""

    settings: SoftmaxRouterConfig


class SigmoidRouter(Router):
    """See `SigmoidRouterConfig`."""

    scoring = "sigmoid"
    settings: SigmoidRouterConfig


class GroupLimitedRouter(Router):
    """See `GroupLimitedRouterConfig`."""

    settings: GroupLimitedRouterConfig

    def __init__(self, config: GroupLimitedRouterConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        self.scoring = config.scoring  # type: ignore[misc]

    def choose(self, biased_NE: Tensor) -> Tensor:
        """The K largest of the best groups."""
        config = self.settings
        return TOP_EXPERTS(biased_NE, config.top_k, config.groups, config.top_groups, config.group_score)


class ForcedBalancedRouter(Router):
    """See `ForcedBalancedRouterConfig`."""

    settings: ForcedBalancedRouterConfig

    def choose(self, biased_NE: Tensor) -> Tensor:
        """Experts n K, n K + 1, ... modulo E."""
        tokens, k = biased_NE.shape[0], self.settings.top_k
        return torch.arange(tokens * k, device=biased_NE.device).view(tokens, k) % self.settings.experts


def label_of(name: str) -> str:
    """What metrics call the layer of a component: the block's number, or the first two parts of another place's name (`mtp.0`)."""
    first, second, *_ = (*name.split("."), "", "")
    return second if first == "layers" and second else ".".join(part for part in (first, second) if part) or "0"
