"""The balance loss of all layers together (Mixtral, arXiv 2401.04088; Qwen3, 2505.09388). E experts, N tokens, L layers with experts, T tokens of the micro-batch on all ranks.

    T E sum over e of f_e P_e,    f_e = pairs that chose e, for a token and layer,    P_e = mean probability of e over tokens and layers

It is neither the sum nor the mean of layers' own losses, and what a layer's gradient is depends on the layers behind it. So statistics [2 E + 2] (pairs and probabilities of each expert, tokens, layers) go through
the model beside the residual stream, from router to router and from one pipeline stage to the next, and their gradient comes back the same way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from intarsia import logical
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_models_common.moe.config import routers_of

NAME = "moe.joint_loss"
"""What the loss is called among a step's sums."""


class Statistics:
    """Those of one forward pass so far."""

    def __init__(self, statistics: Tensor) -> None:
        self.statistics = statistics


class _Open(threading.local):
    """Of a thread: statistics of the forward pass that is under way."""

    now: Statistics | None = None


_open = _Open()


class JointLoss:
    """The loss of a model whose routers ask for it (`joint_loss`), around its forward pass."""

    def __init__(self, experts: int, coefficient: float) -> None:
        self.experts, self.coefficient = experts, coefficient

    @classmethod
    def of(cls, config: Any) -> JointLoss | None:
        """For a model config; None where no router asks for it. UsageError where those that do differ."""
        asked = {(router.experts, router.joint_loss) for router in routers_of(config) if router.joint_loss}
        if len(asked) > 1:
            found = ", ".join(f"{experts} experts with {coefficient:g}" for experts, coefficient in sorted(asked))
            raise UsageError(
                f"router.joint_loss is one loss of all layers that ask for it, and they differ: {found}. Give them one number of experts and one coefficient."
            )
        return cls(*asked.pop()) if asked else None

    def around(self, run: Callable[..., Any], inputs: Any, context: Any, stage: Any, training: bool) -> Any:
        """What `run(inputs, context, stage)` gives, the loss attached. Between the stages of a pipeline what is handed on is (its result, the statistics)."""
        if stage is None or stage.first:
            statistics = torch.zeros(2 * self.experts + 2, dtype=torch.float32, device=inputs.device)
        else:
            inputs, statistics = inputs
        with _opened(statistics) as opened:
            result = run(inputs, context, stage)
            statistics = opened.statistics
        if stage is not None and not stage.last:
            return result, statistics
        return self._attached(result, statistics) if training else result

    def _attached(self, result: Any, statistics: Tensor) -> Any:
        first, *others = result if isinstance(result, tuple) else (result,)
        first = logical.add_loss(first, NAME, self.value(statistics))
        return (first, *others) if others else first

    def value(self, statistics: Tensor) -> Tensor:
        """This rank's share of the loss: that of its own tokens' probabilities. Only pairs and tokens cross ranks; they have no gradient."""
        experts = self.experts
        pairs_E, mass_E, tokens, layers = statistics.split((experts, experts, 1, 1))
        counts = logical.sum(torch.cat((pairs_E, tokens)).detach(), ("sequence", "batch"))
        fraction_E = counts[:-1] / counts[-1].clamp_min(1)
        return self.coefficient * experts * (mass_E * fraction_E).sum() / layers.detach().clamp_min(1).squeeze()


@contextlib.contextmanager
def _opened(statistics: Tensor) -> Iterator[Statistics]:
    before, opened = _open.now, Statistics(statistics)
    _open.now = opened
    try:
        yield opened
    finally:
        _open.now = before


def add(weights_NK: Tensor, pairs_E: Tensor, mass_E: Tensor, tokens: Tensor) -> Tensor:
    """`weights_NK`, through which what a router counted joins the statistics of the forward pass that is under way; in a recomputation there is none, and nothing does."""
    now = _open.now
    if now is None:
        return weights_NK
    weights_NK, now.statistics = _Join.apply(weights_NK, now.statistics, pairs_E, mass_E, tokens)
    return weights_NK


class _Join(torch.autograd.Function):
    """Both results have one backward: it waits for the weights' gradient, and so comes after everything that waits for the block's."""

    @staticmethod
    def forward(ctx: Any, weights_NK: Tensor, statistics: Tensor, pairs_E: Tensor, mass_E: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.experts = pairs_E.shape[0]
        ctx.dtype = mass_E.dtype
        added = torch.cat((pairs_E.float(), mass_E.float(), tokens.float().view(1), tokens.new_ones(1, dtype=torch.float32)))
        return weights_NK.view_as(weights_NK), statistics + added

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_weights, grad_statistics = grads
        return grad_weights, grad_statistics, None, grad_statistics[ctx.experts : 2 * ctx.experts].to(ctx.dtype), None
