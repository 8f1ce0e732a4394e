"""The mixture of experts as a feed-forward layer. B rows, S tokens, N = B S, D model width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from intarsia import plugins
from intarsia.comm import SelfCommunicator
from intarsia.contracts import SequenceContext
from torch import Tensor, nn

from intarsia_models_common.build import Scope, build
from intarsia_models_common.moe.balance import Sequences
from intarsia_models_common.moe.config import MoEConfig
from intarsia_models_common.moe.experts import Experts


class MoE(nn.Module):
    """y = sum over the chosen experts of w_k E_k(x) + shared(x). An `intarsia.contracts.StepState`: what dispatchers put off is raised at the step's end.

    The shared expert runs while rows are under way to their experts.
    """

    # A block hands its context to a feed-forward layer that says so.
    reads_context: ClassVar[bool] = True

    def __init__(self, config: MoEConfig, scope: Scope) -> None:
        super().__init__()
        self.router = build(config.router, scope.inside("router"))
        self.experts = Experts(config.router.experts, config.hidden, scope.inside("experts"))
        self.shared = None if config.shared is None else build(config.shared, scope.inside("shared"))
        self.experts.dispatcher = plugins.current().build(config.dispatcher, config.router.experts, SelfCommunicator())
        self.top_k = config.router.top_k

    def forward(self, x_BSD: Tensor, context: SequenceContext | None = None) -> Tensor:
        """Same shape and dtype."""
        # How many rows arrive from other ranks differs from call to call: compiled, the layer would be compiled again and again.
        is_traceable = self.experts.dispatcher.capabilities.traceable
        return self._computed(x_BSD, context) if is_traceable else self._as_written(x_BSD, context)

    @torch.compiler.disable
    def _as_written(self, x_BSD: Tensor, context: SequenceContext | None) -> Tensor:
        return self._computed(x_BSD, context)

    def _computed(self, x_BSD: Tensor, context: SequenceContext | None) -> Tensor:
        x_ND = x_BSD.flatten(0, -2)
        routed = self.router(x_ND, Sequences(x_BSD.shape[0] if x_BSD.dim() > 2 else 1, self._documents(context, x_BSD)))
        flight = self.experts.dispatcher.start(x_ND, routed.experts_NK, routed.weights_NK)
        shared_BSD = None if self.shared is None else self.shared(x_BSD)
        arrived = flight.arrive()
        y_BSD = flight.combine(self.experts(arrived.x_MD, arrived.counts_e)).view(x_BSD.shape)
        if hasattr(self.router, "count"):
            self.router.count(flight.counts_E, routed.scores_NE, flight.dropped)
        return y_BSD if shared_BSD is None else shared_BSD + y_BSD

    def _documents(self, context: SequenceContext | None, x_BSD: Tensor) -> Any:
        documents_BS = getattr(context, "documents_BS", None)
        if documents_BS is None or self.experts.local_sequence is None:
            return documents_BS
        return self.experts.local_sequence(documents_BS)

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """The dispatcher's."""
        self.experts.dispatcher.reduce(all_reduce_sum)

    def commit(self) -> None:
        """Nothing to apply: the router's own is a StepState too."""

    def mixing_flops_per_token(self, sequence_tokens: int) -> float:
        """Forward FLOPs of the router and of the chosen experts; the shared expert's layers are counted as layers."""
        return 2.0 * self.router.weight.numel() + self.top_k * self.experts.flops_per_row
