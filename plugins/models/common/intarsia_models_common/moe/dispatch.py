"""What a dispatcher is, and the one for experts that are all here. N tokens, K experts of a token, M rows for experts, D model width, E experts of all ranks, e experts of this one.

    flight = dispatcher.start(x_ND, experts_NK, weights_NK)    # rows set out
    ...                                                        # whatever needs none of them: the shared expert
    arrived = flight.arrive()                                  # rows of this rank's experts
    y_ND = flight.combine(experts(arrived.x_MD, arrived.counts_e))

Experts are cut over the group in contiguous runs, as even as can be (`experts_of`). Every rank of the group calls the same methods equally often, with tokens or
without, forward and backward. `intarsia_testing.dispatcher` proves all of this of a dispatcher.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from intarsia.comm import Communicator
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_models_common.moe.config import LocalConfig
from intarsia_models_common.moe.operators import COMBINE, PERMUTE, SORT_PAIRS


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a dispatcher promises, or owns up to. Stability: provisional.

    `needs_host_sync`: the host waits for the device to learn how many rows arrive; without it a step can be captured as a CUDA graph, given `static_shapes`: M depends on shapes alone.
    `drops_tokens`: pairs may be left out, by setting, and are counted. `quantised`: rows travel in fewer bits than they have. `traceable`: torch.compile may trace its
    calls; without it the whole layer runs as written.
    """

    needs_host_sync: bool
    static_shapes: bool
    drops_tokens: bool
    quantised: bool = False
    traceable: bool = False


@dataclasses.dataclass
class Arrived:
    """Rows for this rank's experts. Stability: provisional.

    `x_MD` is sorted by expert; the first `counts_e.sum()` rows are valid, the rest is a tail that holds anything and whose results nobody reads.
    `counts_e` (int64, on the device) are the rows of each of this rank's experts.
    """

    x_MD: Tensor
    counts_e: Tensor


class Flight(Protocol):
    """Tokens under way. Stability: provisional.

    `counts_E` (int64, on the device): how many of this rank's pairs chose each expert of the group, before any was dropped. `dropped` (a scalar on the device, or None): how many were.
    """

    counts_E: Tensor
    dropped: Tensor | None

    def arrive(self) -> Arrived:
        """Wait for the rows. Called once, after `start`."""

    def combine(self, y_MD: Tensor) -> Tensor:
        """[N, D]: the experts' results back at their tokens, weighted and summed; gradients of results and weights included. Called once, after `arrive`."""


@runtime_checkable
class Dispatcher(Protocol):
    """Built by `target(config, experts, comm)`. Stability: provisional."""

    capabilities: Capabilities

    def start(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Flight:
        """Send token n's row to the ranks of experts `experts_NK[n]` (int64, distinct within a token); `weights_NK` is float32. May return before anything has arrived."""

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """At the end of a step, before its update, once, and at the end of an evaluation: raise what could not be raised without waiting for the device. Every rank calls it; the
        argument sums a tensor over all ranks that share the data, in place."""


def experts_of(experts: int, ranks: int) -> list[int]:
    """How many experts each rank of a group has: contiguous runs, as even as can be, larger ones first."""
    return [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]


@dataclasses.dataclass(frozen=True)
class Order:
    """Pairs sorted by expert: `pairs_M` and `places_NK` as in `rows`, `counts_E` pairs of each expert, `bounds_E1` where each expert's begin (and the end)."""

    pairs_M: Tensor
    places_NK: Tensor
    counts_E: Tensor
    bounds_E1: Tensor


def sort_pairs(experts_NK: Tensor, experts: int) -> Order:
    """Sort pairs by expert, those of one expert in the order of tokens: the same order whoever sorts. Waits for nothing."""
    return Order(*SORT_PAIRS(experts_NK, experts))


def invert(places_M: Tensor, size: int) -> Tensor:
    """int64 [size]: where in `places_M` each number from 0 to size - 1 stands, -1 where it does not. Negative places stand nowhere."""
    found = places_M.new_full((size + 1,), -1)
    # What stands nowhere is written behind the end.
    found.scatter_(0, torch.where(places_M < 0, size, places_M), torch.arange(places_M.shape[0], device=places_M.device))
    return found[:size]


class LocalFlight:
    """Rows that stay here."""

    dropped = None

    def __init__(self, x_ND: Tensor, weights_NK: Tensor, order: Order) -> None:
        self._weights_NK, self._order, self.counts_E = weights_NK, order, order.counts_E
        self._x_MD = PERMUTE(x_ND, order.pairs_M, order.places_NK)

    def arrive(self) -> Arrived:
        """See `Flight`."""
        return Arrived(self._x_MD, self.counts_E)

    def combine(self, y_MD: Tensor) -> Tensor:
        """See `Flight`."""
        return COMBINE(y_MD, self._weights_NK, self._order.pairs_M, self._order.places_NK)


class Local:
    """A permutation, and nothing leaves the rank."""

    capabilities = Capabilities(needs_host_sync=False, static_shapes=True, drops_tokens=False, traceable=True)

    def __init__(self, experts: int) -> None:
        self._experts = experts

    def start(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> LocalFlight:
        """See `Dispatcher`."""
        return LocalFlight(x_ND, weights_NK, sort_pairs(experts_NK, self._experts))

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Nothing was put off."""


def build(config: LocalConfig, experts: int, comm: Communicator) -> Local:
    """The entry's target."""
    if comm.size > 1:
        raise UsageError(
            f"The dispatcher `local` keeps tokens on their rank, but the {experts} experts are cut over {comm.size} ranks (mesh.ep). Choose parallel.dispatcher=all_to_all or "
            "fixed_capacity, or mesh.ep=1."
        )
    return Local(experts)
