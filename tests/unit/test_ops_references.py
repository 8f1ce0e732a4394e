"""The references against formulas written out, element by element, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from intarsia import ops
from intarsia.ops import attention_reference


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(q, k, v, scale, seen, softcap=None, sinks=None):
    """Attention, one query of one head of one row at a time; `seen(b, s, t)` says which key is visible."""
    rows, queries, heads, _ = q.shape
    out = torch.zeros(rows, queries, heads, v.shape[-1], dtype=q.dtype)
    for b, s, h in itertools.product(range(rows), range(queries), range(heads)):
        keys = [t for t in range(k.shape[1]) if seen(b, s, t)]
        group = h // (heads // k.shape[2])
        scores = (k[b, keys, group] @ q[b, s, h]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[h : h + 1]))
        if len(keys):
            out[b, s, h] = scores.softmax(0)[: len(keys)] @ v[b, keys, group]
    return out


LENGTHS = ((3, 1, 4, 5), (13,))
DOCUMENTS = torch.tensor([[0] * 3 + [1] + [2] * 4 + [3] * 5, [0] * 13])


@pytest.mark.parametrize("window,softcap,sinks", list(itertools.product((None, 3), (None, 2.0), (False, True))))
def test_attention_packed(window, softcap, sinks):
    q, k, v, sink = normal(2, 13, 4, 6), normal(2, 13, 2, 6, seed=1), normal(2, 13, 2, 5, seed=2), normal(4, seed=3) if sinks else None

    def seen(b, s, t):
        return DOCUMENTS[b, s] == DOCUMENTS[b, t] and 0 <= s - t < (window or 99)

    found = ops.attention(
        q, k, v, scale=0.4, window=window, softcap=softcap, sinks_H=sink, documents_q_BS=DOCUMENTS, documents_k_BT=DOCUMENTS
    )
    assert torch.allclose(found, by_hand(q, k, v, 0.4, seen, softcap, sink), atol=1e-13)


def test_attention_over_slots_with_positions():
    q, k, v = normal(2, 2, 2, 4), normal(2, 9, 1, 4, seed=1), normal(2, 9, 1, 4, seed=2)
    positions_q = torch.tensor([[4, 5], [0, 1]])
    positions_k = torch.randperm(9, generator=torch.Generator().manual_seed(0)).expand(2, 9)
    slots = torch.tensor([[0, 0, -1, 0, 0, 0, 0, 0, 0], [-1] * 9])

    def seen(b, s, t):
        return slots[b, t] == 0 and 0 <= positions_q[b, s] - positions_k[b, t] < 4

    found = ops.attention(
        q,
        k,
        v,
        scale=0.5,
        window=4,
        documents_q_BS=torch.zeros(2, 2),
        documents_k_BT=slots,
        positions_q_BS=positions_q,
        positions_k_BT=positions_k,
    )
    assert torch.allclose(found, by_hand(q, k, v, 0.5, seen), atol=1e-13)
    assert not found[1].any(), "a query that sees nothing gives 0"


def test_attention_aligns_queries_with_the_end():
    q, k, v = normal(1, 3, 1, 4), normal(1, 7, 1, 4, seed=1), normal(1, 7, 1, 4, seed=2)
    assert torch.allclose(ops.attention(q, k, v, scale=1.0), by_hand(q, k, v, 1.0, lambda b, s, t: t <= s + 4), atol=1e-13)


def test_attention_in_chunks_is_the_same(monkeypatch):
    tensors = [
        normal(2, 13, 4, 6).requires_grad_(),
        normal(2, 13, 2, 6, seed=1).requires_grad_(),
        normal(2, 13, 2, 6, seed=2).requires_grad_(),
    ]
    sinks = normal(4, seed=3).requires_grad_()

    def results():
        y = ops.attention(*tensors, scale=0.4, window=5, softcap=3.0, sinks_H=sinks, documents_q_BS=DOCUMENTS, documents_k_BT=DOCUMENTS)
        return y, *torch.autograd.grad(y.sin().sum(), [*tensors, sinks])

    whole = results()
    monkeypatch.setattr(attention_reference, "SCORE_ELEMENTS", 2 * 4 * 13 * 3)
    shapes = []
    inner = attention_reference._attend
    monkeypatch.setattr(attention_reference, "_attend", lambda q, *rest: (shapes.append(q.shape[3]), inner(q, *rest))[1])
    for one, other in zip(whole, results(), strict=True):
        assert torch.allclose(one, other, atol=1e-13)
    assert max(shapes) == 3, "no more than three queries' scores exist at once"


def test_attention_gradients_where_nothing_is_seen():
    q, k, v = normal(1, 1, 1, 4).requires_grad_(), normal(1, 3, 1, 4).requires_grad_(), normal(1, 3, 1, 4).requires_grad_()
    empty = torch.full((1, 3), -1)
    y = ops.attention(q, k, v, scale=1.0, documents_q_BS=torch.zeros(1, 1), documents_k_BT=empty)
    for gradient in torch.autograd.grad(y.sum(), (q, k, v)):
        assert not gradient.any() and gradient.isfinite().all()


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_cross_entropy(softcap, chunk):
    hidden, weight = normal(20, 6).requires_grad_(), normal(11, 6, seed=1).requires_grad_()
    labels = torch.arange(20) % 11
    labels[::3] = -100
    logits = hidden @ weight.t()
    exact = F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), labels, reduction="sum")
    found = ops.cross_entropy(hidden, weight, labels, softcap=softcap, chunk=chunk)
    assert torch.allclose(found, exact, atol=1e-12)
    pairs = zip(torch.autograd.grad(found * 0.3, (hidden, weight)), torch.autograd.grad(exact * 0.3, (hidden, weight)), strict=True)
    for one, other in pairs:
        assert torch.allclose(one, other, atol=1e-12)


def test_cross_entropy_with_nothing_to_count():
    hidden, weight = normal(5, 3).requires_grad_(), normal(4, 3).requires_grad_()
    loss = ops.cross_entropy(hidden, weight, torch.full((5,), -100))
    assert loss.item() == 0.0
    loss.backward()
    assert not hidden.grad.any() and not weight.grad.any()
    empty = ops.cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    assert empty.item() == 0.0 and empty.requires_grad


def test_cross_entropy_in_bfloat16_sums_in_float32():
    hidden, weight = normal(300, 32).bfloat16().requires_grad_(), (normal(64, 32, seed=1) / 6).bfloat16().requires_grad_()
    labels = torch.arange(300) % 64
    loss = ops.cross_entropy(hidden, weight, labels, chunk=16)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = F.cross_entropy(wide[0] @ wide[1].t(), labels, reduction="sum")
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=2e-3)
    found, expected = torch.autograd.grad(loss / 300, (hidden, weight)), torch.autograd.grad(exact / 300, wide)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() / other.norm() < 5e-3


def test_cross_entropy_never_makes_all_logits():
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden, weight = normal(256, 8).requires_grad_(), normal(500, 8).requires_grad_()
    with Watch():
        ops.cross_entropy(hidden, weight, torch.arange(256), chunk=16).backward()
    assert largest == 16 * 500


def test_cross_entropy_inside_a_compiled_region():
    hidden, weight = normal(20, 6).requires_grad_(), normal(11, 6, seed=1).requires_grad_()
    labels = torch.arange(20) % 11
    compiled = torch.compile(lambda h, w: ops.cross_entropy(h, w, labels, chunk=8), fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(f(hidden, weight), (hidden, weight)) for f in (compiled, lambda h, w: ops.cross_entropy(h, w, labels))]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_rope_interleaved_is_complex_multiplication():
    x, angles = normal(2, 5, 3, 10).float(), normal(2, 5, 4).float()
    found = ops.rope(x, angles.cos(), angles.sin(), True)
    pairs = torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    assert torch.allclose(found[..., :8], torch.view_as_real(turned).flatten(-2), atol=1e-6)
    assert torch.equal(found[..., 8:], x[..., 8:]), "dimensions beyond the rotated ones pass unchanged"
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    assert torch.equal(ops.rope(x[..., order], angles.cos(), angles.sin()), found[..., order]), (
        "half-split is the same with the pairs laid out apart"
    )


def test_rope_keeps_products_of_query_and_key_where_their_distance_is_equal():
    x, y = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)

    def product(a, b):
        first, second = (ops.rope(t, (n * frequencies).cos()[None, None], (n * frequencies).sin()[None, None]) for t, n in ((x, a), (y, b)))
        return (first * second).sum().item()

    assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-12)


def test_rms_norm_multiplies_by_the_weight_after_the_cast():
    x, weight = normal(64, 32).bfloat16(), (1 + 0.1 * normal(32)).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), normed.bfloat16() * weight)
    assert torch.allclose(ops.rms_norm(x.float(), weight.float(), 1e-5), normed * weight.float(), atol=1e-6)
    assert torch.equal(ops.rms_norm(x, None, 1e-5), normed.bfloat16())


def test_swiglu_and_embedding():
    gate, up = normal(3, 4), normal(3, 4, seed=1)
    assert torch.allclose(ops.swiglu(gate, up), gate * torch.sigmoid(gate) * up)
    assert torch.equal(ops.embedding(torch.tensor([[2, 0]]), gate), gate[[2, 0]][None])
