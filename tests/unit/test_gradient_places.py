"""Gradients of weights are written where they are wanted, and are the same bits as elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from intarsia.ops import gradients
from intarsia_kernels.linear import onednn, placed
from torch import Tensor, nn

Linear = Callable[..., Tensor]


KEPT: list[gradients.Place] = []
"""Places are offered as long as somebody keeps them."""


@pytest.fixture(autouse=True)
def no_places() -> Iterator[None]:
    yield
    KEPT.clear()


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
        KEPT.append(gradients.Place(view))
        gradients.offer(weight, KEPT[-1])
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


def again_and_again(model: Two, run: Callable[[Tensor], Tensor]) -> None:
    expected = found(Two(F.linear))
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = None
        _, views = places_of(model)
        results = found(model, run)
        assert all(map(lies_in, results, views))
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


def test_compiled_gradients_lie_in_their_places() -> None:
    model = Two(placed.linear)
    again_and_again(model, torch.compile(model.forward, fullgraph=True))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_gradients_of_onednn_lie_in_their_places() -> None:
    model = Two(onednn.linear)
    again_and_again(model, model)


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
    for weight in model.parameters():
        gradients.withdraw(weight)
    results = found(model)
    found(plain)
    assert all(map(torch.equal, results, found(plain)))
    assert all(map(lies_in, results, views))


@pytest.mark.parametrize(
    "place",
    [
        gradients.Place(torch.zeros(6, 6, dtype=torch.bfloat16)),
        gradients.Place(torch.zeros(4, 6)),
        gradients.Place(),
    ],
    ids=["another dtype", "another shape", "only counted"],
)
def test_no_place_is_taken_that_does_not_fit(place: gradients.Place) -> None:
    model = Two(placed.linear)
    gradients.offer(model.first, place)
    assert all(map(torch.equal, found(model), found(Two(F.linear))))
    assert place.takes == 1 and (place.tensor is None or place.tensor.eq(0).all())


def test_no_place_is_taken_that_was_withdrawn() -> None:
    model, place = Two(placed.linear), gradients.Place(torch.zeros(6, 6))
    gradients.offer(model.first, place)
    gradients.withdraw(model.first)
    assert all(map(torch.equal, found(model), found(Two(F.linear))))
    assert place.takes == 0 and place.tensor is not None and place.tensor.eq(0).all()


def test_a_gradient_that_is_itself_differentiated_is_a_tensor_of_its_own() -> None:
    def twice(model: Two, views: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(model(torch.ones(3, 6)).square().sum(), list(model.parameters()), create_graph=True)
        assert all(view.eq(7).all() for view in views)
        KEPT.clear()
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), list(model.parameters())))

    model = Two(placed.linear)
    _, views = places_of(model)
    assert all(map(torch.equal, twice(model, views), twice(Two(F.linear), [])))


def test_what_is_not_marked_costs_nothing() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    assert "_Placed" not in type(placed.linear(torch.ones(2, 4), weight).grad_fn).__name__
    gradients.mark(weight)
    assert "_Placed" in type(placed.linear(torch.ones(2, 4), weight).grad_fn).__name__
    assert placed.linear(torch.ones(2, 4), weight.detach()).grad_fn is None


def test_autocast_and_transforms_of_functions_go_as_they_do_with_torch() -> None:
    model, plain = Two(placed.linear), Two(F.linear)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, found(model), found(plain)))
    x, weight = torch.ones(2, 3, 4), nn.Parameter(torch.eye(4))
    gradients.mark(weight)
    for linear in (placed.linear, F.linear):
        got = torch.func.grad(lambda w, linear=linear: linear(x, w).square().sum())(weight)
        torch.testing.assert_close(got, torch.full((4, 4), 12.0))


def test_a_place_that_nobody_keeps_is_offered_no_more() -> None:
    weight = torch.zeros(4, 4)
    place = gradients.Place(torch.zeros(4, 4))
    gradients.offer(weight, place)
    assert gradients.take(weight, (4, 4), torch.float32) is not None
    del place
    assert gradients.take(weight, (4, 4), torch.float32) is None
