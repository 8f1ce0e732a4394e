"""Sampling against hand computation; text as it comes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_generation import SamplingConfig
from intarsia_generation.sampling import choose, draw, generator_for, keep_min_p, keep_top_k, keep_top_p, probabilities
from intarsia_generation.text import IncrementalText

# Probabilities 0.5, 0.25, 0.15, 0.1, in an order that is not sorted.
LOGITS_BV = torch.tensor([[0.15, 0.5, 0.1, 0.25]]).log()


def kept(logits_BV: torch.Tensor) -> list[int]:
    return torch.nonzero(logits_BV[0] > float("-inf")).flatten().tolist()


@pytest.mark.parametrize("k,expected", [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k(k, expected):
    assert kept(keep_top_k(LOGITS_BV, k)) == expected


@pytest.mark.parametrize("p,expected", [(0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.74, [1, 3]), (0.76, [0, 1, 3]), (0.91, [0, 1, 2, 3])])
def test_top_p(p, expected):
    assert kept(keep_top_p(LOGITS_BV, p)) == expected


@pytest.mark.parametrize("share,expected", [(0.19, [0, 1, 2, 3]), (0.21, [0, 1, 3]), (0.31, [1, 3]), (0.51, [1]), (1.0, [1])])
def test_min_p(share, expected):
    assert kept(keep_min_p(LOGITS_BV, share)) == expected


def test_rows_are_independent():
    both_BV = torch.cat((LOGITS_BV, LOGITS_BV.flip(-1)))
    for change in (lambda x: keep_top_k(x, 2), lambda x: keep_top_p(x, 0.6), lambda x: keep_min_p(x, 0.4)):
        assert torch.equal(change(both_BV)[1], change(LOGITS_BV.flip(-1))[0])


def test_the_order_is_temperature_top_k_top_p_min_p():
    # Temperature 0.5 squares: 0.0225, 0.25, 0.01, 0.0625 over 0.345. Of the best 3, 0.25/0.335 = 0.746, so top_p 0.8 keeps two: 0.8 and 0.2.
    config = SamplingConfig(temperature=0.5, top_k=3, top_p=0.8)
    torch.testing.assert_close(probabilities(LOGITS_BV, config), torch.tensor([[0.0, 0.8, 0.0, 0.2]]))
    config = SamplingConfig(temperature=0.5, top_k=3, top_p=0.8, min_p=0.3)
    torch.testing.assert_close(probabilities(LOGITS_BV, config), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    torch.testing.assert_close(probabilities(LOGITS_BV, SamplingConfig()), LOGITS_BV.exp())


def test_draw_inverts_the_cumulative_distribution():
    numbers_B = torch.tensor([0.0, 0.149, 0.151, 0.649, 0.651, 0.749, 0.751, 0.999999])
    assert draw(LOGITS_BV.exp().expand(8, 4), numbers_B).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # What is impossible is never drawn: at neither end, however the sum is rounded.
    assert draw(torch.tensor([[0.0, 0.5, 0.5, 0.0]]).expand(2, 4), torch.tensor([0.0, 1.0])).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-45, 1e-300, 1e30])
def test_any_temperature_gives_probabilities(temperature):
    found = probabilities(LOGITS_BV, SamplingConfig(temperature=temperature))
    torch.testing.assert_close(found.sum(-1), torch.ones(LOGITS_BV.shape[0]))
    if temperature < 1:
        assert found.argmax(-1).tolist() == LOGITS_BV.argmax(-1).tolist() and bool((found.amax(-1) == 1).all())


def test_frequencies_are_the_probabilities():
    random = torch.Generator().manual_seed(0)
    config = SamplingConfig(top_k=3)
    numbers = torch.rand(20000, generator=random, dtype=torch.float64)
    drawn = draw(probabilities(LOGITS_BV, config).expand(20000, 4), numbers)
    shares = torch.bincount(drawn, minlength=4) / 20000
    torch.testing.assert_close(shares, torch.tensor([0.15, 0.5, 0.0, 0.25]) / 0.9, atol=0.015, rtol=0)


def test_log_probabilities_are_the_models_own():
    tokens, log_probs = choose(LOGITS_BV + 3, SamplingConfig(temperature=0.0), [])
    assert tokens.tolist() == [1] and log_probs.item() == pytest.approx(math.log(0.5), abs=1e-6)
    tokens, log_probs = choose(LOGITS_BV, SamplingConfig(temperature=2.0, top_k=1), [torch.Generator().manual_seed(1)])
    assert tokens.tolist() == [1] and log_probs.item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_streams_depend_on_seed_prompt_and_sample_alone():
    def first(seed, prompt, sample):
        return torch.rand((), generator=generator_for(seed, prompt, sample)).item()

    assert first(0, (1, 2), 0) == first(0, (1, 2), 0)
    assert len({first(*key) for key in [(0, (1, 2), 0), (1, (1, 2), 0), (0, (1, 2), 1), (0, (12,), 0), (0, (1,), 0)]}) == 5


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_k", "top_p", "min_p", "samples"])
def test_settings_that_make_no_sense(field):
    with pytest.raises(UsageError, match=f"{field} is -1"):
        SamplingConfig(**{field: -1})
    with pytest.raises(UsageError, match="stop text is empty"):
        SamplingConfig(stop=("",))


# ---------------------------------------------------------------- text


def byte_tokenizer() -> Any:
    plugins = current()
    return plugins.build(plugins.config_class(plugins.registry("tokenizer").find("byte"))())


def shown(text: str | bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], IncrementalText]:
    """The pieces that are shown byte by byte, up to a stop, and the text."""
    data = text.encode() if isinstance(text, str) else text
    growing, pieces = IncrementalText(byte_tokenizer(), stop), []
    for number in data:
        pieces.append(growing.add(number))
        if growing.stopped_by:
            return pieces, growing
    pieces.append(growing.finish())
    return pieces, growing


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🎉!", "", "é"])
def test_characters_come_whole(text):
    pieces, growing = shown(text)
    assert "".join(pieces) == growing.text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert [piece for piece in pieces if piece] == list(text)


def test_broken_bytes_are_shown_as_such():
    data = b"a\xffb\xe4\xb8"
    pieces, growing = shown(data)
    assert growing.text == "".join(pieces) == data.decode("utf-8", "replace")
    pieces, growing = shown(b"\xff" * 40 + b"x")
    assert growing.text == "".join(pieces) and growing.text == "\N{REPLACEMENT CHARACTER}" * 40 + "x"
    assert any(pieces[:30]), "a run of broken bytes does not stall the stream for ever"


@pytest.mark.parametrize(
    "text,stop,expected,by",
    [
        ("one END two", ("END",), "one ", "END"),
        ("one EN END", ("END",), "one EN ", "END"),
        ("aab", ("ab",), "a", "ab"),
        ("x世界y", ("世界",), "x", "世界"),
        ("abcd", ("cd", "bc"), "a", "bc"),
        ("one EN", ("END",), "one EN", None),
        ("END", ("END",), "", "END"),
    ],
)
def test_stop_texts_across_tokens(text, stop, expected, by):
    pieces, growing = shown(text, stop)
    assert growing.text == "".join(pieces) == expected and growing.stopped_by == by


def test_nothing_of_a_possible_stop_text_is_shown_early():
    pieces, _ = shown("one EN", ("END",))
    assert pieces[:6] == ["o", "n", "e", " ", "", ""] and pieces[6] == "EN"


def test_spaces_that_depend_on_the_token_before():
    """A tokenizer that, like sentencepiece's, leaves out the first token's space."""

    class Words:
        words = ("▁one", "▁two", "s")

        def decode(self, ids):
            return "".join(self.words[number] for number in ids).replace("▁", " ").removeprefix(" ")

    growing: Any = IncrementalText(Words())  # type: ignore[arg-type]
    assert [growing.add(number) for number in (0, 1, 2, 1)] == ["one", " two", "s", " two"]
