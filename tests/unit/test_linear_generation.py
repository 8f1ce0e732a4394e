"""States in generation: ragged batches, pieces of prompts, selection, preemption and swaps of weights give what one pass over the whole sequence gives."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

import pytest
import torch
from intarsia import ops
from intarsia.contracts import CacheSpec, MixerSpec
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_generation import CacheContext, Generator, SamplingConfig
from intarsia_generation.engine.build import build, refuse_states, sizes_of
from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.context import block_bytes, specs_of, state_bytes
from intarsia_generation.engine.engine import Engine, Sizes
from intarsia_generation.engine.request import Job
from intarsia_rl.contracts import GeneratorContext, Request, Sampling, WeightVersion
from intarsia_rl.invariant import table
from torch import nn

from tests.support.small_models import hybrid, recipe_of

CPU = torch.device("cpu")
PROMPTS = [tuple(range(3, 24)), (5,), tuple(range(3, 17)), tuple(range(40, 49)), tuple(range(3, 24))]


@functools.cache
def model() -> Any:
    built: Any = current().build(hybrid(chunk=4, vocab_size=96, max_positions=96))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return built.eval()


def whole(tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities behind every token, by one pass without states, [S, V]."""
    context = TrainContext(torch.arange(len(tokens))[None], None, ((len(tokens),),))
    with torch.no_grad():
        return model().project(model()(torch.tensor([tokens]), context))[0].log_softmax(-1)


def check(prompt: tuple[int, ...], tokens: tuple[int, ...], log_probs: tuple[float, ...]) -> None:
    expected_SV = whole((*prompt, *tokens))[len(prompt) - 1 : -1]
    expected = expected_SV.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- one batch


@pytest.mark.parametrize("chunk", [512, 5, 1])
def test_a_ragged_batch_equals_recomputation(chunk: int) -> None:
    """Sequences end at different times, and two share a prompt: states are repeated, dropped and reordered with their rows."""
    tokenizer: Any = current().build(current().config_class(current().registry("tokenizer").find("byte"))())
    made = Generator(model(), tokenizer, 96, CPU, chunk=chunk)
    free = made.generate(PROMPTS, SamplingConfig(max_tokens=16, temperature=0.0, ignore_eos=True))
    for prompt, each in zip(PROMPTS, free, strict=True):
        check(prompt, each.tokens, each.log_probs)
    assert free[0].tokens == free[4].tokens
    ended = free[0].tokens[4]
    for all_of_it, each in zip(free, made.generate(PROMPTS, SamplingConfig(max_tokens=16, temperature=0.0), ends=[ended]), strict=True):
        assert each.tokens == all_of_it.tokens[: len(each.tokens)]


def test_states_are_counted_and_named() -> None:
    context = CacheContext(model(), 2, CPU)
    assert context.cache_bytes() == 0
    context.begin([2, 1])
    with torch.no_grad():
        model()(torch.ones(2, 2, dtype=torch.int64), context)
    states = 2 * state_bytes(specs_of(model()))
    assert states == 2 * 3 * 4 * (3 * (2 * 16 + 24) + 4 * 8 * 6)
    assert context.cache_bytes() == states + sum(cache.numel() * 4 for cache in context._caches.values())
    with pytest.raises(PluginError, match=r"state 'delt'.*Did you mean.*delta"):
        context.recurrent("layers.0.attention", "delt", lambda: None)
    with pytest.raises(PluginError, match="calls recurrent"):
        context.recurrent("layers.3.attention", "key", lambda: None)


def test_states_are_float32_in_a_bfloat16_model() -> None:
    built = current().build(hybrid(vocab_size=96, max_positions=96)).bfloat16()
    conv, delta = built.layers[0].attention.cache_spec().caches
    assert (conv.dtype, delta.dtype) == ("bfloat16", "float32")
    assert (conv.shape, delta.shape) == ((3, 56), (4, 8, 6))


# ---------------------------------------------------------------- the paged engine


def engine(**settings: Any) -> Engine:
    sizes = Sizes(4, settings.pop("blocks", 200), settings.pop("sequences", 5), settings.pop("batch", 64), 96, True)
    choices = ops.select({"*": "reference"}, current(), frozenset({"cpu"}), "float32").choices
    made = Engine(model(), CPU, sizes, lambda weights: None, choices=choices)
    made.begin(0)
    return made


def run(made: Engine, at: Any = None) -> list[Any]:
    ended: dict[str, Any] = {}
    for number, prompt in enumerate(PROMPTS):
        request = Request(str(number), prompt, Sampling(14, seed=number))
        made.add(Job(request, number, None, functools.partial(ended.__setitem__, request.id)))
    step = 0
    while made.step():
        step += 1
        if at is not None:
            at(made, step)
    return [ended[str(number)] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("settings", [{}, {"sequences": 1}, {"batch": 7}, {"blocks": 24}], ids=str)
def test_every_arrangement_gives_one_result(settings: dict[str, Any]) -> None:
    """Alone, in pieces, with places that one request after another has, and put back to be computed anew."""
    made = engine(**settings)
    for prompt, found in zip(PROMPTS, run(made), strict=True):
        check(prompt, found.tokens, found.log_probs)
        assert found.cached_tokens == 0
    assert (made.scheduler.preemptions > 0) == ("blocks" in settings)


def test_the_prefix_cache_is_off_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "intarsia.generation"):
        made = engine()
    assert not made.scheduler.prefix_cache and "keeps states" in caplog.text


def test_new_weights_begin_states_anew() -> None:
    """Equal weights as a later version: what runs goes on from recomputed states."""

    def at(made: Engine, step: int) -> None:
        if step in (3, 8):
            made.update(WeightVersion(step, "", {}, {}, {}))

    found = run(engine(), at)
    assert {version for each in found for version in each.versions} == {0, 3, 8}
    for prompt, each in zip(PROMPTS, found, strict=True):
        check(prompt, each.tokens, each.log_probs)


def test_a_request_that_is_dropped_leaves_no_state_behind() -> None:
    """The one that takes its place begins at nothing."""
    made = engine(sequences=1)
    first = Job(Request("first", PROMPTS[2], Sampling(30)), 0, None, lambda result: None)
    made.add(first)
    made.step()
    made.step()
    made.drop(first)
    for prompt, found in zip(PROMPTS, run(made), strict=True):
        check(prompt, found.tokens, found.log_probs)


def test_states_count_among_the_bytes() -> None:
    config = LocalConfig(block=4, max_sequences=3, max_tokens=50)
    one, states = block_bytes(specs_of(model()), 4), state_bytes(specs_of(model())) * 3
    assert sizes_of(LocalConfig(block=4, max_sequences=3, cache_bytes=states + 10 * one), model(), 96, CPU).blocks == 10
    assert sizes_of(config, model(), 96, CPU).blocks == 3 * 13
    with pytest.raises(UsageError, match=rf"beside {states} bytes of states: no request fits.*lower generator.max_sequences"):
        sizes_of(LocalConfig(block=4, max_sequences=3, cache_bytes=states), model(), 96, CPU)


def test_the_batch_invariant_mode_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"cannot be batch-invariant: mixer 'layers\.0\.attention' is a recurrence"):
        refuse_states(model())
    with pytest.raises(UsageError, match="recurrence"):
        build(LocalConfig(device="cpu"), GeneratorContext(recipe_of(hybrid()), current(), invariant=True))
    choices = ops.select(table.kernels("cpu"), current(), frozenset({"cpu"}), "float32", invariant=True).choices
    with ops.installed(choices), pytest.raises(UsageError, match="no kernel for the operator gated_delta_rule"):
        whole(PROMPTS[0])


def test_the_generator_serves_the_model() -> None:
    """By its entry: asyncio in front, one thread behind."""
    made = build(LocalConfig(device="cpu", dtype="float32"), GeneratorContext(recipe_of(hybrid(vocab_size=264)), current(), initial=True))

    async def ask() -> Any:
        return await made.generate(Request("a", (1, 2, 3), Sampling(4)))

    try:
        assert len(asyncio.run(ask()).tokens) == 4
    finally:
        asyncio.run(made.close())


def test_what_a_mixer_of_another_kind_keeps_as_a_state_is_refused() -> None:
    class Odd(nn.Module):
        def cache_spec(self) -> MixerSpec:
            return MixerSpec("recurrent", (CacheSpec("c", "paged", (4,), "float32"),))

    for context in (lambda odd: CacheContext(odd, 1, CPU), specs_of):
        with pytest.raises(UsageError, match=r"'mixer' asks for a context of kind 'recurrent'.*recurrent ones with states"):
            context(nn.ModuleDict({"mixer": Odd()}))
