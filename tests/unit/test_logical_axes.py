"""Logical axes and further losses: what a model may ask of the ranks that share its work, and what it may add to the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from intarsia import logical
from intarsia.comm import Communicator
from intarsia_testing.communicator import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def alone() -> Any:
    logical.reset()
    yield
    logical.reset()


def weight(value: float = 3.0) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_one_process_is_alone_on_every_axis() -> None:
    x = torch.ones(2)
    assert logical.sum(x, ("sequence", "batch")) is x and logical.ranks(("sequence", "batch")) == 1


def test_sums_and_their_gradients_are_over_the_ranks_of_the_axis() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
            ctx.comm = comm
            return comm.all_reduce(x.clone())

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            return ctx.comm.all_reduce(grads[0].clone()), None

    def work(comm: Communicator) -> tuple[float, float, int]:
        logical.install({"sequence": (lambda x: Sum.apply(x, comm), comm.size)})
        x = torch.tensor(float(comm.rank + 1), requires_grad=True)
        # Each rank makes something of its own of the sum.
        y = (comm.rank + 1) * logical.sum(x, ("sequence", "batch"))
        y.backward()
        assert x.grad is not None
        return float(y.detach()), float(x.grad), logical.ranks(("sequence", "batch"))

    assert run_ranks(3, work) == [(6.0, 6.0, 3), (12.0, 6.0, 3), (18.0, 6.0, 3)]
    assert logical.ranks(("sequence",)) in (1, 3)  # Threads that have installed nothing see what was installed last.


def test_a_further_loss_is_scaled_as_the_main_one_is() -> None:
    w = weight()
    with logical.micro_batch(0.25) as sums:
        x = logical.add_loss(w * 2, "balance", 5 * w)
        (x.sum() * 0.25).backward()
    assert w.grad == 0.25 * 2 + 0.25 * 5 and sums == {"balance": torch.tensor(15.0, dtype=torch.float64)}
    assert not sums["balance"].requires_grad


def test_a_recomputed_loss_counts_once_and_has_one_gradient() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        hidden = (x * w).sin()
        logical.record("calls", torch.ones(()))
        return logical.add_loss(hidden * hidden, "balance", (hidden * hidden).sum())

    found = []
    for recompute in (False, True):
        w, x = weight(), torch.arange(4.0, dtype=torch.float64)
        with logical.micro_batch(0.5) as sums:
            y = checkpoint(block, x, w, use_reentrant=False) if recompute else block(x, w)
            (y.sum() * 0.5).backward()
        found.append((w.grad, sums["balance"], sums["calls"]))
    assert found[0] == found[1] and found[0][2] == 1


def test_sums_of_several_layers_add_up_and_micro_batches_begin_anew() -> None:
    with logical.micro_batch(1.0) as outer:
        logical.record("load", torch.tensor(1.0))
        with logical.micro_batch(1.0) as inner:
            logical.record("load", torch.tensor(5.0))
        logical.record("load", torch.tensor(2.0))
    assert (outer["load"], inner["load"]) == (3.0, 5.0)


def test_outside_of_a_micro_batch_nothing_happens() -> None:
    w = weight()
    x = w * 2
    assert logical.add_loss(x, "balance", w) is x
    logical.record("load", w)
    with pytest.raises(ValueError, match="boom"), logical.micro_batch(1.0):
        raise ValueError("boom")
    assert logical.add_loss(x, "balance", w) is x


def test_without_gradients_a_loss_is_recorded_only() -> None:
    with logical.micro_batch(1.0) as sums, torch.no_grad():
        x = torch.ones(2)
        assert logical.add_loss(x, "balance", torch.tensor(4.0)) is x
    assert sums["balance"] == 4.0


def test_sums_are_completed_at_the_end_of_a_micro_batch() -> None:
    def double(sums: dict[str, Tensor]) -> None:
        for name in sums:
            sums[name] = sums[name] * 2

    logical.install({}, double)
    with logical.micro_batch(1.0) as sums:
        logical.record("load", torch.tensor(3.0))
    assert sums["load"] == 6.0
