"""Experts that were chosen once are chosen again: recorded by one pass, replayed by another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from intarsia.contracts import Batch
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_deepseek_v3.config import deepseek_v3, v3_router
from intarsia_eager.context import TrainContext
from intarsia_eager.engine import prepare
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_models_common.moe.config import routed_layers
from intarsia_models_common.moe.replay import recorded_routes
from intarsia_rl.algorithms.config import check_routes
from intarsia_testing.model import documents_of, fill, positions_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LENGTHS = ((5, 4), (2, 7))


@pytest.fixture
def model() -> Any:
    """Three layers, of which the first is dense, and a depth of prediction that chooses for itself."""
    config = deepseek_v3(
        dim=32, layers=3, dense_layers=1, dense_hidden=48, expert_hidden=16, shared_experts=1, vocab_size=96, max_positions=128, ahead=1,
        attention=MLAConfig(heads=2, kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=6), rope=RopeConfig(interleaved=True),
        router=v3_router(experts=8, top_k=3, groups=4, top_groups=2, scale=2.5, sequence_loss=0.0),
    )  # fmt: skip
    return fill(current().build(config), 3, 0.05)


def batch(**extra: Tensor) -> Batch:
    tokens_BS = torch.arange(18).view(2, 9) * 5 % 96
    return Batch(tokens_BS, tokens_BS.roll(-1, 1), positions_of(documents_of(LENGTHS)), documents_of(LENGTHS), LENGTHS, extra=dict(extra))


def run(model: Any, routes_BSLK: Tensor | None = None) -> tuple[Tensor, ...]:
    """Hidden states of the next token and of the depth."""
    extra = {} if routes_BSLK is None else {"routes_BSLK": routes_BSLK}
    local, context = prepare(batch(**extra), model.predicts_ahead, None, (None,))
    return model(local.tokens_BS, context)


def gradients(model: Any, outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    total = sum((each * torch.cos(torch.arange(each.numel()).view_as(each))).sum() for each in outputs)
    names = dict(model.named_parameters())
    found = torch.autograd.grad(total, list(names.values()), allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def test_own_choices_replayed_are_the_same_run_bit_for_bit(model):
    with recorded_routes() as routes:
        own = run(model)
    stacked_NLK = routes.stacked()
    assert stacked_NLK.shape == (18, 2, 3)  # neither the dense layer nor the depth of prediction is among them
    assert stacked_NLK.dtype == torch.int16
    again = run(model, stacked_NLK.view(2, 9, 2, 3))
    assert all(torch.equal(one, other) for one, other in zip(own, again, strict=True))
    mine, theirs = gradients(model, run(model)), gradients(model, again)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_other_choices_are_obeyed_and_their_weights_teach_the_router(model):
    forced_BSLK = torch.tensor([1, 6, 3], dtype=torch.int16).expand(2, 9, 2, 3).clone()
    forced_BSLK[0, :5] = -1  # the first document chooses for itself
    with recorded_routes() as routes:
        outputs = run(model, forced_BSLK)
    with recorded_routes() as own:
        plain = run(model)
    obeyed_BSLK, own_BSLK = routes.stacked().view(2, 9, 2, 3), own.stacked().view(2, 9, 2, 3)
    assert torch.equal(obeyed_BSLK[0, 5:], forced_BSLK[0, 5:]) and torch.equal(obeyed_BSLK[1], forced_BSLK[1])
    assert torch.equal(obeyed_BSLK[0, :5], own_BSLK[0, :5])
    torch.testing.assert_close(outputs[0][0, :5], plain[0][0, :5])
    assert not torch.allclose(outputs[0][1], plain[0][1], atol=1e-2)
    # Weights are the router's scores of the forced experts, normalised and scaled, with their gradient.
    router = model.layers[1].feed_forward.router
    x_ND = torch.randn(4, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    routed = router(x_ND, None, torch.tensor([[1, 6, 3]] * 4, dtype=torch.int16))
    scores = torch.sigmoid(x_ND.float() @ router.weight.t().float())[:, [1, 6, 3]]
    torch.testing.assert_close(routed.weights_NK, 2.5 * scores / scores.sum(-1, keepdim=True))
    (grad_ED,) = torch.autograd.grad(routed.weights_NK[:, 0].sum(), router.weight)
    assert set(grad_ED.abs().sum(-1).nonzero().flatten().tolist()) == {1, 3, 6}


def test_recomputation_replays_and_is_not_recorded_twice(model):
    forced_BSLK = torch.tensor([7, 0, 2], dtype=torch.int16).expand(2, 9, 2, 3).clone()
    plain = gradients(model, run(model, forced_BSLK))
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    with recorded_routes() as routes:
        outputs = run(model, forced_BSLK)
        with torch.no_grad():  # something else has run with other choices before the backward pass
            run(model)
        count = {number: len(each) for number, each in routes.layers.items()}
        again = gradients(model, outputs)
    assert {number: len(each) for number, each in routes.layers.items()} == count
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_compiled_layers_record_and_replay(model):
    layer = model.layers[1].feed_forward
    context = TrainContext(positions_of(documents_of(LENGTHS)), documents_of(LENGTHS), LENGTHS)
    x_BSD = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    with recorded_routes() as own, torch.no_grad():
        layer(x_BSD, context)
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        compiled(x_BSD, context)  # traced where nobody records
        with recorded_routes() as routes:
            compiled(x_BSD, context)
        assert torch.equal(routes.layers[0][0], own.layers[0][0])
        context.routes_BSLK = torch.tensor([5, 4, 0], dtype=torch.int16).expand(2, 9, 2, 3)
        with recorded_routes() as routes:
            compiled(x_BSD, context)
    assert routes.layers[0][0].unique(dim=0).tolist() == [[5, 4, 0]]


def test_parts_are_joined_in_order(model):
    """A prompt in two chunks, say: calls one after the other."""
    with recorded_routes() as routes, torch.no_grad():
        run(model)
        run(model)
    stacked_NLK = routes.stacked()
    assert stacked_NLK.shape == (36, 2, 3) and torch.equal(stacked_NLK[:18], stacked_NLK[18:])


def test_what_cannot_be_replayed_is_refused(model):
    with pytest.raises(UsageError, match="routes of 1 layers, and the model has more"):
        run(model, torch.zeros(2, 9, 1, 3, dtype=torch.int16))
    with pytest.raises(UsageError, match=r"routes of shape \(2, 9, 2\).*goes to 3 experts"):
        run(model, torch.zeros(2, 9, 2, 2, dtype=torch.int16))
    with recorded_routes() as routes:
        pass
    with pytest.raises(UsageError, match="has no routers"):
        routes.stacked()


def test_models_without_routers_are_refused_by_name(model):
    from intarsia_llama3.config import debug

    assert routed_layers(model.config) == check_routes(model.config) == 2
    with pytest.raises(UsageError, match=r"Llama3 has no layer that chooses experts.*replay_routes=False"):
        check_routes(debug())
