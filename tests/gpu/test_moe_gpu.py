"""Mixtures of experts on a GPU: kernels keep their promises, a layer equals the references and never waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from intarsia import ops, plugins
from intarsia.comm import SelfCommunicator
from intarsia.device import capabilities
from intarsia_models_common.build import Scope
from intarsia_models_common.config import SwiGLUConfig
from intarsia_models_common.moe.block import MoE
from intarsia_models_common.moe.config import GroupLimitedRouterConfig, MoEConfig
from intarsia_parallel.experts.config import FixedCapacityConfig
from intarsia_testing.kernel import KernelConformance

pytestmark = pytest.mark.gpu

SCOPE = Scope(name="layers.0.feed_forward", dim=256, layer=0, layers=1, rope_interleaved=False, std=0.05, output_std=0.05)


class TestPermute(KernelConformance):
    op, entry = "permute", "intarsia-kernels:permute/triton"


class TestCombine(KernelConformance):
    op, entry = "combine", "intarsia-kernels:combine/triton"


class TestSwiGLU(KernelConformance):
    op, entry = "swiglu", "intarsia-kernels:swiglu/triton"


class TestTopExperts(KernelConformance):
    op, entry = "top_experts", "intarsia-kernels:top_experts/triton"


class TestExpertWeights(KernelConformance):
    op, entry = "expert_weights", "intarsia-kernels:expert_weights/triton"


class TestExpertCounts(KernelConformance):
    op, entry = "expert_counts", "intarsia-kernels:expert_counts/triton"


class TestSortPairs(KernelConformance):
    op, entry = "sort_pairs", "intarsia-kernels:sort_pairs/triton"


class TestGroupedSwiGLU(KernelConformance):
    op, entry = "grouped_swiglu", "intarsia-kernels:grouped_swiglu/grouped_mm"


class TestGroupedLinear(KernelConformance):
    op, entry = "grouped_linear", "intarsia-kernels:grouped_linear/grouped_mm"


class TestScaledGroupedLinear(KernelConformance):
    op, entry = "scaled_grouped_linear", "intarsia-kernels:scaled_grouped_linear/grouped_mm"


class TestRouterLinear(KernelConformance):
    op, entry = "router_linear", "intarsia-kernels:router_linear/split"


def test_a_routers_weight_in_parts() -> None:
    """Each part is what the ordinary cast of the rest gives, and they add up."""
    from intarsia_kernels.moe import router

    weight = torch.randn(64, 2048, device="cuda")
    first = weight.bfloat16()
    second = (weight - first.float()).bfloat16()
    third = (weight - first.float() - second.float()).bfloat16()
    assert torch.equal(router.split_weight(weight, False), torch.cat((first, second, third)))
    assert torch.equal(router.split_weight(weight, True), torch.cat((first, first, second)))
    twice, every = router.split_gradient(weight)
    assert torch.equal(twice, torch.cat((first, second, first), 1)) and torch.equal(every, torch.cat((first, second, third), 1))
    assert torch.equal(first.double() + second.double() + third.double(), weight.double())


@pytest.mark.parametrize("experts,top_k", [(64, 6), (256, 8), (7, 3)])
def test_choices_of_many_tokens_are_the_references(experts: int, top_k: int) -> None:
    """At the sizes of training, where programs share the work."""
    from intarsia_kernels.moe import choice, sort
    from intarsia_models_common.moe.operators import EXPERT_COUNTS, SORT_PAIRS, TOP_EXPERTS

    scores = torch.rand(16384, experts, device="cuda", generator=torch.Generator("cuda").manual_seed(experts))
    chosen = choice.top_experts(scores, top_k)
    assert torch.equal(scores.gather(1, chosen), scores.gather(1, TOP_EXPERTS.reference(scores, top_k)))
    assert chosen.sort(1).values.diff(dim=1).min() > 0
    for found, wanted in zip(sort.sort_pairs(chosen, experts), SORT_PAIRS.reference(chosen, experts), strict=True):
        assert torch.equal(found, wanted)
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    torch.testing.assert_close(choice.expert_counts(counts, scores), EXPERT_COUNTS.reference(counts, scores.double()), rtol=1e-6, atol=1e-6)


def test_gating_in_one_step_has_the_bits_of_three(kernels: Any) -> None:
    from intarsia_models_common.moe.operators import GROUPED_SWIGLU

    generator = torch.Generator("cuda").manual_seed(2)
    x, w1, w3 = (
        torch.randn(*shape, device="cuda", generator=generator).bfloat16().requires_grad_() for shape in ((700, 256), *((6, 128, 256),) * 2)
    )
    counts = torch.tensor([0, 300, 7, 0, 340, 50], device="cuda")
    wave = torch.randn(700, 128, device="cuda", generator=generator).bfloat16()
    for given in (x, x.detach()):  # with the input's gradient and without
        leaves = [each for each in (given, w1, w3) if each.requires_grad]
        results = [
            [y := function(given, w1, w3, counts), *torch.autograd.grad(y, leaves, wave)]
            for function in (GROUPED_SWIGLU.choice.function, GROUPED_SWIGLU.reference)
        ]
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def layer(dtype: torch.dtype, fixed: bool = False) -> MoE:
    """16 experts of which 4 take each token, its experts in `dtype`; the same numbers each time."""
    router = GroupLimitedRouterConfig(experts=16, top_k=4, groups=4, top_groups=2, bias_rate=1e-3, scale=2.5)
    with torch.device("cuda"):
        made = MoE(MoEConfig(router=router, hidden=128, shared=SwiGLUConfig(hidden=128)), SCOPE)
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in made.named_parameters():
        parameter.data.normal_(0, 0.05, generator=generator)
        parameter.data = parameter.data.to(torch.float32 if name.startswith("router") else dtype)
    if fixed:
        made.experts.dispatcher = plugins.current().build(FixedCapacityConfig(factor=1.0, tokens=512), 16, SelfCommunicator("cuda"))
    return made


def results(made: MoE, x_BSD: torch.Tensor) -> dict[str, torch.Tensor]:
    x_BSD = x_BSD.detach().requires_grad_()
    y_BSD = made(x_BSD)
    wave = torch.cos(torch.arange(y_BSD.numel(), device="cuda") * 0.7).view(y_BSD.shape).to(y_BSD.dtype)
    grads = torch.autograd.grad(y_BSD, [x_BSD, *made.parameters()], wave)
    return {"y": y_BSD.detach(), "x": grads[0], **dict(zip(dict(made.named_parameters()), grads[1:], strict=True))}


@pytest.fixture
def kernels() -> Any:
    selection = ops.select({}, plugins.current(), capabilities(), "bfloat16")
    with ops.installed(selection.choices):
        yield selection


@pytest.mark.parametrize("fixed", [False, True])
def test_a_layer_equals_the_references(kernels: Any, fixed: bool) -> None:
    """bfloat16 by kernels against bfloat16 by the references, and against float32: kernels are no farther from float32 than the references are."""
    x = torch.randn(4, 128, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    found = results(layer(torch.bfloat16, fixed), x)
    references = {name: ops.Choice("reference", "") for name in kernels.choices}
    with ops.installed(references):
        plain, exact = results(layer(torch.bfloat16), x), results(layer(torch.float32), x.float())
    for name, value in exact.items():
        scale = value.float().abs().max()
        mine, theirs = ((each[name].float() - value.float()).abs().max() / scale for each in (found, plain))
        assert mine <= 2 * theirs + 5e-3, (name, float(mine), float(theirs))


@pytest.mark.parametrize("fixed", [False, True])
def test_the_host_never_waits(kernels: Any, fixed: bool) -> None:
    made, x = layer(torch.bfloat16, fixed), torch.randn(4, 128, 256, device="cuda").bfloat16().requires_grad_()
    for _ in range(2):
        made(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fixed", [False, True])
def test_a_graph_can_hold_forward_and_backward(kernels: Any, fixed: bool) -> None:
    """Replayed on other tokens, whose routing differs, it gives what the layer gives."""
    made = layer(torch.bfloat16, fixed)
    x, other = (torch.randn(4, 128, 256, device="cuda").bfloat16() for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            results(made, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(made, x)
    x.copy_(other)
    graph.replay()
    for name, value in results(made, other).items():
        torch.testing.assert_close(captured[name], value, rtol=2e-2, atol=2e-2 * float(value.abs().max()))
