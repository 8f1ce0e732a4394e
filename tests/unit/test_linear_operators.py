"""The operators of linear attention: chunks against steps, parts of rows against wholes, packed documents against documents alone, and gradients against differences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from intarsia.errors import UsageError
from intarsia_models_common.linear_attention import delta_rule
from intarsia_models_common.linear_attention.delta_rule import gated_delta_rule
from intarsia_models_common.linear_attention.short_conv import short_conv
from intarsia_models_common.linear_attention.updates import DeltaRuleUpdate, ShortConvUpdate
from torch import Tensor

ROWS, TOKENS, HEADS, KEYS, VALUES = 3, 37, 2, 5, 4
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 3 + [0] * 24, [0] * 37, [*range(20), *[20] * 17]], dtype=torch.int32)
COUNTS = torch.tensor([37, 20, 0])
SETTINGS: dict[str, Any] = {"scale": 0.3, "normalise": True}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(rows: int = ROWS, tokens: int = TOKENS) -> list[Tensor]:
    q, k = (drawn(rows, tokens, HEADS, KEYS, seed=seed) for seed in (1, 2))
    decay, beta = -3 * drawn(rows, tokens, HEADS, seed=4).abs(), drawn(rows, tokens, HEADS, seed=5).sigmoid()
    return [q, k, drawn(rows, tokens, HEADS, VALUES, seed=3), decay, beta]


def gradients(given: list[Tensor], state: Tensor | None, documents: Tensor | None, counts: Tensor | None, **settings: Any) -> list[Tensor]:
    """Outputs of real tokens, the state, and every gradient."""
    leaves = [x.clone().requires_grad_() for x in given]
    entering = None if state is None else state.clone().requires_grad_()
    y, after = gated_delta_rule(*leaves, entering, documents, counts, **SETTINGS, **settings)
    real = torch.ones(y.shape[:2], dtype=torch.bool) if counts is None else torch.arange(y.shape[1]) < counts[:, None]
    y = y * real[..., None, None]
    ((y * drawn(*y.shape, seed=6)).sum() + (after * drawn(*after.shape, seed=7)).sum()).backward()
    return [y.detach(), after.detach(), *(x.grad for x in leaves), *(() if entering is None else (entering.grad,))]  # type: ignore[misc]


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunks_equal_steps(chunk: int) -> None:
    """With and without documents, padding and a state that comes in; recomputed or kept."""
    state = drawn(ROWS, HEADS, KEYS, VALUES, seed=8)
    for documents, counts, entering in itertools.product((None, DOCUMENTS), (None, COUNTS), (None, state)):
        expected = gradients(inputs(), entering, documents, counts, form="recurrent")
        for recompute in (False, True):
            found = gradients(inputs(), entering, documents, counts, chunk=chunk, recompute=recompute)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_the_steps_are_the_definition() -> None:
    """Against the formula, written down for one row and one head."""
    q, k, v, decay, beta = (x[0, :, 0] for x in inputs())
    state, expected = torch.zeros(KEYS, VALUES, dtype=torch.float64), []
    unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6) ** -0.5 for x in (q, k)]
    for q_t, k_t, v_t, g_t, b_t in zip(*unit, v, decay, beta, strict=True):
        state = g_t.exp() * state
        state = state + b_t * torch.outer(k_t, v_t - state.T @ k_t)
        expected.append(0.3 * state.T @ q_t)
    y, after = gated_delta_rule(*inputs(), **SETTINGS, form="recurrent")
    torch.testing.assert_close(y[0, :, 0], torch.stack(expected))
    torch.testing.assert_close(after[0, 0], state)


def test_gradients_equal_differences() -> None:
    given = [x.requires_grad_() for x in inputs(2, 7)]
    state = drawn(2, HEADS, KEYS, VALUES, seed=8).requires_grad_()
    documents, counts = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0] * 7]), torch.tensor([7, 5])

    def run(*arguments: Tensor) -> Any:
        return gated_delta_rule(*arguments, documents, counts, **SETTINGS, chunk=3)

    assert torch.autograd.gradcheck(run, (*given, state))


def test_documents_packed_equal_documents_alone() -> None:
    given, lengths = inputs(1), (5, 1, 20, 11)
    documents = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]])
    y, after = gated_delta_rule(*given, None, documents, **SETTINGS, chunk=8)
    start = 0
    for length in lengths:
        alone, last = gated_delta_rule(*(x[:, start : start + length] for x in given), **SETTINGS, chunk=8)
        torch.testing.assert_close(y[:, start : start + length], alone)
        start += length
    torch.testing.assert_close(after, last)


def test_strong_decays_stay_exact_and_finite() -> None:
    """A forgetful stretch before a faithful one, in float32: differences of long sums would cancel; minus infinity is a decay as well."""
    q, k, v, decay, beta = (x.float() for x in inputs(1))
    decay = torch.where(torch.arange(TOKENS) < 20, -3000.0, -0.01)[None, :, None].expand(-1, -1, HEADS)
    exact, _ = gated_delta_rule(*(x.double() for x in (q, k, v, decay, beta)), **SETTINGS, form="recurrent")
    found, _ = gated_delta_rule(q, k, v, decay, beta, **SETTINGS)
    assert (found - exact).abs().max() < 1e-6
    forgetting = decay.clone()
    forgetting[:, 11] = -torch.inf
    leaf = forgetting.requires_grad_()
    y, after = gated_delta_rule(q, k, v, leaf, beta, **SETTINGS)
    (y.sum() + after.sum()).backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all() and y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_inside_is_float32(dtype: torch.dtype) -> None:
    """Outputs are values' dtype and states float32, as near to float64 as their own rounding."""
    given = [x.to(dtype) for x in inputs()[:3]] + [x.float() for x in inputs()[3:]]
    exact, state = gated_delta_rule(*(x.double() for x in given), **SETTINGS)
    y, after = gated_delta_rule(*given, **SETTINGS)
    assert (y.dtype, after.dtype) == (dtype, torch.float32)
    assert (y - exact).abs().max() < (4e-3 if dtype == torch.bfloat16 else 1e-6) * exact.abs().max()
    assert (after - state).abs().max() < 1e-6 * state.abs().max()


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_what_stands_behind_a_rows_count_says_nothing_whatever_it_is(form: str) -> None:
    """NaN in padding, as attention over nothing leaves it, reaches neither the state nor real tokens, nor any gradient."""
    real = torch.arange(TOKENS) < COUNTS[:, None]
    padded = [x.masked_fill(~real.view(ROWS, TOKENS, *[1] * (x.ndim - 2)), float("nan")) for x in inputs()]
    state = drawn(ROWS, HEADS, KEYS, VALUES, seed=8)
    y, after = gated_delta_rule(*padded, state, None, COUNTS, **SETTINGS, form=form)
    assert torch.equal(after[2], state[2]) and bool(after.isfinite().all()) and bool(y[real].isfinite().all())
    expected = gradients(inputs(), state, DOCUMENTS, COUNTS, form=form)
    leaves = [x.requires_grad_() for x in padded]
    y, after = gated_delta_rule(*leaves, state, DOCUMENTS, COUNTS, **SETTINGS, form=form)
    ((y * drawn(*y.shape, seed=6))[real].sum() + (after * drawn(*after.shape, seed=7)).sum()).backward()
    for one, other in zip([after, *(x.grad for x in leaves)], expected[1:], strict=False):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_nothing_and_nobody_are_ordinary() -> None:
    state, past = drawn(ROWS, HEADS, KEYS, VALUES), drawn(ROWS, 3, 6)
    given = [x[:, :0].requires_grad_() for x in inputs()]
    y, after = gated_delta_rule(*given, state, DOCUMENTS[:, :0], **SETTINGS)
    (y.sum() + after.sum()).backward()
    assert y.shape == (ROWS, 0, HEADS, VALUES) and torch.equal(after, state) and all(x.grad is not None for x in given)
    y, after = gated_delta_rule(*(x[:0] for x in inputs()), None, DOCUMENTS[:0], **SETTINGS)
    assert y.shape == (0, TOKENS, HEADS, VALUES) and after.shape == (0, HEADS, KEYS, VALUES)
    y, kept = short_conv(drawn(ROWS, 0, 6), drawn(6, 4), past, DOCUMENTS[:, :0])
    assert y.shape == (ROWS, 0, 6) and torch.equal(kept, past)


def test_recomputed_chunks_keep_only_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd holds for backward grows with the tokens' inputs and the state that enters each span, not with what is between."""
    monkeypatch.setattr(delta_rule, "SPAN", 2)

    def held(recompute: bool) -> int:
        leaves = [x.requires_grad_() for x in inputs(1, 64)]
        storages: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y, _ = gated_delta_rule(*leaves, **SETTINGS, chunk=8, recompute=recompute)
        own = {x.untyped_storage().data_ptr() for x in leaves}
        assert y.requires_grad
        return sum(size for where, size in storages.items() if where not in own)

    states = 4 * HEADS * KEYS * VALUES * 8
    assert held(True) <= states < held(False)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UsageError, match=r"form is 'chunk'.*chunked"):
        gated_delta_rule(*inputs(), **SETTINGS, form="chunk")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="chunk is 0"):
        gated_delta_rule(*inputs(), **SETTINGS, chunk=0)
    with pytest.raises(UsageError, match="activation is 'relu'"):
        short_conv(drawn(1, 2, 3), drawn(3, 4), activation="relu")  # type: ignore[arg-type]


# ---------------------------------------------------------------- the convolution


def test_the_convolution_is_torchs() -> None:
    x, weight = drawn(2, 11, 6), drawn(6, 4, seed=1)
    sums = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], groups=6, padding=3)[..., :11].transpose(1, 2)
    torch.testing.assert_close(short_conv(x, weight, activation="none")[0], sums)
    y, after = short_conv(x, weight)
    torch.testing.assert_close(y, torch.nn.functional.silu(sums))
    assert torch.equal(after, x[:, -3:])
    large = torch.full((1, 2, 1), -1e4)
    assert torch.equal(short_conv(large, torch.ones(1, 1))[0], -torch.zeros(1, 2, 1))


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_convolutions_gradients_equal_differences(taps: int) -> None:
    x, weight, past = (
        drawn(3, 9, 2).requires_grad_(),
        drawn(2, taps, seed=1).requires_grad_(),
        drawn(3, taps - 1, 2, seed=2).requires_grad_(),
    )
    documents, counts = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1, 2], [0] * 9]), torch.tensor([9, 8, 1])
    assert torch.autograd.gradcheck(lambda *given: short_conv(*given, documents, counts), (x, weight, past))


def test_a_convolution_goes_on_from_its_state() -> None:
    """In pieces of any length, with documents that begin at borders and within, and rows padded behind their counts."""
    x, weight = drawn(ROWS, TOKENS, 6), drawn(6, 4, seed=1)
    for documents in (None, DOCUMENTS):
        whole, last = short_conv(x, weight, None, documents)
        for size in (1, 2, 5):
            state, parts = None, []
            for start in range(0, TOKENS, size):
                at = slice(start, start + size)
                numbers = None
                if documents is not None:
                    numbers = documents[:, at]
                    if state is not None:
                        goes_on = documents[:, start] == documents[:, start - 1]
                        state = torch.where(goes_on[:, None, None], state, 0.0)
                y, state = short_conv(x[:, at], weight, state, numbers)
                parts.append(y)
            torch.testing.assert_close(torch.cat(parts, 1), whole)
            torch.testing.assert_close(state, last)
    padded, kept = short_conv(x, weight, drawn(ROWS, 3, 6, seed=3), DOCUMENTS, COUNTS)
    alone, after = short_conv(x[1:2, :20], weight, drawn(ROWS, 3, 6, seed=3)[1:2], DOCUMENTS[1:2, :20])
    torch.testing.assert_close(padded[1:2, :20], alone)
    torch.testing.assert_close(kept[1:2], after)
    assert torch.equal(kept[2], drawn(ROWS, 3, 6, seed=3)[2])


# ---------------------------------------------------------------- parts of rows


@pytest.mark.parametrize("update", ["conv", "delta"])
def test_carries_combine_to_the_whole(update: str) -> None:
    """Cut anywhere, in parts of no tokens and of fewer than the taps: the carry of two parts is the carry of both, and what it makes of a state is what the tokens make of it."""
    made: Any = ShortConvUpdate() if update == "conv" else DeltaRuleUpdate()
    given = [drawn(ROWS, TOKENS, 6)] if update == "conv" else inputs()
    settings: dict[str, Any] = {"weight_CK": drawn(6, 4, seed=1)} if update == "conv" else {**SETTINGS, "chunk": 8}
    state = drawn(ROWS, 3, 6, seed=3) if update == "conv" else drawn(ROWS, HEADS, KEYS, VALUES, seed=3)
    whole = made.carry(*given, documents_BS=None, **settings)
    unmoved = [torch.zeros(ROWS, dtype=torch.int64), state] if update == "conv" else [torch.zeros(ROWS, HEADS, KEYS, KEYS).double(), state]
    for cut in (0, 1, 2, 3, 17, 35, 36, 37):
        parts = [made.carry(*(x[:, at] for x in given), documents_BS=None, **settings) for at in (slice(cut), slice(cut, None))]
        for one, other in zip(made.combine(*parts), whole, strict=True):
            torch.testing.assert_close(one, other)
        some = [x[:, :cut] for x in given]
        _, after = made(*some, state=state, documents_BS=None, **settings)
        torch.testing.assert_close(made.combine(unmoved, parts[0])[-1], after)
    for documents, counts in itertools.product((None, DOCUMENTS), (None, COUNTS)):
        carried = made.carry(*given, documents_BS=documents, counts_B=counts, **settings)
        _, after = made(*given, state=state, documents_BS=documents, counts_B=counts, **settings)
        torch.testing.assert_close(made.combine(unmoved, carried)[-1], after)
