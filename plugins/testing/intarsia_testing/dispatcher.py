"""Conformance of dispatchers. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestMine(DispatcherConformance):
        entry = "my-distribution:mine"

Ranks are threads by default (`ranks` says how many, one group after the other); a dispatcher that needs processes or a device overrides `run_ranks`. The judge is a sum over tokens
and their experts, each expert being a vector that a row is multiplied by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from intarsia.comm import Communicator
from intarsia.plugins import current
from intarsia_models_common.moe.dispatch import Capabilities, Dispatcher, experts_of
from torch import Tensor

from intarsia_testing.base import Conformance
from intarsia_testing.communicator import run_ranks
from intarsia_testing.kernel import poisoned
from intarsia_testing.promise import keep

DIM = 16


@dataclasses.dataclass(frozen=True)
class Routing:
    """Experts of each rank's tokens: `experts_NK[rank]`, out of `experts`."""

    label: str
    experts: int
    experts_NK: tuple[Tensor, ...]


def routings(ranks: int) -> list[Routing]:
    """Random ones, and those that go wrong: everything to one expert's rank, experts and ranks without tokens, experts that cannot be shared out evenly, one choice for each token."""

    def random(tokens: int, k: int, experts: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(tokens, experts, generator=generator).topk(k, -1).indices

    eight = 2 * max(4, ranks)
    few = torch.arange(2).expand(9, 2)
    return [
        Routing("random", eight, tuple(random(9, 2, eight, rank) for rank in range(ranks))),
        Routing("every token to the first two experts", eight, (few,) * ranks),
        Routing("every token to the last two experts", eight, (few + eight - 2,) * ranks),
        Routing(
            "ranks of different sizes, some empty", eight, tuple(random((rank % 2) * (9 - rank), 2, eight, rank) for rank in range(ranks))
        ),
        Routing("no tokens at all", eight, (torch.empty(0, 2, dtype=torch.int64),) * ranks),
        Routing("one expert more than can be shared evenly", eight + 1, tuple(random(9, 3, eight + 1, rank) for rank in range(ranks))),
        Routing("one expert for each token", eight, tuple(random(9, 1, eight, rank) for rank in range(ranks))),
    ]


@dataclasses.dataclass
class Seen:
    """What one rank saw."""

    y_ND: Tensor
    grad_x_ND: Tensor
    grad_weights_NK: Tensor
    grad_factors_eD: Tensor
    counts_E: Tensor
    dropped: int
    rows: int
    sorted: bool


class DispatcherConformance(Conformance):
    """Every promise of a dispatcher, one test each. Settings under test must not drop: capacity enough for every routing."""

    kind: ClassVar[str] = "dispatcher"
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 4)
    tolerance: ClassVar[float] = 1e-5
    """Relative: larger for a dispatcher that quantises."""

    def run_ranks(self, size: int, work: Callable[[Communicator], Any]) -> list[Any]:
        """`work` on each of `size` ranks at once."""
        return run_ranks(size, work)

    def _dispatcher(self, config: Any, experts: int, comm: Communicator) -> Any:
        return current().build(config, experts, comm)

    # ------------------------------------------------------------ help

    def _inputs(self, routing: Routing, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 + rank)
        tokens, k = routing.experts_NK[rank].shape
        return torch.randn(tokens, DIM, generator=generator), torch.rand(tokens, k, generator=generator)

    def _factors(self, experts: int) -> Tensor:
        return torch.randn(experts, DIM, generator=torch.Generator().manual_seed(7))

    def _pass(self, dispatcher: Any, routing: Routing, comm: Communicator) -> Seen:
        """Forward and backward on one rank, experts spoiling the rows that nobody reads."""
        x_ND, weights_NK = (tensor.requires_grad_() for tensor in self._inputs(routing, comm.rank))
        factors_eD = self._factors(routing.experts).split(experts_of(routing.experts, comm.size))[comm.rank].clone().requires_grad_()
        flight = dispatcher.start(x_ND, routing.experts_NK[comm.rank], weights_NK)
        arrived = flight.arrive()
        total, rows = int(arrived.counts_e.sum()), arrived.x_MD.shape[0]
        is_sorted = arrived.counts_e.shape == (factors_eD.shape[0],) and total <= rows
        spread_MD = factors_eD.repeat_interleave(arrived.counts_e, 0)
        tail_MD = arrived.x_MD.new_full((rows - total, DIM), torch.nan)
        y_ND = flight.combine(torch.cat([arrived.x_MD[:total] * spread_MD, tail_MD]))
        wave_ND = torch.cos(torch.arange(y_ND.numel(), dtype=y_ND.dtype) * 0.7).view(y_ND.shape)
        grads = torch.autograd.grad(y_ND, (x_ND, weights_NK, factors_eD), wave_ND, allow_unused=True)
        grad_x, grad_weights, grad_factors = (
            torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip((x_ND, weights_NK, factors_eD), grads, strict=True)
        )
        dropped = 0 if flight.dropped is None else int(flight.dropped)
        return Seen(y_ND.detach(), grad_x, grad_weights, grad_factors, flight.counts_E, dropped, rows, is_sorted)

    def _all(self, config: Any, routing: Routing, size: int) -> list[Seen]:
        return self.run_ranks(size, lambda comm: self._pass(self._dispatcher(config, routing.experts, comm), routing, comm))

    def _check(self, routing: Routing, size: int, seen: list[Seen]) -> None:
        where = f"{routing.label}, {size} ranks"
        factors_ED = self._factors(routing.experts).requires_grad_()
        for rank, mine in enumerate(seen):
            x_ND, weights_NK = (tensor.requires_grad_() for tensor in self._inputs(routing, rank))
            chosen_NK = routing.experts_NK[rank]
            wanted = torch.einsum("nk,nd,nkd->nd", weights_NK, x_ND, factors_ED[chosen_NK])
            wave_ND = torch.cos(torch.arange(wanted.numel(), dtype=wanted.dtype) * 0.7).view(wanted.shape)
            keep(
                "sorted",
                mine.sorted,
                f"{where}: rank {rank}'s `counts_e` has another length than its experts, or counts more rows than there are.",
            )
            grad_x, grad_weights = torch.autograd.grad(wanted, (x_ND, weights_NK), wave_ND, retain_graph=True)
            wanted.backward(wave_ND)
            pairs = (
                ("the output", mine.y_ND, wanted.detach()),
                ("x's gradient", mine.grad_x_ND, grad_x),
                ("the weights' gradient", mine.grad_weights_NK, grad_weights),
            )
            for name, found, exact in pairs:
                self._close(f"{where}: {name} of rank {rank}", found, exact)
            counts_E = torch.bincount(chosen_NK.flatten(), minlength=routing.experts)
            keep(
                "counts",
                torch.equal(mine.counts_E.cpu(), counts_E),
                f"{where}: `counts_E` of rank {rank} is {mine.counts_E.tolist()}, and its pairs chose {counts_E.tolist()}.",
            )
            keep("nothing dropped", mine.dropped == 0, f"{where}: rank {rank} dropped {mine.dropped} pairs, though there is room.")
        grad_ED = factors_ED.grad if factors_ED.grad is not None else torch.zeros_like(factors_ED)
        self._close(f"{where}: the gradient of the experts", torch.cat([mine.grad_factors_eD for mine in seen]), grad_ED)

    def _close(self, what: str, found: Tensor, exact: Tensor) -> None:
        keep("shape", found.shape == exact.shape, f"{what} has the shape {tuple(found.shape)}, not {tuple(exact.shape)}.")
        if not exact.numel():
            return
        keep("finite", found.isfinite().all(), f"{what} is not finite: rows of the tail, or memory that nobody wrote, were read.")
        error = float((found - exact).abs().max()) / max(float(exact.abs().max()), 1e-12)
        keep("equals one process", error <= self.tolerance, f"{what} is off by {error:.1e} from a sum over tokens and experts.")

    # ------------------------------------------------------------ promises

    def test_equals_one_process(self) -> None:
        """Outputs and all gradients, for every routing and group size, with unwritten memory full of NaN."""
        for config in self.given_configs():
            for size in self.ranks:
                for routing in routings(size):
                    with poisoned():
                        seen = self._all(config, routing, size)
                    self._check(routing, size, seen)

    def test_passes_follow_each_other(self) -> None:
        """One dispatcher serves pass after pass: nothing of one is left in the next."""
        for config in self.given_configs():
            for size in self.ranks:
                chosen = [
                    routing for routing in routings(size) if routing.experts == 2 * max(4, size) and routing.experts_NK[0].shape[-1] == 2
                ]

                def work(comm: Communicator, config: Any = config, chosen: list[Routing] = chosen) -> list[Seen]:
                    dispatcher = self._dispatcher(config, chosen[0].experts, comm)
                    return [self._pass(dispatcher, routing, comm) for routing in chosen]

                results = self.run_ranks(size, work)
                for number, routing in enumerate(chosen):
                    self._check(routing, size, [result[number] for result in results])

    def test_capabilities_are_kept(self) -> None:
        """It is a Dispatcher, says what it can, and has static shapes where it says so; every rank may end a step."""
        for config in self.given_configs():
            for size in self.ranks:
                first, second, third = routings(size)[:3]

                def work(comm: Communicator, config: Any = config, chosen: tuple[Routing, ...] = (first, second, third)) -> Any:
                    dispatcher = self._dispatcher(config, chosen[0].experts, comm)
                    rows = [self._pass(dispatcher, routing, comm).rows for routing in chosen]
                    dispatcher.reduce(comm.all_reduce)
                    return isinstance(dispatcher, Dispatcher), dispatcher.capabilities, rows

                for fits, able, rows in self.run_ranks(size, work):
                    keep(
                        "contract",
                        fits and isinstance(able, Capabilities),
                        "it has not all of `capabilities` (Capabilities), `start` and `reduce`.",
                    )
                    keep(
                        "static shapes",
                        not able.static_shapes or len(set(rows)) == 1,
                        f"it declares static_shapes, and as many tokens gave {rows} rows.",
                    )
                    captured = able.needs_host_sync or able.static_shapes
                    keep("capabilities", captured, "without a host sync nobody knows how many rows arrive, so that shapes must be static.")
