"""The mixture of experts as a feed-forward layer. B rows, S tokens, N = B S, D model width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from intarsia import plugins
from intarsia.comm import SelfCommunicator
from intarsia.contracts import SequenceContext
from intarsia.errors import UsageError
from torch import Tensor, nn

from intarsia_models_common.build import Scope, build
from intarsia_models_common.moe import replay
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
        # Which layer of a model's routes this is: see `replay`.
        self.route_number: int | None = None

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
        padding_BS = (getattr(context, "extra", None) or {}).get("padding_BS")
        where = Sequences(x_BSD.shape[0] if x_BSD.dim() > 2 else 1, self._documents(context), self._own_part(padding_BS))
        forced_NK = self._forced(context, x_ND)
        routed = self.router(x_ND, where) if forced_NK is None else self.router(x_ND, where, forced_NK)
        replay.record(self.route_number, routed.experts_NK)
        flight = self.experts.dispatcher.start(x_ND, routed.experts_NK, routed.weights_NK)
        shared_BSD = None if self.shared is None else self.shared(x_BSD)
        arrived = flight.arrive()
        y_BSD = flight.combine(self.experts(arrived.x_MD, arrived.counts_e)).view(x_BSD.shape)
        if hasattr(self.router, "count"):
            self.router.count(flight.counts_E, routed.scores_NE, flight.dropped)
        return y_BSD if shared_BSD is None else shared_BSD + y_BSD

    def _documents(self, context: SequenceContext | None) -> Any:
        return self._own_part(getattr(context, "documents_BS", None))

    def _forced(self, context: SequenceContext | None, x_ND: Tensor) -> Tensor | None:
        forced_BSK = self._own_part(replay.forced_experts(context, self.route_number))
        if forced_BSK is None:
            return None
        if forced_BSK.shape[-1] != self.top_k or forced_BSK.shape[:-1].numel() != x_ND.shape[0]:
            raise UsageError(
                f"Layer {self.route_number} of those that choose experts got routes of shape {tuple(forced_BSK.shape)}; it has {x_ND.shape[0]} tokens and each goes to "
                f"{self.top_k} experts. Generator and trainer must run one model."
            )
        return forced_BSK.flatten(0, -2)

    def _own_part(self, each_BS: Any) -> Any:
        return each_BS if each_BS is None or self.experts.local_sequence is None else self.experts.local_sequence(each_BS)

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """The dispatcher's."""
        self.experts.dispatcher.reduce(all_reduce_sum)

    def evaluated(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """The dispatcher's end of a step, which an evaluation has too."""
        self.experts.dispatcher.reduce(all_reduce_sum)

    def commit(self) -> None:
        """Nothing to apply: the router's own is a StepState too."""

    def mixing_flops_per_token(self, sequence_tokens: int) -> float:
        """Forward FLOPs of the router and of the chosen experts; the shared expert's layers are counted as layers."""
        return 2.0 * self.router.weight.numel() + self.top_k * self.experts.flops_per_row
