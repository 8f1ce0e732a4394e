"""The dispatcher `all_to_all`: exact counts. N tokens, K experts of a token, M rows, R ranks, E experts of all, e of this rank.

Pairs sorted by expert are sorted by rank too, since ranks have contiguous experts. Counts go first, the host learns them, then rows; what arrives is sorted by rank and within that by
expert, and is sorted by expert here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from intarsia.comm import Communicator
from intarsia_models_common.moe.dispatch import Arrived, Capabilities, Order, experts_of, sort_pairs
from intarsia_models_common.moe.operators import COMBINE, PERMUTE
from torch import Tensor

from intarsia_parallel.collectives import even_counts, exchange
from intarsia_parallel.experts.config import AllToAllConfig
from intarsia_parallel.experts.crossing import Crossing, Lane


class AllToAll:
    """See `intarsia_models_common.moe.dispatch.Dispatcher`."""

    capabilities = Capabilities(needs_host_sync=True, static_shapes=False, drops_tokens=False)

    def __init__(self, config: AllToAllConfig, experts: int, comm: Communicator) -> None:
        self._comm, self._lane = comm, Lane(comm, config.overlap)
        self._shares = experts_of(experts, comm.size)

    def start(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> AllToAllFlight:
        """See `Dispatcher`."""
        return AllToAllFlight(self._lane, self._shares, x_ND, weights_NK, sort_pairs(experts_NK, sum(self._shares)))

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Nothing was put off."""


class AllToAllFlight:
    """See `intarsia_models_common.moe.dispatch.Flight`."""

    dropped = None

    def __init__(self, lane: Lane, shares: list[int], x_ND: Tensor, weights_NK: Tensor, order: Order) -> None:
        self.counts_E = order.counts_E
        self._lane, self._weights_NK, self._order, self._own = lane, weights_NK, order, shares[lane.comm.rank]
        arriving = lane.comm.exchange(list(order.counts_E.split(shares)), [self._own] * len(shares), "counts of experts")
        self._counts_Re = torch.stack(arriving)
        self._sends, self._receives = self._sizes(shares)
        self._crossing: Crossing = lane.start(PERMUTE(x_ND, order.pairs_M, order.places_NK), self._sends, self._receives, "rows to experts")

    def _sizes(self, shares: list[int]) -> tuple[list[int], list[int]]:
        """Rows to each rank and from each: one wait for the device. Where there are no numbers (planning, on the meta device) routing is taken to be balanced."""
        if self.counts_E.is_meta:
            balanced = even_counts(self._order.pairs_M.shape[0], len(shares))
            return balanced, [balanced[self._lane.comm.rank]] * len(shares)
        sends = torch.stack([part.sum() for part in self.counts_E.split(shares)])
        to, back = torch.stack([sends, self._counts_Re.sum(1)]).tolist()
        return to, back

    def arrive(self) -> Arrived:
        """See `Flight`."""
        rows_MD = self._crossing.wait()
        which = torch.arange(self._own, device=rows_MD.device).repeat(len(self._receives))
        which_M = which.repeat_interleave(self._counts_Re.flatten(), output_size=sum(self._receives))
        self._here = here = sort_pairs(which_M[:, None], self._own)
        return Arrived(PERMUTE(rows_MD, here.pairs_M, here.places_NK), here.counts_E)

    def combine(self, y_MD: Tensor) -> Tensor:
        """See `Flight`."""
        rows_MD = PERMUTE(y_MD, self._here.places_NK.flatten(), self._here.pairs_M[:, None])
        back_MD = exchange(rows_MD, self._receives, self._sends, self._lane.comm, "rows from experts")
        return COMBINE(back_MD, self._weights_NK, self._order.pairs_M, self._order.places_NK)


def build(config: AllToAllConfig, experts: int, comm: Communicator) -> AllToAll:
    """The entry's target."""
    return AllToAll(config, experts, comm)
