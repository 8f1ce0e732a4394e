"""Autograd's collectives against what they say: forward, and backward as the exact adjoint, with uneven and empty parts."""

from __future__ import annotations

import pytest
import torch
from intarsia.errors import UsageError
from intarsia.layout import Member
from intarsia_parallel import collectives
from intarsia_parallel.cuts import EvenCut
from intarsia_placements.layouts import check_partition
from intarsia_testing.communicator import run_ranks

SHAPES = [((2, 7, 3), 1), ((1, 2, 3), 1), ((5, 2), 0), ((2, 4), -1)]


@pytest.mark.parametrize(("n", "ranks", "counts"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (6, 3, [2, 2, 2])])
def test_even_counts(n, ranks, counts):
    assert collectives.even_counts(n, ranks) == counts


def _adjoint(forward, size, inputs, weights):
    """Whether sum over ranks of <w_r, f(x)_r> has the gradients that differences give: x -> f(x) is linear, so one random direction is enough."""

    def work(comm):
        x = inputs[comm.rank].clone().requires_grad_()
        y = forward(x, comm)
        (y * weights(comm.rank, y)).sum().backward()
        return y.detach(), x.grad

    results = run_ranks(size, work)
    directions = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5 + r), dtype=x.dtype) for r, x in enumerate(inputs)]
    moved = run_ranks(size, lambda comm: forward(directions[comm.rank], comm))
    by_values = sum(float((weights(r, y) * y).sum()) for r, y in enumerate(moved))
    by_gradients = sum(float((grad * d).sum()) for (_, grad), d in zip(results, directions, strict=True))
    assert by_gradients == pytest.approx(by_values, rel=1e-9, abs=1e-9)
    return [y for y, _ in results]


def _weights(rank, y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + rank), dtype=y.dtype)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("size", [2, 4])
def test_gather_and_scatter_sum_are_each_others_adjoints(shape, dim, size):
    counts = collectives.even_counts(shape[dim], size)
    whole = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gathered = _adjoint(lambda x, comm: collectives.gather(x, dim, counts, comm), size, list(whole.split(counts, dim)), _weights)
    assert all(torch.equal(y, whole) for y in gathered)
    partial = [torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    parts = _adjoint(lambda x, comm: collectives.scatter_sum(x, dim, counts, comm), size, partial, _weights)
    assert torch.allclose(torch.cat(parts, dim), torch.stack(partial).sum(0))


def test_sum_both_is_its_own_adjoint_and_the_halves_are_one_way():
    inputs = [torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    total = torch.stack(inputs).sum(0)
    assert all(torch.allclose(y, total) for y in _adjoint(collectives.sum_both, 3, inputs, _weights))

    def work(comm):
        x, y = (inputs[comm.rank].clone().requires_grad_() for _ in range(2))
        summed, same = collectives.sum_forward(x, comm), collectives.sum_backward(y, comm)
        (summed.sum() * 2 + (same * (comm.rank + 1)).sum()).backward()
        return summed.detach(), same.detach(), x.grad, y.grad

    for rank, (summed, same, of_sum, of_same) in enumerate(run_ranks(3, work)):
        assert torch.allclose(summed, total) and torch.equal(same, inputs[rank])
        assert torch.equal(of_sum, torch.full((3,), 2.0, dtype=torch.float64))
        assert torch.equal(of_same, torch.full((3,), 6.0, dtype=torch.float64))


def test_gather_replicated_gives_back_the_own_part():
    whole = torch.arange(10.0).view(2, 5)

    def work(comm):
        x = whole.split([3, 2], 1)[comm.rank].clone().requires_grad_()
        y = collectives.gather_replicated(x, 1, [3, 2], comm)
        (y * whole).sum().backward()
        return torch.equal(y, whole), torch.equal(x.grad, whole.split([3, 2], 1)[comm.rank])

    assert run_ranks(2, work) == [(True, True)] * 2


def test_exchange_moves_rows_and_brings_gradients_back():
    sends = [[1, 2, 0], [0, 0, 3], [2, 0, 1]]
    inputs = [torch.arange(sum(row) * 2, dtype=torch.float64).view(-1, 2) + 100 * r for r, row in enumerate(sends)]

    def forward(x, comm):
        return collectives.exchange(x, sends[comm.rank], [row[comm.rank] for row in sends], comm)

    received = _adjoint(forward, 3, inputs, _weights)
    assert torch.equal(received[0], torch.cat([inputs[0][:1], inputs[2][:2]]))
    assert torch.equal(received[1], inputs[0][1:3])


def test_a_group_of_one_is_the_identity():
    def work(comm):
        x = torch.ones(2, 3)
        made = [collectives.gather(x, 1, [3], comm), collectives.scatter_sum(x, 1, [3], comm), collectives.sum_both(x, comm)]
        return all(each is x for each in (*made, collectives.exchange(x, [2], [2], comm)))

    assert run_ranks(1, work) == [True]


def test_even_cut_partitions_in_units():
    member = Member("w", (10, 4))
    partition = EvenCut(0, 3).partition([member], 3)
    check_partition(partition, "even cut")
    assert [region[0].size for region in partition.regions[0]] == [(6, 4), (3, 4), (1, 4)]
    assert EvenCut(1, 2).counts(5, 2) == [4, 1]
    with pytest.raises(UsageError, match="begins a part at 5, inside a tile of 4"):
        EvenCut(0).partition([Member("w", (10, 4), tile=(4, 4))], 2)
    with pytest.raises(UsageError, match="no dimension 2"):
        EvenCut(2).partition([member], 2)
