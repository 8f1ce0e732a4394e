"""The dispatcher `fixed_capacity`: C rows to every rank. N tokens, K experts of a token, R ranks, C rows from one rank to another, M = R C, E experts of all, e of this rank.

    C = ceil(factor T K / R), at most T min(K, e), with T tokens of a rank at most

Row p of those that go to rank r lies in slot r C + p; slots beyond the rank's pairs are empty, pairs beyond its slots overflow. Counts and rows travel in equal sizes, and what is
valid is found on the device: the host learns nothing, and shapes depend on settings alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from intarsia.comm import Communicator
from intarsia.errors import UsageError
from intarsia_models_common.moe.balance import is_recomputed
from intarsia_models_common.moe.dispatch import Arrived, Capabilities, Order, experts_of, sort_pairs
from intarsia_models_common.moe.operators import COMBINE, PERMUTE
from torch import Tensor

from intarsia_parallel.collectives import exchange
from intarsia_parallel.experts.config import FixedCapacityConfig
from intarsia_parallel.experts.crossing import Lane


class FixedCapacity:
    """See `intarsia_models_common.moe.dispatch.Dispatcher`."""

    def __init__(self, config: FixedCapacityConfig, experts: int, comm: Communicator) -> None:
        self.capabilities = Capabilities(needs_host_sync=False, static_shapes=True, drops_tokens=config.overflow == "drop")
        self._config, self._comm, self._lane = config, comm, Lane(comm, config.overlap)
        self.shares = experts_of(experts, comm.size)
        self._tokens = config.tokens
        self._tables: tuple[Tensor, Tensor] | None = None
        self._overflow: Tensor | None = None

    def start(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> FixedFlight:
        """See `Dispatcher`."""
        capacity = self.capacity(*experts_NK.shape)
        flight = FixedFlight(self._lane, self, x_ND, weights_NK, sort_pairs(experts_NK, sum(self.shares)), capacity)
        if self._overflow is None:
            self._overflow = torch.zeros((), dtype=torch.int64, device=x_ND.device)
        if not is_recomputed():
            self._overflow += flight.dropped
        return flight

    def capacity(self, tokens: int, k: int) -> int:
        """C. The first pass settles how many tokens a rank has at most, where nothing else said so: ranks may have a token more or less."""
        if self._tokens is None:
            most = torch.tensor([tokens], dtype=torch.int64, device=self._comm.device)
            self._tokens = max(1, int(self._comm.all_reduce(most, "max", "tokens of a rank")))
        if tokens > self._tokens:
            raise UsageError(
                f"fixed_capacity was made for {self._tokens} tokens of a rank, and a forward pass has {tokens}. Set the dispatcher's `tokens` to the most there will be."
            )
        wanted = math.ceil(self._config.factor * self._tokens * k / self._comm.size)
        return max(1, min(wanted, self._tokens * min(k, max(self.shares))))

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The first expert of each rank, with E at the end [R + 1], and each expert's rank [E]."""
        if self._tables is None or self._tables[0].device != device:
            firsts = [0, *itertools.accumulate(self.shares)]
            ranks = [rank for rank, share in enumerate(self.shares) for _ in range(share)]
            self._tables = torch.tensor(firsts, device=device), torch.tensor(ranks, device=device)
        return self._tables

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Raise UsageError, on every rank, where pairs overflowed since the last step or evaluation and that is an error."""
        if self._config.overflow != "error":
            return
        pairs = torch.zeros((), dtype=torch.int64, device=self._comm.device) if self._overflow is None else self._overflow.clone()
        total = int(all_reduce_sum(pairs.reshape(1)))
        if self._overflow is not None:
            self._overflow.zero_()
        if total:
            raise UsageError(
                f"fixed_capacity: {total} pairs of tokens and experts did not fit into what ranks send each other (factor {self._config.factor:g}, {self._tokens} tokens a rank, "
                f"{self._comm.size} ranks). Neither a step's update nor an evaluation was taken from that. Raise the dispatcher's `factor` ({self._comm.size} is always enough), choose overflow=drop, or all_to_all."
            )


class FixedFlight:
    """See `intarsia_models_common.moe.dispatch.Flight`."""

    def __init__(self, lane: Lane, dispatcher: FixedCapacity, x_ND: Tensor, weights_NK: Tensor, order: Order, capacity: int) -> None:
        self.counts_E = order.counts_E
        self._lane, self._weights_NK, self._capacity = lane, weights_NK, capacity
        self._own = dispatcher.shares[lane.comm.rank]
        ranks = lane.comm.size
        firsts_R1, ranks_E = dispatcher.tables(x_ND.device)
        begins_R = order.bounds_E1[firsts_R1[:-1]]
        # Where each sorted pair goes.
        numbers_M = torch.arange(order.pairs_M.shape[0], device=x_ND.device)
        rank_M = torch.searchsorted(begins_R, numbers_M, right=True) - 1
        place_M = numbers_M - begins_R[rank_M]
        fits_M = place_M < capacity
        slots_M = torch.where(fits_M, rank_M * capacity + place_M, -1)
        self.dropped: Tensor = numbers_M.shape[0] - fits_M.sum()
        places_NK = torch.empty_like(order.pairs_M).scatter_(0, order.pairs_M, slots_M).view(order.places_NK.shape)
        slots = torch.where(fits_M, slots_M, ranks * capacity)
        pairs_M = order.pairs_M.new_full((ranks * capacity + 1,), -1).scatter_(0, slots, order.pairs_M)[:-1]
        self._pairs_M, self._places_NK = pairs_M, places_NK
        # How many of each expert fit.
        within_E = begins_R[ranks_E]
        sent_E = (order.bounds_E1[1:] - within_E).clamp_max(capacity) - (order.bounds_E1[:-1] - within_E).clamp_max(capacity)
        arriving = lane.comm.exchange(list(sent_E.split(dispatcher.shares)), [self._own] * ranks, "counts of experts")
        self._counts_Re = torch.stack(arriving)
        self._crossing = lane.start(PERMUTE(x_ND, pairs_M, places_NK), [capacity] * ranks, [capacity] * ranks, "rows to experts")

    def arrive(self) -> Arrived:
        """See `Flight`."""
        rows_MD = self._crossing.wait()
        ranks, device = self._lane.comm.size, rows_MD.device
        # The expert of each slot; empty ones are of an expert after the last.
        ends_Re = self._counts_Re.cumsum(1)
        slots_RC = torch.arange(self._capacity, device=device).expand(ranks, -1).contiguous()
        which_M = torch.searchsorted(ends_Re, slots_RC, right=True).flatten()
        here = sort_pairs(which_M[:, None], self._own + 1)
        self._sources_M = torch.where(torch.arange(which_M.shape[0], device=device) < here.bounds_E1[self._own], here.pairs_M, -1)
        self._places_M = torch.where(which_M < self._own, here.places_NK.flatten(), -1)
        return Arrived(PERMUTE(rows_MD, self._sources_M, self._places_M[:, None]), here.counts_E[: self._own])

    def combine(self, y_MD: Tensor) -> Tensor:
        """See `Flight`."""
        rows_MD = PERMUTE(y_MD, self._places_M, self._sources_M[:, None])
        equal = [self._capacity] * self._lane.comm.size
        back_MD = exchange(rows_MD, equal, equal, self._lane.comm, "rows from experts")
        return COMBINE(back_MD, self._weights_NK, self._pairs_M, self._places_NK)


def build(config: FixedCapacityConfig, experts: int, comm: Communicator) -> FixedCapacity:
    """The entry's target."""
    return FixedCapacity(config, experts, comm)
