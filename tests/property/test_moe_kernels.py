"""Kernels for mixtures of experts under Triton's interpreter, which stands in for a GPU: the kit's promises, and what the kit cannot ask of the interpreter.

The interpreter needs its variable before Triton is imported, hence a process of its own: this file, run as a program.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

NEEDS_TRITON = pytest.mark.skipif(
    not importlib.util.find_spec("triton"),
    reason="Triton comes with CUDA builds of torch; `nox -s kernels` brings it, and tests/gpu has these kernels too",
)
PROMISED = (
    "permute:permute/triton",
    "combine:combine/triton",
    "swiglu:swiglu/triton",
    "scaled_grouped_linear:scaled_grouped_linear/grouped_mm",
    "top_experts:top_experts/triton",
    "expert_weights:expert_weights/triton",
    "expert_counts:expert_counts/triton",
    "sort_pairs:sort_pairs/triton",
)


@NEEDS_TRITON
@pytest.mark.parametrize("name", [*PROMISED, "products", "gated", "router", "choices", "layer"])
def test_under_the_interpreter(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def check_router() -> None:
    """Three parts add up to the weight, and the product is as near to float64 as float32's own; plain bfloat16 is a thousand times farther."""
    import torch
    from intarsia_kernels.moe import router
    from intarsia_models_common.moe.products import router_linear as reference

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(24, 512, generator=generator) / 20).requires_grad_()
    # The interpreter cuts where a GPU rounds: the parts add up either way.
    parts = router.split_weight(weight.detach(), False).double().view(3, 24, 512)
    assert torch.equal(parts.sum(0).float(), weight.detach()) and float((parts[0] - weight.detach()).abs().max()) < 2e-3
    wave = torch.randn(64, 24, generator=generator)
    high, low = parts[:2].bfloat16()
    assert torch.equal(router.split_weight(weight.detach(), True), torch.cat((high, high, low)))
    twice, every = router.split_gradient(wave)
    first, second, third = every.split(24, 1)
    assert torch.equal(first.double() + second.double() + third.double(), wave.double())
    assert torch.equal(twice, torch.cat((first, second, first), 1))
    exact = x.double() @ weight.double().t()
    found, plain = router.router_linear(x, weight), (x @ weight.bfloat16().t()).float()
    assert found.dtype == torch.float32
    own = float((reference(x, weight) - exact).detach().abs().max())
    assert float((found - exact).detach().abs().max()) <= 4 * own < 0.01 * float((plain - exact).detach().abs().max())
    grad_x, grad_weight = torch.autograd.grad(found, (x, weight), wave)
    torch.testing.assert_close(grad_weight.double(), wave.double().t() @ x.detach().double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_x.double(), wave.double() @ weight.detach().double(), rtol=1e-2, atol=1e-2)


def check_choices() -> None:
    """What no case of the kit can say: equal scores, scores that are no numbers, experts that do not exist."""
    import torch
    from intarsia_kernels.moe import choice
    from intarsia_models_common.moe.choice import expert_counts, top_experts

    level = torch.zeros(3, 8)
    assert choice.top_experts(level, 3).tolist() == [[0, 1, 2]] * 3
    assert choice.top_experts(level, 3, 4, 2, "top2").tolist() == [[0, 1, 2]] * 3
    odd = torch.tensor([[0.5, torch.nan, -torch.inf, -1.0, torch.inf, -2.0]] * 2)
    assert choice.top_experts(odd, 6).tolist() == [[1, 4, 0, 3, 5, 2]] * 2
    assert choice.top_experts(odd, 2, 3, 1).tolist() == [[1, 0]] * 2
    assert choice.top_experts(torch.copysign(odd, torch.tensor(-1.0)), 1).tolist() == [[1]] * 2  # one with a sign
    below = -torch.rand(9, 12, generator=torch.Generator().manual_seed(0))  # Other groups are no 0 that would be better.
    assert torch.equal(choice.top_experts(below, 4, 3, 2, "top2"), top_experts(below, 4, 3, 2, "top2"))
    strange = choice.expert_weights(torch.rand(2, 4), torch.tensor([[0, 1], [0, 4]]), True, 2.0)
    assert strange[0].isfinite().all() and strange[1].isnan().all()
    for few in (
        (torch.rand(2, 4), 5),
        (torch.rand(2, 6), 4, 3, 1),
        (torch.rand(2, 6), 1, 4, 1),
        (torch.rand(2, 6), 1, 6, 2, "top2"),
        (torch.rand(2, 6), 1, 2, 3),
    ):
        assert choice.top_experts.supports(*few) is not None, few
    assert choice.top_experts.supports(torch.rand(2, 6), 4, 3, 2, "top2") is None
    for wrong in (torch.nan, torch.inf):
        scores = torch.tensor([[0.5, 0.5, 0.0], [0.25, wrong, 0.5]])
        assert choice.expert_counts(torch.zeros(3, dtype=torch.int64), scores)[-2].isnan()
        assert expert_counts(torch.zeros(3, dtype=torch.int64), scores)[-2].isnan()
    scores, same = torch.rand(2, 4, requires_grad=True), torch.tensor([[1, 1], [3, 0]])
    (grad,) = torch.autograd.grad(choice.expert_weights(scores, same).sum(), scores)
    assert grad.tolist() == [[0, 2, 0, 0], [1, 0, 0, 1]]
    check_strange_pairs()


def check_strange_pairs() -> None:
    """Pairs of experts that do not exist have no place, and what their rows hold comes from nobody's memory: a layer's result is NaN for their tokens alone."""
    import torch
    from intarsia_kernels.moe import choice, rows, sort
    from intarsia_testing.kernel import poisoned

    generator = torch.Generator().manual_seed(0)
    for tokens, experts in ((3, 4), (700, 5)):  # Of one program and of several.
        chosen = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
        chosen[1, 0], chosen[tokens - 1] = experts, torch.tensor([-1, 32767])
        with poisoned():
            pairs, places, counts, bounds = sort.sort_pairs(chosen, experts)
        known = (chosen >= 0) & (chosen < experts)
        assert torch.equal(places >= 0, known) and bool((places[~known] == -1).all())
        order = torch.argsort(torch.where(known, chosen, experts).flatten(), stable=True)
        assert torch.equal(pairs[: int(known.sum())], order[: int(known.sum())]) and bool((pairs[int(known.sum()) :] == -1).all())
        assert torch.equal(counts, torch.bincount(chosen[known], minlength=experts)) and torch.equal(bounds[1:], counts.cumsum(0))
        x, weights = torch.randn(tokens, 8, generator=generator), choice.expert_weights(torch.rand(tokens, experts), chosen)
        with poisoned():
            found = rows.combine(rows.permute(x, pairs, places), weights, pairs, places)
        assert torch.equal(found.isnan().all(1), ~known.all(1)) and torch.equal(found.isnan().any(1), ~known.all(1))


def check_gated() -> None:
    """Every case of the kit in float32, against the two kernels that it stands for: the same bits, memory full of NaN or not, and with some of the gradients alone."""
    import torch
    from intarsia import ops
    from intarsia_kernels.moe import gated, products, swiglu
    from intarsia_models_common.moe.operators import GROUPED_LINEAR, GROUPED_SWIGLU
    from intarsia_testing.kernel import poisoned, run
    from intarsia_testing.kernel_cases import cases

    GROUPED_LINEAR.put(ops.Choice("grouped_mm", "", products.grouped_linear))
    ops.swiglu.put(ops.Choice("triton", "", swiglu.swiglu))
    taken = 0
    for case in cases("grouped_swiglu"):
        arguments = case.arguments(torch.float32, "cpu")
        if gated.supports(**arguments) is not None:
            continue
        taken += 1
        wanted = run(GROUPED_SWIGLU.reference, arguments, "grouped_swiglu")
        with poisoned():
            found = run(gated.grouped_swiglu, case.arguments(torch.float32, "cpu"), "grouped_swiglu")
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (case.label, name)
        for frozen in ("x_MI", "gate_EOI", "up_EOI"):
            partly = case.arguments(torch.float32, "cpu")
            partly[frozen] = partly[frozen].detach()
            for name, value in run(gated.grouped_swiglu, partly, "grouped_swiglu").items():
                assert torch.equal(value, wanted[name]), (case.label, frozen, name)
    assert taken >= 3


def check_promises(op: str, entry: str) -> None:
    from intarsia_testing.kernel import check

    found = list(check(op, f"intarsia-kernels:{entry}", present=("cuda", "triton", "sm90"), device="cpu"))
    problems = [each for each in found if each[1] != "kept"]
    assert not problems, problems


def check_products() -> None:
    """Every case of the kit in float32, which the kernel takes on a CPU, with memory full of NaN where nobody has written."""
    import torch
    from intarsia_kernels.moe import products
    from intarsia_models_common.moe.operators import GROUPED_LINEAR
    from intarsia_testing.kernel import poisoned, run
    from intarsia_testing.kernel_cases import cases

    taken = 0
    for case in cases("grouped_linear"):
        arguments = case.arguments(torch.float32, "cpu")
        if products.supports(**arguments) is not None:
            continue
        taken += 1
        with poisoned():
            found = run(products.grouped_linear, arguments, "grouped_linear")
        wanted = run(GROUPED_LINEAR.reference, case.arguments(torch.float64, "cpu", torch.float32), "grouped_linear")
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name].double(), value, rtol=2e-5, atol=2e-5, msg=lambda text, where=(case.label, name): f"{where}: {text}"
            )
    assert taken >= 4
    for groups, programs in ((1, 3), (3, 1)):  # A product that leaves its memory as it was.
        rubbish = torch.full((37, 8), torch.nan)
        offsets = torch.tensor([20] * groups, dtype=torch.int32)
        products._clear_tail[(programs, 1)](rubbish, offsets, groups, 37, 8, ROWS=16, BLOCK=16)
        assert rubbish[:20].isnan().all() and not rubbish[20:].any()
    for programs in (1, 2, 3):
        for both in (1, 2):
            gradients, others = torch.full((3, 5, 4), torch.nan), torch.full((3, 5, 4), torch.nan)
            products._clear_empty[(3, programs, both)](gradients, others, torch.tensor([0, 2, 2], dtype=torch.int32), 20, BLOCK=16)
            assert gradients[1].isnan().all() and not gradients[[0, 2]].any()
            assert others[1].isnan().all() and (others[[0, 2]].isnan().all() if both == 1 else not others[[0, 2]].any())


def check_layer() -> None:
    """A whole layer by all of them, its routers', against the references: result, every gradient and what is counted."""
    import torch
    from intarsia import ops, plugins
    from intarsia_models_common.build import Scope
    from intarsia_models_common.moe.block import MoE
    from intarsia_models_common.moe.config import ForcedBalancedRouterConfig, GroupLimitedRouterConfig, MoEConfig, SoftmaxRouterConfig
    from intarsia_testing.operator_calls import record

    chosen = ops.select({"router_linear": "reference"}, plugins.current(), ("cpu", "cuda", "sm80", "sm90", "triton"), "bfloat16").choices
    names = (
        "permute",
        "combine",
        "swiglu",
        "grouped_linear",
        "grouped_swiglu",
        "top_experts",
        "expert_weights",
        "expert_counts",
        "sort_pairs",
    )
    scope = Scope(name="layers.0.feed_forward", dim=32, layer=0, layers=1, rope_interleaved=False, std=0.02, output_std=0.02)
    for router in (
        SoftmaxRouterConfig(experts=8, top_k=2),
        GroupLimitedRouterConfig(experts=12, top_k=3, groups=3, top_groups=2, bias_rate=0.1, scale=2.5),
        ForcedBalancedRouterConfig(experts=6, top_k=2),
    ):
        layer = MoE(MoEConfig(router=router, hidden=16), scope)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
        if layer.router.bias is not None:
            layer.router.bias.copy_(torch.linspace(0.1, -0.1, 12))
        x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()

        def results(layer: MoE = layer, x: torch.Tensor = x) -> list[torch.Tensor]:
            layer.router.counters.zero_()
            y = layer(x)
            return [y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.cos(y.detach())), layer.router.counters.clone()]

        wanted = results()
        with ops.installed({name: chosen[name] for name in names}), record() as calls:
            found = results()
        ran = {call.op: call.kernel for call in calls}
        assert all("intarsia-kernels:" in kernel for op, kernel in ran.items() if op != "router_linear" and op != "router_sigmoid"), ran
        assert "grouped_swiglu" in ran and "swiglu" not in ran
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        # Another kernel for a part of it is heard.
        with ops.installed({name: chosen[name] for name in names if name != "swiglu"}), record() as calls:
            results()
        ran = {call.op: call.kernel for call in calls}
        assert ran["swiglu"] == "reference" and "grouped_swiglu" not in ran, ran


if __name__ == "__main__":
    further = {"products": check_products, "gated": check_gated, "router": check_router, "choices": check_choices, "layer": check_layer}
    if sys.argv[1] in further:
        further[sys.argv[1]]()
    else:
        check_promises(*sys.argv[1].split(":"))
