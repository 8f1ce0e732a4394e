"""A row's bits do not depend on the batch: products at odd sizes, alignments and threads; attention packed, paged, chunked, decoded; what the table says of torch's own functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from intarsia import ops
from intarsia.errors import UsageError
from intarsia_kernels.invariant import products
from intarsia_kernels.invariant.attention import attention
from intarsia_kernels.invariant.experts import grouped_linear
from intarsia_kernels.invariant.pointwise import router_sigmoid, sigmoid_gate, swiglu
from intarsia_kernels.invariant.products import product
from intarsia_models_common.norm import offset_rms_norm
from intarsia_rl.algorithms.operators import token_log_probs

DTYPES = (torch.float32, torch.bfloat16)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 5), (15, 63), (64, 1), (100, 7), (256, 96), (257, 513)])
def test_a_row_of_a_product_is_the_same_among_any_number_of_rows(dtype, inputs, outputs):
    x, weight = normal(700, inputs, dtype=dtype), normal(outputs, inputs, seed=1, dtype=dtype)
    whole = product(x, weight)
    shifted = torch.empty(inputs * outputs + 8, dtype=dtype)[3 : 3 + inputs * outputs].view(outputs, inputs).copy_(weight)
    for count in (1, 2):
        with threads(count):
            for first, rows in ((0, 1), (5, 1), (7, 2), (3, 3), (1, 15), (0, 16), (9, 17), (4, 100), (0, 700)):
                chosen = slice(first, first + rows)
                assert torch.equal(product(x[chosen], weight), whole[chosen])
                assert torch.equal(product(x[chosen], shifted), whole[chosen])
                assert torch.equal(product(x[chosen], weight.t().contiguous().t()), whole[chosen])


def test_what_is_not_as_its_tiles_is_made_of_them(monkeypatch):
    x, weight = normal(50, 64), normal(40, 64, seed=1)
    expected = product(x, weight)
    monkeypatch.setattr(products, "_whole", {})
    monkeypatch.setattr(products, "_is_by_tiles", lambda *_: False)
    assert torch.equal(product(x, weight), expected) and torch.equal(product(x, weight), expected)


def test_a_machine_whose_products_depend_on_the_place_in_a_tile_is_refused(monkeypatch):
    real = torch.mm
    monkeypatch.setattr(products, "_whole", {})
    monkeypatch.setattr(torch, "mm", lambda a, b: real(a, b) + torch.arange(a.shape[0])[:, None] * 1e-6)
    with pytest.raises(UsageError, match="depends on a row's place in a tile"):
        product(normal(16, 64), normal(40, 64, seed=1))


def attend(q, k, v, **settings):
    return attention(q, k, v, scale=0.3, **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [{}, {"window": 9}, {"softcap": 3.0}, {"window": 40, "sinks": True}])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "values"), [(4, 2, 24, 24), (3, 3, 40, 16)])
def test_attention_gives_one_result_for_a_token_however_it_comes(dtype, settings, heads, kv_heads, dim, values):
    settings = dict(settings)
    if settings.pop("sinks", False):
        settings["sinks_H"] = normal(heads, seed=9)
    lengths = (1, 15, 16, 17, 70, 33)
    sequences = [
        (
            normal(1, n, heads, dim, seed=n, dtype=dtype),
            normal(1, n, kv_heads, dim, seed=n + 100, dtype=dtype),
            normal(1, n, kv_heads, values, seed=n + 200, dtype=dtype),
        )
        for n in lengths
    ]
    alone = [attend(*each, **settings) for each in sequences]
    packed = [torch.cat(parts, 1) for parts in zip(*sequences, strict=True)]
    documents = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1)
    both = {"documents_q_BS": documents, "documents_k_BT": documents}
    together = attend(*packed, **both, **settings)
    known = attend(*packed, **both, packing=ops.Packing((lengths,)), **settings)
    assert torch.equal(together, torch.cat(alone, 1)) and torch.equal(known, together)
    width = max(lengths)
    padded = [
        torch.cat([F.pad(part, (0, 0, 0, 0, 0, width - part.shape[1]), value=7.0) for part in parts])
        for parts in zip(*sequences, strict=True)
    ]
    for b, (n, expected) in enumerate(zip(lengths, alone, strict=True)):
        assert torch.equal(attend(*padded, **settings)[b, :n], expected[0])
    q, k, v = sequences[4]
    for first, last in ((0, 7), (7, 39), (39, 40), (69, 70)):
        order = torch.randperm(90, generator=torch.Generator().manual_seed(first))  # slots of a cache, some empty
        slots = torch.full((1, 90), -1)
        slots[0, order[:last]] = torch.arange(last)
        pages = [torch.full((1, 90, *part.shape[2:]), 5.0, dtype=dtype) for part in (k, v)]
        for page, part in zip(pages, (k, v), strict=True):
            page[0, order[:last]] = part[0, :last]
        place = {"positions_q_BS": torch.arange(first, last)[None], "positions_k_BT": slots, "documents_k_BT": slots.clamp(max=0)}
        assert torch.equal(attend(q[:, first:last], *pages, **place, **settings), alone[4][:, first:last])
        with threads(2):
            assert torch.equal(attend(q[:, first:last], k[:, :last], v[:, :last], **settings), alone[4][:, first:last])


def test_two_keys_at_one_position_are_refused():
    q = normal(1, 2, 1, 8)
    with pytest.raises(UsageError, match="two keys of one document have the same position"):
        attend(q, q, q, positions_q_BS=torch.tensor([[0, 1]]), positions_k_BT=torch.tensor([[1, 1]]))


def test_gradients_of_attention_repeat():
    def gradients():
        leaves = [normal(2, 75, heads, 16, seed=heads).requires_grad_() for heads in (4, 2, 2)]
        return torch.autograd.grad(attend(*leaves).cos().sum(), leaves)

    assert all(torch.equal(one, other) for one, other in zip(gradients(), gradients(), strict=True))


def test_rows_of_experts_do_not_depend_on_who_else_came():
    x, weight = normal(90, 48), normal(3, 20, 48, seed=1)
    whole = grouped_linear(x, weight, torch.tensor([40, 0, 50]))
    assert torch.equal(grouped_linear(x[39:43], weight, torch.tensor([1, 0, 3])), whole[39:43])


@pytest.mark.parametrize("count", [1, 2])
def test_the_tables_single_elements_and_rows_are_independent(count):
    """At sizes that are no multiples of a vector, from one row to more than torch gives to one thread."""
    functions = {
        "swiglu": lambda x: swiglu(x, x.flip(1)),
        "router_sigmoid": router_sigmoid,
        "sigmoid_gate": lambda x: sigmoid_gate(x, x.flip(1)),
        "offset_rms_norm": lambda x: offset_rms_norm.reference(x, x.new_full(x.shape[1:], 0.3), 1e-6),
        "rms_norm": lambda x: ops.rms_norm.reference(x, None, 1e-5),
        "log_softmax": lambda x: x.float().log_softmax(-1),
        "softmax": lambda x: x.softmax(-1),
        "cos": torch.cos,
        "sum of few": lambda x: x[:, :8].sum(-1),
    }
    for dim in (1, 3, 7, 63, 100, 300, 1000):
        for dtype in DTYPES:
            x = normal(257, dim, seed=dim, dtype=dtype)
            for name, function in functions.items():
                whole = function(x)
                with threads(count):
                    for first, rows in ((0, 1), (3, 1), (2, 5), (7, 16), (1, 100), (0, 257)):
                        chosen = slice(first, first + rows)
                        assert torch.equal(function(x[chosen]), whole[chosen]), (name, dim, dtype, rows)


def test_rope_turns_each_head_by_itself():
    for heads, pairs in ((1, 5), (3, 16)):
        x, angles = normal(3, 333, heads, 2 * pairs), 10 * normal(3, 333, pairs, seed=1)
        whole = ops.rope.reference(x, angles.cos(), angles.sin())
        for chosen in (slice(0, 1), slice(5, 12), slice(3, 200)):
            part = angles[1:2, chosen]
            assert torch.equal(ops.rope.reference(x[1:2, chosen], part.cos(), part.sin()), whole[1:2, chosen])


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_of_tokens_are_those_of_projected_logits(dtype):
    """The loss and a sampler get the same bits, one from hidden states of many tokens and the other from one token's logits."""
    from intarsia_kernels.invariant.linear import linear

    hidden, weight = normal(70, 48, dtype=dtype), normal(300, 48, seed=1, dtype=dtype)
    tokens = torch.arange(70) * 7 % 300
    with ops.installed({"linear": ops.Choice("tiled", "test", linear)}):
        chosen, _ = token_log_probs(hidden, weight, tokens, chunk=32)
        for n in (0, 31, 32, 69):
            logits = ops.linear(hidden[n : n + 1], weight)
            assert float(logits.float().log_softmax(-1)[0, tokens[n]]) == float(chosen[n])
