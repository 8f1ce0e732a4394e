"""The mixture of experts on one process against a loop over tokens: choices, weights, gradients, what is counted, and tails full of NaN."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from intarsia import logical, ops
from intarsia.errors import UsageError
from intarsia_float8.format import dequantise, quantise
from intarsia_models_common.build import Scope
from intarsia_models_common.config import SwiGLUConfig
from intarsia_models_common.moe import balance
from intarsia_models_common.moe.balance import Sequences
from intarsia_models_common.moe.block import MoE
from intarsia_models_common.moe.config import (
    ForcedBalancedRouterConfig,
    GroupLimitedRouterConfig,
    MoEConfig,
    RouterConfig,
    SigmoidRouterConfig,
    SoftmaxRouterConfig,
)
from intarsia_models_common.moe.dispatch import Capabilities, Local, invert, sort_pairs
from intarsia_models_common.moe.operators import (
    COMBINE,
    EXPERT_COUNTS,
    GROUPED_LINEAR,
    GROUPED_SWIGLU,
    PERMUTE,
    SCALED_GROUPED_LINEAR,
)
from intarsia_models_common.moe.router import Router, label_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SCOPE = Scope(name="layers.3.feed_forward", dim=12, layer=3, layers=4, rope_interleaved=False, std=0.3, output_std=0.2)


def fill(module: nn.Module, seed: int = 0) -> Any:
    """Draw every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module


def moe(router: RouterConfig, hidden: int = 10, shared: int | None = 7) -> MoE:
    config = MoEConfig(router=router, hidden=hidden, shared=None if shared is None else SwiGLUConfig(hidden=shared))
    return fill(MoE(config, SCOPE))


def dense(layer: MoE, x_BSD: Tensor) -> Tensor:
    """The layer by a loop over tokens and chosen experts."""
    x_ND, experts = x_BSD.flatten(0, -2), layer.experts
    routed = layer.router(x_ND)
    rows = []
    for n in range(x_ND.shape[0]):
        total = torch.zeros(x_ND.shape[1], dtype=x_ND.dtype)
        for weight, e in zip(routed.weights_NK[n], routed.experts_NK[n].tolist(), strict=True):
            total = total + weight * (experts.w2[e] @ (F.silu(experts.w1[e] @ x_ND[n]) * (experts.w3[e] @ x_ND[n])))
        rows.append(total)
    y_BSD = torch.stack(rows).view(x_BSD.shape) if rows else torch.zeros_like(x_BSD)
    return y_BSD if layer.shared is None else y_BSD + layer.shared(x_BSD)


def gradients(layer: MoE, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    wave = torch.cos(torch.arange(y.numel()) * 0.7).view(y.shape)
    names = ["x", *dict(layer.named_parameters())]
    found = torch.autograd.grad(y, [x, *layer.parameters()], wave, allow_unused=True)
    return {name: torch.zeros(1) if grad is None else grad for name, grad in zip(names, found, strict=True)}


ROUTERS = [
    SoftmaxRouterConfig(experts=8, top_k=2),
    SoftmaxRouterConfig(experts=8, top_k=3, norm_topk=False),
    SigmoidRouterConfig(experts=8, top_k=2, scale=2.5, bias_rate=0.01),
    GroupLimitedRouterConfig(experts=8, top_k=2, groups=4, top_groups=2, scale=2.5, bias_rate=0.001),
    GroupLimitedRouterConfig(experts=8, top_k=1, groups=4, top_groups=1, scoring="softmax", group_score="max", norm_topk=False),
    ForcedBalancedRouterConfig(experts=8, top_k=2),
    SoftmaxRouterConfig(experts=1, top_k=1),
]


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: f"{type(router).__name__}-{router.top_k}")
@pytest.mark.parametrize("shape", [(2, 9, 12), (1, 1, 12), (2, 0, 12)])
def test_equals_a_loop(router: RouterConfig, shape: tuple[int, ...]) -> None:
    layer = moe(router)
    if layer.router.bias is not None:
        layer.router.bias.copy_(torch.linspace(-0.3, 0.3, router.experts))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found, wanted = layer(x), dense(layer, x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    if not x.numel():
        assert all(not grad.any() for grad in gradients(layer, found, x).values())
        return
    for (name, one), other in zip(gradients(layer, found, x).items(), gradients(layer, wanted, x).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_group_limited_choice_by_hand() -> None:
    """Groups are contiguous, their worth is the sum of the two largest biased scores; the weight is the score without bias; a negative biased score is still better than a masked one."""
    router = fill(
        MoE(MoEConfig(router=GroupLimitedRouterConfig(experts=6, top_k=2, groups=3, top_groups=1, bias_rate=0.0), hidden=4), SCOPE)
    ).router
    router.bias.copy_(torch.tensor([-3.0, -3.0, -2.0, -2.0, 0.0, -4.0]))
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2, 0.9, 0.9]])
    # Sums: -4.3, -3.7, -2.2; group 2 wins with 0.9 and -3.1, though every biased score of group 1 beats the second.
    assert sorted(router.choose(scores + router.bias)[0].tolist()) == [4, 5]
    router.score = lambda logits: scores  # type: ignore[method-assign]
    torch.testing.assert_close(router(torch.zeros(1, 12)).weights_NK, torch.tensor([[0.5, 0.5]]))


def test_the_router_stays_float32() -> None:
    layer = moe(SoftmaxRouterConfig(experts=8, top_k=2))
    x_ND = torch.randn(5, 12).bfloat16()
    assert "weight" in type(layer.router).keeps_float32
    routed = layer.router(x_ND)
    torch.testing.assert_close(routed.scores_NE, torch.softmax(x_ND.float() @ layer.router.weight.t(), -1))
    assert routed.weights_NK.dtype == torch.float32
    for name, parameter in layer.named_parameters():
        if not name.startswith("router"):
            parameter.data = parameter.data.bfloat16()
    assert layer(x_ND[None]).dtype == torch.bfloat16


# ---------------------------------------------------------------- counts


def run_step(layer: MoE, batches: list[Tensor], recompute: bool) -> None:
    for x in batches:
        with logical.micro_batch(1.0):
            # What follows keeps recomputation from ending before the layer does.
            y = checkpoint(lambda x: layer(x).sin(), x, use_reentrant=False) if recompute else layer(x).sin()
            y.square().sum().backward()
    for state in (layer, layer.router):
        state.reduce(lambda tensor: tensor)
    for state in (layer, layer.router):
        state.commit()


def test_counts_once_whatever_accumulation_and_recomputation_do() -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(2, 8, 12, generator=generator, requires_grad=True) for _ in range(4)]
    loads, biases = [], []
    for recompute, cut in itertools.product((False, True), (1, 2)):
        layer = moe(SigmoidRouterConfig(experts=8, top_k=2, bias_rate=0.01))
        layer.eval()
        with torch.no_grad():
            layer(batches[0])
        layer.train()
        for step in (batches[:2], batches[2:]):
            run_step(layer, [part for batch in step for part in batch.detach().requires_grad_().chunk(cut)], recompute)
        loads.append(layer.router.load_E)
        biases.append(layer.router.bias)
        assert layer.router.load_E[:8].sum() == 2 * 16 * 2 and layer.router.load_E[8] == 32
        assert not layer.router.counters.any()
    for load, bias in zip(loads[1:], biases[1:], strict=True):
        torch.testing.assert_close(load, loads[0])
        assert torch.equal(bias, biases[0])
    assert biases[0].abs().max() > 0


def test_bias_moves_against_the_load() -> None:
    router = moe(SigmoidRouterConfig(experts=4, top_k=1, bias_rate=0.5)).router
    router.counters[:4] = torch.tensor([4.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    router.reduce(lambda tensor: tensor)
    router.commit()
    assert router.bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert "bias" in router.state_dict() and "counters" not in router.state_dict()


def test_jitter_is_replayed_and_off_in_evaluation() -> None:
    layer = moe(SoftmaxRouterConfig(experts=8, top_k=2, jitter=0.3))
    x = torch.randn(2, 8, 12)
    assert torch.equal(layer.eval()(x), layer(x))
    layer.train()
    one, two = layer(x), layer(x)
    assert not torch.equal(one, two)
    torch.manual_seed(5)
    plain = gradients(layer, layer(x.requires_grad_()), x)
    torch.manual_seed(5)
    again = gradients(layer, checkpoint(layer, x, use_reentrant=False), x)
    for name in plain:
        assert torch.equal(plain[name], again[name]), name


# ---------------------------------------------------------------- losses


def test_losses_by_hand_and_their_gradients() -> None:
    """Each loss is what its formula says, is recorded once, and reaches the router's weight with the micro-batch's scale."""
    x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])

    class Context:
        documents_BS = documents

    def by_hand(layer: MoE) -> dict[str, Tensor]:
        logits = x.flatten(0, 1) @ layer.router.weight.t()
        scores = torch.sigmoid(logits)
        p = scores / scores.sum(-1, keepdim=True)
        chosen = F.one_hot(layer.router(x.flatten(0, 1)).experts_NK, 8).sum(1).double()

        def one(which: Tensor) -> Tensor:
            tokens = which.sum()
            return tokens * 8 * ((chosen[which].sum(0) / (2 * tokens)) * p[which].mean(0)).sum()

        rows = torch.arange(12) // 6
        parts = rows * 3 + documents.flatten()
        return {
            "balance_loss": one(torch.ones(12, dtype=torch.bool)),
            "row": sum(one(rows == r) for r in range(2)),  # type: ignore[misc]
            "document": sum(one(parts == d) for d in parts.unique()),  # type: ignore[misc]
            "z_loss": torch.logsumexp(logits, -1).square().sum(),
        }

    for field, name, extra in (
        ("balance_loss", "balance_loss", {}),
        ("sequence_loss", "row", {}),
        ("sequence_loss", "document", {"sequence": "document"}),
        ("z_loss", "z_loss", {}),
    ):
        layer = moe(SigmoidRouterConfig(experts=8, top_k=2, **{field: 0.25}, **extra))
        wanted = 0.25 * by_hand(layer)[name]
        (grad,) = torch.autograd.grad(0.5 * wanted, layer.router.weight)
        with logical.micro_batch(0.5) as sums:
            (checkpoint(layer, x.requires_grad_(), Context(), use_reentrant=False) * 0).sum().backward()
        assert list(sums) == [f"moe.3.{field}"]
        torch.testing.assert_close(sums[f"moe.3.{field}"].double(), wanted.detach().double(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.router.weight.grad.double(), grad.double(), rtol=1e-4, atol=1e-6)


def test_balanced_is_the_losses_least_value() -> None:
    p = torch.full((16, 4), 0.25)
    experts = torch.arange(32).view(16, 2) % 4
    assert float(balance.balance_loss(p, experts)) == pytest.approx(16.0)
    assert float(balance.sequence_loss(p, experts, Sequences(2))) == pytest.approx(16.0)


# ---------------------------------------------------------------- operators


def test_tails_are_never_read() -> None:
    """NaN in unwritten rows spreads neither forward nor backward; groups without rows are ordinary."""
    counts = torch.tensor([0, 3, 0, 4, 0])
    x = torch.randn(10, 6)
    x[7:] = torch.nan
    weight = torch.randn(5, 4, 6, requires_grad=True)
    x.requires_grad_()
    y = GROUPED_LINEAR(x, weight, counts)
    assert not y[7:].any() and y.isfinite().all()
    cotangent = torch.ones(10, 4)
    cotangent[7:] = torch.nan
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), cotangent)
    assert grad_x.isfinite().all() and not grad_x[7:].any()
    assert not grad_weight[[0, 2, 4]].any()
    torch.testing.assert_close(grad_weight[1], cotangent[:3].t() @ x[:3].detach())
    torch.testing.assert_close(grad_weight[3], cotangent[3:7].t() @ x[3:7].detach())
    (grad_x,) = torch.autograd.grad(GROUPED_LINEAR(x, weight, counts)[:7].sum(), x)  # an expanded gradient
    assert grad_x.isfinite().all()
    with pytest.raises(ValueError, match="11 rows"):
        GROUPED_LINEAR(x, weight, torch.tensor([0, 3, 0, 8, 0]))


def test_permute_and_combine_with_drops() -> None:
    pairs = torch.tensor([4, 0, 3, -1, -1])
    places = invert(pairs, 6).view(3, 2)
    assert places.tolist() == [[1, -1], [-1, 2], [0, -1]]
    x = torch.randn(3, 4, requires_grad=True)
    rows = PERMUTE(x, pairs, places)
    assert torch.equal(rows[:3], x[[2, 0, 1]]) and not rows[3:].any()
    poisoned = rows.detach().clone()
    poisoned[3:] = torch.nan
    poisoned.requires_grad_()
    weights = torch.rand(3, 2, requires_grad=True)
    y = COMBINE(poisoned, weights, pairs, places)
    torch.testing.assert_close(y, torch.stack([weights[0, 0] * x[0], weights[1, 1] * x[1], weights[2, 0] * x[2]]))
    grad_rows, grad_weights = torch.autograd.grad(y, (poisoned, weights), torch.ones_like(y))
    assert grad_rows.isfinite().all() and not grad_rows[3:].any()
    assert not grad_weights[0, 1] and not grad_weights[1, 0]
    torch.testing.assert_close(grad_weights[0, 0], x[0].sum().detach())
    (grad_x,) = torch.autograd.grad(rows, x, torch.cat([torch.ones(3, 4), torch.full((2, 4), torch.nan)]))
    assert torch.equal(grad_x, torch.ones(3, 4))


def test_sorting_is_stable_and_counts() -> None:
    order = sort_pairs(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    assert order.pairs_M.tolist() == [1, 2, 0, 4, 3, 5]
    assert order.counts_E.tolist() == [2, 0, 2, 2, 0] and order.bounds_E1.tolist() == [0, 2, 2, 4, 6, 6]
    assert order.places_NK.flatten()[order.pairs_M].tolist() == list(range(6))


def test_counts_of_experts() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.25], [2.0, 0.0, 2.0], [0.0, 0.0, 0.0]], requires_grad=True)
    found = EXPERT_COUNTS(torch.tensor([3, 0, 3]), scores, torch.tensor(2))
    assert found.dtype == torch.float64 and not found.requires_grad
    assert found[[0, 1, 2, 3, 5]].tolist() == [3, 0, 3, 3, 2]
    torch.testing.assert_close(float(found[4]), 2.5 * math.log(2), rtol=1e-6, atol=0)
    assert EXPERT_COUNTS(torch.tensor([3, 0, 3]), scores)[-1] == 0


def test_a_kernel_for_several_operators_runs_where_it_stands_for_what_is_in_force() -> None:
    """Whoever names another kernel for a part of it, or makes the part defer its weights' gradients, is heard."""
    calls: list[str] = []

    def noted(name: str, function: Any) -> ops.Choice:
        def run(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return ops.Choice(name, "a test", run)

    linear, swiglu = noted("linear", GROUPED_LINEAR.reference), noted("swiglu", ops.swiglu.reference)
    gated = noted(
        "gated", lambda x, w1, w3, counts: F.silu(GROUPED_LINEAR.reference(x, w1, counts)) * GROUPED_LINEAR.reference(x, w3, counts)
    )
    layer, x = moe(SoftmaxRouterConfig(experts=4, top_k=2), shared=None), torch.randn(1, 5, 12)
    wanted = layer(x)

    def ran(*choices: tuple[str, ops.Choice]) -> list[str]:
        calls.clear()
        with ops.installed(dict(choices)):
            torch.testing.assert_close(layer(x), wanted)
        return list(calls)

    assert ran(("grouped_swiglu", gated)) == ["gated"]  # It stands for nothing but itself.
    gated.function.stands_for = ((GROUPED_LINEAR, linear.function), (ops.swiglu, swiglu.function))  # type: ignore[union-attr]
    both = ("grouped_linear", linear), ("swiglu", swiglu)
    assert ran(("grouped_swiglu", gated), *both) == ["gated", "linear"]
    assert ran(("grouped_swiglu", gated), both[0]) == ["linear"] * 3
    assert ran(("grouped_swiglu", gated), both[1]) == ["swiglu"]
    assert ran(*both) == ["linear", "linear", "swiglu", "linear"]
    with ops.installed(dict(both)):
        one = GROUPED_SWIGLU(torch.ones(2, 12), layer.experts.w1, layer.experts.w3, torch.tensor([1, 0, 0, 1]))
    assert torch.equal(one, gated.function(torch.ones(2, 12), layer.experts.w1, layer.experts.w3, torch.tensor([1, 0, 0, 1])))  # type: ignore[misc]


def test_float8_experts() -> None:
    counts = torch.tensor([2, 0, 3])
    payload, scales = quantise(torch.randn(3, 20, 12), (8, 8))
    weight = torch.zeros(3, 20, 12, requires_grad=True)
    whole = dequantise(payload, scales, (8, 8), torch.float32).requires_grad_()
    x = torch.randn(5, 12, requires_grad=True)
    y, wanted = SCALED_GROUPED_LINEAR(x, weight, payload, scales, counts, (8, 8)), GROUPED_LINEAR(x, whole, counts)
    torch.testing.assert_close(y, wanted)
    for one, other in zip(torch.autograd.grad(y.sum(), (x, weight)), torch.autograd.grad(wanted.sum(), (x, whole)), strict=True):
        torch.testing.assert_close(one, other)
    layer = moe(SoftmaxRouterConfig(experts=3, top_k=1), hidden=8)
    plain = layer(x[None])
    for name in ("w1", "w3", "w2"):
        bytes_, tiles = quantise(getattr(layer.experts, name).detach(), (4, 4))
        setattr(layer.experts, f"{name}_payload", bytes_)
        setattr(layer.experts, f"{name}_scales", tiles)
        setattr(layer.experts, f"{name}_tile", (4, 4))
    assert 0 < (layer(x[None]) - plain).abs().max() < 0.1 * plain.abs().max()


def test_shapes_are_known_without_numbers() -> None:
    with torch.device("meta"):
        layer = MoE(MoEConfig(router=SigmoidRouterConfig(experts=8, top_k=2), hidden=10), SCOPE)
        assert layer(torch.empty(2, 5, 12)).shape == (2, 5, 12)
    assert layer.mixing_flops_per_token(64) == 2 * 8 * 12 + 2 * 2 * 3 * 10 * 12


# ---------------------------------------------------------------- settings and names


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SoftmaxRouterConfig(experts=4, top_k=5), "top_k = 5"),
        (lambda: GroupLimitedRouterConfig(experts=8, top_k=2, groups=3, top_groups=1), "Nearest: 2 or 4"),
        (lambda: GroupLimitedRouterConfig(experts=8, top_k=5, groups=4, top_groups=2), "hold only 4"),
        (lambda: GroupLimitedRouterConfig(experts=8, top_k=2, groups=8, top_groups=2), "2 experts or more"),
        (lambda: GroupLimitedRouterConfig(experts=8, top_k=2, groups=4, top_groups=2, scoring="sigmod"), "sigmoid"),
        (lambda: SoftmaxRouterConfig(experts=4, top_k=1, sequence="rows"), "row"),
        (lambda: SoftmaxRouterConfig(experts=4, top_k=1, jitter=1.0), "below 1"),
    ],
)
def test_bad_settings_say_what_is_right(make: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


def test_labels() -> None:
    assert [label_of(name) for name in ("layers.3.feed_forward.router", "mtp.0.block.feed_forward", "")] == ["3", "mtp.0", "0"]
    assert isinstance(moe(SoftmaxRouterConfig(experts=2, top_k=1)).router, Router)


def test_compiled_layers_share_one_compilation() -> None:
    """Layers differ by the names of their losses, which are no business of compiled code."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    config = MoEConfig(router=SigmoidRouterConfig(experts=4, top_k=2, sequence_loss=1e-2, z_loss=1e-3), hidden=10)
    layers = [fill(MoE(config, dataclasses.replace(SCOPE, name=f"layers.{number}.feed_forward")), number) for number in range(3)]
    x_BSD, frames = torch.randn(2, 6, SCOPE.dim), []
    for layer in layers:
        with logical.micro_batch(1.0) as sums:
            result = torch.compile(layer.forward, backend=counter)(x_BSD)
        frames.append(counter.frame_count)
        torch.testing.assert_close(result, layer(x_BSD))
        assert set(sums) == {f"moe.{layer.router.label}.{name}" for name in ("sequence_loss", "z_loss")}
    assert frames[0] == frames[1] == frames[2] > 0


def test_a_dispatcher_that_no_compiler_may_trace_runs_as_written() -> None:
    class Crossing(Local):
        capabilities = Capabilities(needs_host_sync=True, static_shapes=False, drops_tokens=False)
        was_traced = False

        def start(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Any:
            self.was_traced |= torch.compiler.is_compiling()
            return super().start(x_ND, experts_NK, weights_NK)

    torch._dynamo.reset()
    layer = moe(SoftmaxRouterConfig(experts=4, top_k=2))
    layer.experts.dispatcher = dispatcher = Crossing(4)
    x_BSD = torch.randn(2, 6, SCOPE.dim)
    torch.testing.assert_close(torch.compile(layer.forward, backend="eager")(x_BSD), layer(x_BSD))
    assert not dispatcher.was_traced
