"""Experts on several ranks equal experts on one: outputs and every gradient, whatever the routing; state once a step; overflow told; the role's checks."""

from __future__ import annotations

from typing import Any

import chz
import pytest
import torch
from _spawn import spawn
from intarsia import logical, plugins
from intarsia.comm import Communicator, FakeCommunicator
from intarsia.errors import UsageError
from intarsia_models_common.build import Scope
from intarsia_models_common.config import SwiGLUConfig
from intarsia_models_common.moe.block import MoE
from intarsia_models_common.moe.config import (
    DispatcherConfig,
    LocalConfig,
    MoEConfig,
    RouterConfig,
    SigmoidRouterConfig,
    SoftmaxRouterConfig,
)
from intarsia_models_common.moe.dispatch import experts_of
from intarsia_parallel.collectives import sum_both
from intarsia_parallel.experts.config import AllToAllConfig, ExpertConfig, FixedCapacityConfig
from intarsia_parallel.experts.role import build as build_role
from intarsia_testing.communicator import run_ranks
from intarsia_testing.kernel import poisoned
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 12
SCOPE = Scope(name="layers.0.feed_forward", dim=DIM, layer=0, layers=1, rope_interleaved=False, std=0.3, output_std=0.3)
DISPATCHERS: dict[str, DispatcherConfig] = {
    "all_to_all": AllToAllConfig(),
    "all_to_all, in line": AllToAllConfig(overlap=False),
    "fixed_capacity": FixedCapacityConfig(factor=4.0),
}


def whole(router: RouterConfig) -> MoE:
    """The layer on one process, filled alike everywhere."""
    layer = MoE(MoEConfig(router=router, hidden=8, shared=SwiGLUConfig(hidden=6)), SCOPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return layer


def steered(layer: MoE, to: list[int] | None) -> MoE:
    """Let the router choose among the experts `to` only."""
    if to is not None:
        assert layer.router.bias is not None
        layer.router.bias.fill_(-10.0)
        layer.router.bias[to] = 0.0
    return layer


def cut(layer: MoE, dispatcher: DispatcherConfig, comm: Communicator) -> MoE:
    """This rank's part of the layer, by the role's own cuts and dispatcher."""
    role = build_role(ExpertConfig(dispatcher=dispatcher, uneven=True))
    sizes = {"ep": comm.size}
    role.check("layers.0.feed_forward.experts", layer.experts, sizes)
    shares = experts_of(layer.experts.experts, comm.size)
    for name, (axis, placement) in role.cut("layers.0.feed_forward.experts", layer.experts, sizes).items():
        assert axis == "ep" and placement.counts(layer.experts.experts, comm.size) == shares  # type: ignore[attr-defined]
        stack = getattr(layer.experts, name).detach().split(shares)[comm.rank].clone()
        setattr(layer.experts, name, nn.Parameter(stack))
    role.apply(
        "layers.0.feed_forward.experts",
        layer.experts,
        lambda *axes: comm if axes == ("ep",) else comm.split([[r] for r in range(comm.size)], "tp"),
    )
    return layer


def batch(rows: int, tokens: int, seed: int) -> Tensor:
    return torch.randn(rows, tokens, DIM, generator=torch.Generator().manual_seed(seed))


def run(
    layer: MoE, parts: list[Tensor], scale: float, recompute: bool = False
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], dict[str, float]]:
    """Outputs, gradients of inputs and parameters, and the losses' sums of micro-batches one after the other."""
    outputs, inputs, sums_of = [], [], dict[str, float]()
    for part in parts:
        x = part.clone().requires_grad_()
        with logical.micro_batch(scale) as sums:
            # What follows keeps recomputation from ending before the layer does.
            y = checkpoint(lambda x: layer(x).mul(2.0).sinh().asinh() / 2, x, use_reentrant=False) if recompute else layer(x)
            (y * torch.cos(y.detach() * 0.3) * scale).sum().backward()
        outputs.append(y.detach())
        inputs.append(x.grad if x.grad is not None else torch.zeros_like(x))
        for name, value in sums.items():
            sums_of[name] = sums_of.get(name, 0.0) + float(value)
    return outputs, inputs, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in layer.named_parameters()}, sums_of


def compare(layer_of: Any, tokens_of: list[list[int]], dispatcher: DispatcherConfig, recompute: bool = False, spoil: bool = False) -> None:
    """Ranks with `tokens_of[rank][micro_batch]` tokens each against one process with all of them, for outputs and all gradients to 1e-5."""
    ranks = len(tokens_of)
    parts = [[batch(1, count, 10 * rank + number) for number, count in enumerate(counts)] for rank, counts in enumerate(tokens_of)]

    def work(comm: Communicator) -> Any:
        logical.install({"batch": (lambda x: sum_both(x, comm), comm.size)})
        layer = cut(layer_of(), dispatcher, comm)
        with logical.micro_batch(1.0):
            found = run(layer, parts[comm.rank], 0.5, recompute)
        layer.reduce(lambda tensor: comm.all_reduce(tensor))
        layer.router.reduce(lambda tensor: comm.all_reduce(tensor))
        layer.router.commit()
        logical.reset()
        return *found, layer.router

    if spoil:
        with poisoned():
            results = run_ranks(ranks, work)
    else:
        results = run_ranks(ranks, work)
    one = layer_of()
    together = [torch.cat([parts[rank][number] for rank in range(ranks)], 1) for number in range(len(tokens_of[0]))]
    outputs, inputs, gradients, sums = run(one, together, 0.5)
    one.router.reduce(lambda tensor: tensor)
    one.router.commit()
    close = {"rtol": 1e-5, "atol": 1e-5}
    for number in range(len(together)):
        torch.testing.assert_close(torch.cat([result[0][number] for result in results], 1), outputs[number], **close)
        torch.testing.assert_close(torch.cat([result[1][number] for result in results], 1), inputs[number], **close)
    for name, wanted in gradients.items():
        mine = [result[2][name] for result in results]
        found = torch.cat(mine) if name.startswith("experts.") else torch.stack(mine).sum(0)
        torch.testing.assert_close(found, wanted, **close, msg=lambda text, name=name: f"{name}: {text}")
    for name, value in sums.items():
        assert sum(result[3][name] for result in results) == pytest.approx(value, rel=1e-5), name
    for result in results:
        torch.testing.assert_close(result[4].load_E, one.router.load_E, rtol=1e-5, atol=1e-5)
        if one.router.bias is not None:
            assert torch.equal(result[4].bias, one.router.bias)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(dispatcher: str, ranks: int) -> None:
    router = SigmoidRouterConfig(experts=8, top_k=2, bias_rate=0.05, balance_loss=0.3, z_loss=0.1, scale=2.5)
    compare(lambda: whole(router), [[9, 6]] * ranks, DISPATCHERS[dispatcher])


@pytest.mark.parametrize("dispatcher", ["all_to_all", "fixed_capacity"])
@pytest.mark.parametrize(
    ("to", "tokens"),
    [
        ([0, 1], [[9], [9], [9], [9]]),  # every token to the first rank
        ([6, 7], [[9], [9], [9], [9]]),  # and to the last
        ([0, 2, 5], [[9], [9], [9], [9]]),  # experts without tokens
        (None, [[0], [7], [0], [3]]),  # ranks without tokens
        (None, [[0], [0], [0], [0]]),  # nobody has any
        (None, [[3], [2], [2], [2]]),  # parts of a row that cannot be cut evenly
    ],
)
def test_any_routing_equals_one_process(dispatcher: str, to: list[int] | None, tokens: list[list[int]]) -> None:
    """With unwritten memory full of NaN, which must spread nowhere."""
    router = SigmoidRouterConfig(experts=8, top_k=2, bias_rate=0.0)
    compare(lambda: steered(whole(router), to), tokens, DISPATCHERS[dispatcher], spoil=True)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "fixed_capacity"])
def test_experts_that_ranks_cannot_share_evenly(dispatcher: str) -> None:
    compare(lambda: whole(SoftmaxRouterConfig(experts=7, top_k=3)), [[5], [6], [4]], DISPATCHERS[dispatcher])


@pytest.mark.parametrize("dispatcher", ["all_to_all", "fixed_capacity"])
def test_recomputation_and_accumulation_count_once(dispatcher: str) -> None:
    router = SigmoidRouterConfig(experts=8, top_k=2, bias_rate=0.05, balance_loss=0.3)
    compare(lambda: whole(router), [[5, 4, 3]] * 2, DISPATCHERS[dispatcher], recompute=True)


def test_two_steps_with_the_bias_moved() -> None:
    """The second step's routing depends on the first one's counts over all ranks."""

    def steps(layer: MoE, parts: list[Tensor], reduce: Any) -> tuple[Tensor, Tensor]:
        for part in parts:
            output = run(layer, [part], 1.0)[0][0]
            layer.router.reduce(reduce)
            layer.router.commit()
        assert layer.router.bias is not None
        return output, layer.router.bias

    router = SigmoidRouterConfig(experts=8, top_k=2, bias_rate=0.3)
    parts = [[batch(1, 9, 10 * rank + step) for step in range(2)] for rank in range(2)]
    for dispatcher in DISPATCHERS.values():
        results = run_ranks(2, lambda comm, chosen=dispatcher: steps(cut(whole(router), chosen, comm), parts[comm.rank], comm.all_reduce))
        output, bias = steps(
            whole(router), [torch.cat([parts[rank][step] for rank in range(2)], 1) for step in range(2)], lambda tensor: tensor
        )
        torch.testing.assert_close(torch.cat([result[0] for result in results], 1), output, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(result[1], bias) for result in results)
        assert bias.abs().max() > 0.5  # both steps moved one


# ---------------------------------------------------------------- overflow


def overflowing(comm: Communicator, overflow: str) -> tuple[MoE, Tensor]:
    router = SigmoidRouterConfig(experts=4, top_k=2, bias_rate=0.0)
    layer = cut(steered(whole(router), [0, 1]), FixedCapacityConfig(factor=1.0, overflow=overflow), comm)
    return layer, layer(batch(1, 8, comm.rank).requires_grad_())


def test_overflow_is_an_error_of_the_step_on_every_rank() -> None:
    def work(comm: Communicator) -> str:
        layer, y = overflowing(comm, "error")
        y.sum().backward()
        with pytest.raises(UsageError, match=r"16 pairs.*Raise the dispatcher's `factor`") as caught:
            layer.reduce(comm.all_reduce)
        layer.reduce(comm.all_reduce)  # told once
        return str(caught.value)

    assert len(set(run_ranks(2, work))) == 1


def test_overflow_of_an_evaluation_is_an_error_of_its_own() -> None:
    """No step comes behind the last one, which would tell."""

    def work(comm: Communicator) -> None:
        layer, _ = overflowing(comm, "error")
        with pytest.raises(UsageError):
            layer.reduce(comm.all_reduce)
        layer.eval()
        with torch.no_grad():
            layer(batch(1, 8, comm.rank))
        with pytest.raises(UsageError, match=r"16 pairs.*nor an evaluation was taken"):
            layer.evaluated(comm.all_reduce)
        layer.reduce(comm.all_reduce)  # the next step is not told of it

    run_ranks(2, work)


def test_overflow_is_dropped_and_counted() -> None:
    """8 slots for 16 pairs: the first four tokens' pairs of each expert arrive, by expert and then by token; the rest add nothing and get no gradient."""

    def work(comm: Communicator) -> Any:
        layer, y = overflowing(comm, "drop")
        y.sum().backward()
        layer.reduce(comm.all_reduce)
        layer.router.reduce(comm.all_reduce)
        assert layer.router.load_E is not None
        # All pairs of expert 0 fit, and none of expert 1.
        one = whole(SigmoidRouterConfig(experts=4, top_k=2, bias_rate=0.0))
        x = batch(1, 8, comm.rank)[0]
        routed = steered(one, [0, 1]).router(x)
        weight = (routed.weights_NK * (routed.experts_NK == 0)).sum(-1, keepdim=True)
        e = one.experts
        wanted = one.shared(x) + weight * ((nn.functional.silu(x @ e.w1[0].t()) * (x @ e.w3[0].t())) @ e.w2[0].t())
        torch.testing.assert_close(y[0], wanted, rtol=1e-5, atol=1e-5)
        return float(layer.router.load_E[-1]), layer.experts.w1.grad

    (dropped, gradient), (_, other) = run_ranks(2, work)
    assert dropped == 16
    assert gradient[0].any() and not gradient[1].any() and not other.any()


def test_capacity_is_settled_by_the_first_pass_and_kept() -> None:
    def work(comm: Communicator) -> None:
        layer = cut(whole(SoftmaxRouterConfig(experts=4, top_k=2)), FixedCapacityConfig(factor=2.0), comm)
        layer(batch(1, 4 + comm.rank, 0))
        dispatcher = layer.experts.dispatcher
        assert dispatcher.capacity(3, 2) == 10 and dispatcher.capacity(5, 2) == 10
        with pytest.raises(UsageError, match="made for 5 tokens of a rank, and a forward pass has 6"):
            dispatcher.capacity(6, 2)

    run_ranks(2, work)


# ---------------------------------------------------------------- the role


def test_the_roles_checks() -> None:
    layer = whole(SoftmaxRouterConfig(experts=4, top_k=2))
    role = build_role(ExpertConfig())
    with pytest.raises(UsageError, match=r"4 experts, too few for mesh\.ep = 8.*The most is ep=4"):
        role.check("layers.0.feed_forward.experts", layer.experts, {"ep": 8})
    with pytest.raises(UsageError, match="role expert and is a SwiGLU"):
        role.check("layers.0.feed_forward.shared", layer.shared, {"ep": 2})
    with pytest.raises(UsageError, match="`local` keeps tokens on their rank"):
        build_role(ExpertConfig(dispatcher=LocalConfig())).check("experts", layer.experts, {"ep": 2})
    assert set(role.cut("layers.0.feed_forward", layer, {"ep": 2})) == {"experts.w1", "experts.w3", "experts.w2"}
    layer.experts.extra = nn.Parameter(torch.empty(3, 2))
    with pytest.raises(UsageError, match=r"experts.extra has the shape \(3, 2\)"):
        role.check("layers.0.feed_forward.experts", layer.experts, {"ep": 2})


def test_settings() -> None:
    with pytest.raises(UsageError, match="greater than 0"):
        FixedCapacityConfig(factor=0.0)
    with pytest.raises(UsageError, match="drop"):
        FixedCapacityConfig(overflow="dropp")
    with pytest.raises(UsageError, match="cut over 2 ranks"):
        run_ranks(2, lambda comm: plugins.current().build(LocalConfig(), 4, comm))
    assert chz.replace(FixedCapacityConfig(), tokens=4).tokens == 4


@pytest.mark.parametrize("dispatcher", [AllToAllConfig(overlap=False), FixedCapacityConfig(factor=2.0, tokens=10, overlap=False)])
def test_shapes_are_known_without_numbers(dispatcher: DispatcherConfig) -> None:
    """Planning runs a rank of a large group on the meta device."""
    comm = FakeCommunicator(3, 4, "meta")
    with torch.device("meta"):
        layer = MoE(MoEConfig(router=SigmoidRouterConfig(experts=8, top_k=2), hidden=8), SCOPE)
        layer.experts.dispatcher = plugins.current().build(dispatcher, 8, comm)
        for name in ("w1", "w3", "w2"):
            setattr(layer.experts, name, nn.Parameter(getattr(layer.experts, name)[:2]))
        x = torch.empty(2, 5, DIM, requires_grad=True)
        y = layer(x)
        assert y.shape == x.shape
        y.sum().backward()
    assert x.grad is not None and comm.stats()["rows to experts"].bytes > 0


# ---------------------------------------------------------------- processes


def processes(world: Communicator, name: str) -> list[float]:
    """Forward and backward over gloo with rows in flight beside the shared expert; sums that depend on every number."""
    layer = cut(whole(SigmoidRouterConfig(experts=8, top_k=2)), DISPATCHERS[name], world)
    outputs, inputs, gradients, _ = run(layer, [batch(1, 7 - world.rank, 10 * world.rank)], 1.0)
    totals = torch.stack([(t * torch.cos(torch.arange(t.numel())).view(t.shape)).sum() for t in (outputs[0], inputs[0])])
    experts = torch.stack([gradients[f"experts.{w}"].square().sum() for w in ("w1", "w3", "w2")])
    router = world.all_reduce(gradients["router.weight"].clone()).square().sum()
    return [*totals.tolist(), *world.all_reduce(experts).tolist(), float(router)]


def test_over_gloo() -> None:
    one = whole(SigmoidRouterConfig(experts=8, top_k=2))
    parts = [batch(1, 7 - rank, 10 * rank) for rank in range(2)]
    outputs, inputs, gradients, _ = run(one, [torch.cat(parts, 1)], 1.0)
    experts = [float(gradients[f"experts.{w}"].square().sum()) for w in ("w1", "w3", "w2")]
    for name in ("all_to_all", "fixed_capacity"):
        results = spawn(processes, 2, name)
        for rank, (y, x) in enumerate(zip(outputs[0].split([7, 6], 1), inputs[0].split([7, 6], 1), strict=True)):
            wanted = [float((t * torch.cos(torch.arange(t.numel())).view(t.shape)).sum()) for t in (y, x)]
            assert results[rank] == pytest.approx([*wanted, *experts, float(gradients["router.weight"].square().sum())], rel=1e-4, abs=1e-5)
