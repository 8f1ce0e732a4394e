"""The batch-invariant kernels on a GPU: promises of kernels, bits that do not depend on the batch, backward that repeats, and every relation of `intarsia rl parity` on a small model.

Start it with CUBLAS_WORKSPACE_CONFIG=:0:0, which `linear/unsplit` asks for.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from intarsia import ops, plugins
from intarsia.config import resolve
from intarsia.errors import UsageError
from intarsia_testing.kernel import KernelConformance

pytestmark = pytest.mark.gpu

needs_workspace = pytest.mark.skipif(
    os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ":0:0", reason="start with CUBLAS_WORKSPACE_CONFIG=:0:0, which linear/unsplit asks for"
)
SHAPES = ((2048, 2048), (2048, 8192), (8192, 2048), (4096, 1024), (7168, 256), (2048, 1000))
ROWS = (1, 2, 3, 8, 16, 17, 48, 63, 64, 65, 128, 257, 1000)


class TestAscending(KernelConformance):
    op, entry = "linear", "intarsia-kernels:linear/ascending"


class TestRouter(KernelConformance):
    op, entry = "router_linear", "intarsia-kernels:router_linear/ascending"


class TestBlocks(KernelConformance):
    op, entry = "attention", "intarsia-kernels:attention/blocks"


class TestBlocksFlash(KernelConformance):
    op, entry = "attention", "intarsia-kernels:attention/blocks_flash"


class TestRope(KernelConformance):
    op, entry = "rope", "intarsia-kernels:rope/fused"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def target(op: str, name: str):
    found = plugins.current()
    return found.target(found.registry("kernel").find(name, op=op))


@pytest.mark.parametrize("name", ["linear/ascending", pytest.param("linear/unsplit", marks=needs_workspace)])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_of_a_product_is_the_same_among_any_number_of_rows(name, inputs, outputs):
    linear = target("linear", name)
    x, weight = normal(8192, inputs), normal(outputs, inputs, seed=1) / inputs**0.5
    whole = linear(x, weight)
    for rows in ROWS:
        for first in (0, 77):
            assert torch.equal(linear(x[first : first + rows], weight), whole[first : first + rows]), (rows, first)


@needs_workspace
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_both_products_have_the_same_bits(inputs, outputs):
    x, weight = normal(512, inputs), normal(outputs, inputs, seed=1) / inputs**0.5
    assert torch.equal(target("linear", "linear/ascending")(x, weight), target("linear", "linear/unsplit")(x, weight))


def test_without_the_variable_the_unsplit_product_refuses(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(UsageError, match="CUBLAS_WORKSPACE_CONFIG=:0:0"):
        target("linear", "linear/unsplit")(normal(2, 64), normal(64, 64))


def test_a_routers_float32_product_is_the_same_among_any_number_of_rows():
    linear = target("router_linear", "router_linear/ascending")
    x, weight = normal(4096, 7168), normal(256, 7168, seed=1, dtype=torch.float32)
    whole = linear(x, weight)
    for rows in ROWS:
        assert torch.equal(linear(x[5 : 5 + rows], weight), whole[5 : 5 + rows]), rows


@pytest.mark.parametrize("name", ["attention/blocks", "attention/unsplit"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 64), (32, 8, 128), (8, 8, 64)])
def test_attention_gives_one_result_for_a_token_however_it_comes(name, heads, kv_heads, dim):
    attention = target("attention", name)
    lengths = (1, 63, 64, 65, 700, 2000)
    scale = dim**-0.5
    q, k, v = (normal(1, sum(lengths), n, dim, seed=s) for s, n in enumerate((heads, kv_heads, kv_heads)))
    documents = torch.cat([torch.full((1, n), i, dtype=torch.int32, device="cuda") for i, n in enumerate(lengths)], 1)
    packed = attention(q, k, v, scale=scale, documents_q_BS=documents, documents_k_BT=documents, packing=ops.Packing((lengths,)))
    start = 0
    for length in lengths:
        own = [x[:, start : start + length] for x in (q, k, v)]
        alone = attention(*own, scale=scale)
        assert torch.equal(packed[:, start : start + length], alone), length
        for position in {0, length // 2, length - 1}:
            place = {
                "positions_q_BS": torch.tensor([[position]], device="cuda"),
                "positions_k_BT": torch.arange(length, device="cuda")[None],
            }
            one = attention(own[0][:, position : position + 1], own[1], own[2], scale=scale, **place)
            assert torch.equal(one, alone[:, position : position + 1]), (length, position)
        start += length
    # Decoding of many requests of different lengths, from slots with stale entries behind each end.
    rows = [(5, 700), (64, 700), (699, 700)]
    first = sum(lengths[:4])
    pages = [x[:, first : first + 700].expand(3, -1, -1, -1) for x in (k, v)]
    ends = torch.tensor([[position] for position, _ in rows], device="cuda")
    queries = torch.cat([q[:, first + position : first + position + 1] for position, _ in rows])
    found = attention(queries, *pages, scale=scale, positions_q_BS=ends, positions_k_BT=torch.arange(700, device="cuda")[None])
    for b, (position, _) in enumerate(rows):
        assert torch.equal(found[b], packed[0, first + position : first + position + 1])


def blocks(name):
    """The result and gradients of rows of several documents."""
    attention = target("attention", f"attention/{name}")
    leaves = [normal(2, 3000, n, 64, seed=n).requires_grad_() for n in (32, 8, 8)]
    documents = torch.cat([torch.full((2, n), i, dtype=torch.int32, device="cuda") for i, n in enumerate((1000, 1, 1999))], 1)
    mask = {"documents_q_BS": documents, "documents_k_BT": documents, "packing": ops.Packing(((1000, 1, 1999),) * 2)}
    out = attention(*leaves, scale=0.125, **mask)
    return [out.detach(), *torch.autograd.grad(out.float().cos().sum(), leaves)]


@pytest.mark.parametrize("name", ["blocks", "blocks_flash"])
def test_the_backward_of_blocks_repeats(name):
    assert all(torch.equal(first, second) for first, second in zip(blocks(name), blocks(name), strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


def test_blocks_have_one_result_and_near_gradients_by_either_backward():
    (one, *grads), (other, *others) = blocks("blocks"), blocks("blocks_flash")
    assert torch.equal(one, other)
    for first, second in zip(grads, others, strict=True):
        assert float((first.float() - second.float()).norm() / first.float().norm()) < 0.02


@pytest.mark.parametrize("name", ["intarsia-kernels:triton", "reference"])
def test_a_norms_rows_are_independent(name):
    norm = target("rms_norm", name) if name != "reference" else ops.rms_norm.reference
    for dim in (64, 2048, 7168):
        x, weight = normal(4096, dim), normal(dim, seed=1)
        whole = norm(x, weight, 1e-5)
        for rows in ROWS:
            assert torch.equal(norm(x[3 : 3 + rows], weight, 1e-5), whole[3 : 3 + rows]), (dim, rows)


def test_torchs_own_rows_are_independent():
    for dim in (64, 2048, 7168):
        x = normal(4096, dim)
        for function in (lambda x: ops.rms_norm.reference(x, None, 1e-5), lambda x: F.silu(x) * x, lambda x: x.float().log_softmax(-1)):
            whole = function(x)
            for rows in ROWS:
                assert torch.equal(function(x[3 : 3 + rows]), whole[3 : 3 + rows]), (dim, rows)


@pytest.mark.parametrize("name", ["llama3/debug", "deepseek_v3/debug"])
@pytest.mark.parametrize(
    "kernels",
    [
        ("linear=ascending", "attention=blocks"),
        ("linear=ascending", "attention=blocks_flash", "rms_norm=reference", "rope=reference", "swiglu=reference"),
        pytest.param(("linear=unsplit", "attention=unsplit", "paged_attention=reference"), marks=needs_workspace),
    ],
)
def test_every_relation_holds(name, kernels):
    from intarsia_rl.invariant.parity.relations import Parity, Settings

    overrides = ("train.device=cuda", "precision.compute=bfloat16", *(f"kernels.{kernel}" for kernel in kernels))
    recipe = resolve(name, overrides, ("batch_invariant",)).recipe
    for outcome in Parity(recipe, plugins.current(), Settings(sequences=4, tokens=96)).outcomes():
        assert outcome.equal, outcome
