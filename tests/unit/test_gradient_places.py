"""Gradients of weights are written where they are wanted, and are the same bits as elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from intarsia.ops import gradients
from intarsia_kernels.linear import onednn, placed
from intarsia_kernels.linear.weights import scaled_gradient
from torch import Tensor, nn

Linear = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def no_places() -> Iterator[None]:
    yield
    gradients._places.clear()


class Two(nn.Module):
    """Two matrices, the first of which is used once or twice."""

    def __init__(self, linear: Linear, times: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(6, 6, generator=drawn).to(dtype)) for _ in range(2))
        self.linear, self.times = linear, times
        gradients.mark(self.first)
        gradients.mark(self.second)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x, self.first).relu()
        return self.linear(x, self.second)


def places_of(model: Two) -> tuple[Tensor, list[Tensor]]:
    """A pack, and the two gradients' places in it, offered."""
    pack = torch.full((128 + 36 + 4,), 7.0, dtype=model.first.dtype)
    views = [pack[64:100].view(6, 6), pack[128:164].view(6, 6)]
    for weight, view in zip(model.parameters(), views, strict=True):
        gradients.offer(weight, view)
    return pack, views


def found(model: Two, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)).to(model.first.dtype)
    (run or model)(x).square().sum().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def lies_in(gradient: Tensor, view: Tensor) -> bool:
    return gradient.data_ptr() == view.data_ptr() and gradient.shape == view.shape and gradient.stride() == view.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_lie_in_their_places_with_the_bits_of_torch(dtype: torch.dtype) -> None:
    expected = found(Two(F.linear, dtype=dtype))
    model = Two(placed.linear, dtype=dtype)
    pack, views = places_of(model)
    results = found(model)
    assert all(map(torch.equal, results, expected))
    assert all(map(lies_in, results, views))
    assert pack[[0, 63, 100, 127, 164, 167]].eq(7).all()
    assert not gradients._places


@pytest.mark.parametrize("linear", [placed.linear, onednn.linear])
def test_compiled_gradients_lie_in_their_places(linear: Linear) -> None:
    if linear is onednn.linear and not torch.backends.mkldnn.is_available():
        linear = placed.linear
    model = Two(linear)
    run = torch.compile(model.forward, fullgraph=linear is placed.linear) if linear is placed.linear else model.forward
    expected = found(Two(F.linear))
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = None
        _, views = places_of(model)
        results = found(model, run)
        assert all(map(lies_in, results, views))
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_used_twice_has_the_sum_of_its_gradients() -> None:
    expected = found(Two(F.linear, times=2))
    model = Two(placed.linear, times=2)
    _, views = places_of(model)
    results = found(model)
    assert all(map(torch.equal, results, expected))
    assert lies_in(results[1], views[1])


def test_gradients_are_added_to_what_is_there() -> None:
    plain, model = Two(F.linear), Two(placed.linear)
    _, views = places_of(model)
    found(model)
    _, again = places_of(model)  # Of a pass that adds: its own results are not what is left.
    results = found(model)
    found(plain)
    assert all(map(torch.equal, results, found(plain)))
    assert all(map(lies_in, results, views)) or not any(map(lies_in, results, again))


def test_no_place_is_taken_where_none_fits() -> None:
    model = Two(placed.linear)
    gradients.offer(model.first, torch.empty(6, 6, dtype=torch.bfloat16))  # Another dtype than the gradient has.
    view = torch.zeros(6, 6)
    gradients.offer(model.second, view)
    gradients.withdraw(model.second)
    unaligned = torch.zeros(64)[1:37].view(6, 6)
    gradients.offer(model.second, unaligned)
    assert all(map(torch.equal, found(model), found(Two(F.linear))))
    assert view.eq(0).all() and unaligned.eq(0).all()


def test_a_gradient_that_is_itself_differentiated_is_a_tensor_of_its_own() -> None:
    def twice(model: Two) -> list[Tensor]:
        x = torch.ones(3, 6)
        first = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), list(model.parameters())))

    model = Two(placed.linear)
    _, views = places_of(model)
    assert all(map(torch.equal, twice(model), twice(Two(F.linear))))
    assert all(view.eq(7).all() for view in views) or not gradients._places


def test_what_is_not_marked_costs_nothing() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    y = placed.linear(torch.ones(2, 4), weight)
    assert "Placed" not in type(y.grad_fn).__name__ and "_Linear" not in type(y.grad_fn).__name__


def test_a_scaled_sum_goes_to_its_place() -> None:
    weight, total = torch.zeros(4, 3, dtype=torch.bfloat16), torch.randn(4, 3)
    view = torch.zeros(12, dtype=torch.bfloat16).view(4, 3)
    scale = torch.tensor(0.25)
    with torch.no_grad():
        expected = scaled_gradient(total, scale, weight)
        gradients.offer(weight, view)
        result = scaled_gradient(total, scale, weight)
    assert lies_in(result, view) and torch.equal(view, expected) and torch.equal(expected, (total * scale).bfloat16())
