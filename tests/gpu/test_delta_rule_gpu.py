"""Kernels of linear attention on a GPU: promises of the kit, errors beside those of other implementations, packed as separate, and nothing waits for the device."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from intarsia import ops, plugins
from intarsia.device import capabilities
from intarsia_kernels.delta_rule import peers
from intarsia_models_common.linear_attention.delta_rule import gated_delta_rule as reference
from intarsia_testing.kernel import KernelConformance
from torch import Tensor

if importlib.util.find_spec("triton"):
    from intarsia_kernels.delta_rule.rule import gated_delta_rule
    from intarsia_kernels.delta_rule.short_conv import short_conv

pytestmark = pytest.mark.gpu

LENGTHS = (700, 64, 1, 1, 1282, 3, 509)
NAMES = ("q", "k", "v", "decay", "beta")


class TestGatedDeltaRule(KernelConformance):
    op, entry = "gated_delta_rule", "intarsia-kernels:gated_delta_rule/triton"


class TestShortConv(KernelConformance):
    op, entry = "short_conv", "intarsia-kernels:short_conv/triton"


@pytest.mark.skipif(bool(peers.fla_refuses_here()), reason=f"flash-linear-attention refuses {peers.fla_refuses_here()}")
class TestFla(KernelConformance):
    op, entry = "gated_delta_rule", "intarsia-kernels:gated_delta_rule/fla"


class TestAttnGym(KernelConformance):
    op, entry = "gated_delta_rule", "intarsia-kernels:gated_delta_rule/attn_gym"


def drawn(tokens: int, heads: int, keys: int, values: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, heads, *shape, generator=generator, device="cuda")

    return [*(normal(width).to(dtype) for width in (keys, keys, values)), -0.1 * normal().exp(), normal().sigmoid()]


def documents_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.full((n,), i, device="cuda") for i, n in enumerate(lengths)])[None]


def results(
    function: Any, inputs: list[Tensor], documents_BS: Tensor | None, dtype: torch.dtype | None = None, *, back: bool = True, **named: Any
) -> dict[str, Tensor]:
    """Output, final state and, where `back`, gradients of the output by name."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    y, state = function(*leaves, None, documents_BS, None, scale=inputs[0].shape[-1] ** -0.5, normalise=True, **named)
    found = {"y": y.detach(), "state": state.detach()}
    if not back:
        return found
    wave = torch.cos(torch.arange(y.numel(), device="cuda") * 0.7).view(y.shape).to(inputs[2].dtype).to(y.dtype)
    return found | {f"d{name}": x for name, x in zip(NAMES, torch.autograd.grad(y, leaves, wave), strict=True)}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name].double() - x).norm() / x.norm()) for name, x in exact.items()}


@pytest.mark.parametrize(("keys", "values"), [(64, 64), (128, 128), (256, 256), (64, 128), (128, 256), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_width(keys: int, values: int, dtype: torch.dtype) -> None:
    inputs, documents_BS = drawn(sum(LENGTHS), 2, keys, values, dtype), documents_of(LENGTHS)
    exact = results(reference, inputs, documents_BS, torch.float64)
    found = errors(results(gated_delta_rule, inputs, documents_BS), exact)
    bound = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}[dtype]
    assert max(found.values()) <= bound, found


@pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="flash-linear-attention is an alternative that need not be installed")
def test_errors_are_no_larger_than_those_of_fla() -> None:
    inputs, documents_BS = drawn(4096, 4, 128, 128, torch.bfloat16), documents_of((1024, 3000, 72))
    back = not peers.fla_refuses_here()
    exact = results(reference, inputs, documents_BS, torch.float64, back=back)
    mine, theirs = (errors(results(each, inputs, documents_BS, back=back), exact) for each in (gated_delta_rule, peers.fla))
    assert all(mine[name] <= 1.05 * theirs[name] for name in exact), (mine, theirs)


def test_packed_as_separate_and_equal_calls_as_equal_bits() -> None:
    inputs, documents_BS = drawn(sum(LENGTHS), 4, 128, 128, torch.bfloat16), documents_of(LENGTHS)
    packed, again = (results(gated_delta_rule, inputs, documents_BS, recompute=recompute) for recompute in (False, True))
    for name, value in packed.items():
        assert torch.equal(again[name], value), name
    start = 0
    for length in LENGTHS:
        alone, _ = gated_delta_rule(*(x[:, start : start + length] for x in inputs), scale=128**-0.5, normalise=True)
        torch.testing.assert_close(packed["y"][:, start : start + length], alone, rtol=2e-2, atol=2e-2)
        start += length


def test_the_host_never_waits_and_a_graph_can_hold_it() -> None:
    """Replayed on another packing, forward and backward give what they give outside the graph."""
    inputs = [x.requires_grad_() for x in drawn(2048, 4, 128, 128, torch.bfloat16)]
    x = torch.randn(1, 2048, 512, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(512, 4, device="cuda").requires_grad_()
    documents_BS, other_BS = documents_of((1000, 1048)), documents_of((64, 900, 1, 1083))

    def step() -> tuple[Tensor, ...]:
        y, _ = gated_delta_rule(*inputs, None, documents_BS, None, scale=128**-0.5, normalise=True)
        z, _ = short_conv(x, weight, None, documents_BS)
        return y, z, *torch.autograd.grad(y.float().square().sum() + z.float().square().sum(), [*inputs, x, weight])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    documents_BS.copy_(other_BS)
    graph.replay()
    for replayed, plain in zip(captured, step(), strict=True):
        assert torch.equal(replayed, plain)


def test_is_chosen_where_it_fits() -> None:
    selection = ops.select({}, plugins.current(), capabilities(), "bfloat16", compiled=True)
    for op in ("gated_delta_rule", "short_conv"):
        assert selection.choices[op].kernel == f"intarsia-kernels:{op}/triton", selection.choices[op]


def test_inside_a_compiled_region() -> None:
    inputs, documents_BS = drawn(512, 2, 64, 64, torch.bfloat16), documents_of((300, 212))
    plain = results(gated_delta_rule, inputs, documents_BS)
    compiled = results(torch.compile(gated_delta_rule, fullgraph=True), inputs, documents_BS)
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=2e-2, atol=2e-2)
