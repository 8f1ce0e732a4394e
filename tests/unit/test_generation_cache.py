"""The KV cache: batches of ragged prompts, chunks, windows and selection equal full recomputation, one sequence at a time."""

from __future__ import annotations

from typing import Any

import chz
import pytest
import torch
from intarsia.contracts import CacheSpec, MixerSpec
from intarsia.errors import NumericsError, PluginError, UsageError
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_generation import CacheContext, Generator, SamplingConfig
from intarsia_llama3.config import llama3
from torch import nn

CPU = torch.device("cpu")
PROMPTS = [tuple(range(3, 10)), (5,), tuple(range(40, 62)), tuple(range(1, 13))]


def make_model(window: int | None = None, sinks: bool = False) -> Any:
    config = llama3(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=48, vocab_size=264, max_positions=128)
    first, second = config.layers
    if window is not None:  # one layer sees all, one a window
        second = chz.replace(second, attention=chz.replace(second.attention, window=window, sinks=sinks))
    torch.manual_seed(0)
    model: Any = current().build(chz.replace(config, layers=(first, second)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn_like(parameter))
    return model.eval()


def tokenizer() -> Any:
    plugins = current()
    return plugins.build(plugins.config_class(plugins.registry("tokenizer").find("byte"))())


def generator(model: Any, **settings: Any) -> Generator:
    return Generator(model, tokenizer(), 128, CPU, **settings)


def recomputed(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits behind every token, by one pass without a cache, [S, V]."""
    context = TrainContext(torch.arange(len(tokens))[None], None, ((len(tokens),),))
    with torch.no_grad():
        return model.project(model(torch.tensor([tokens]), context))[0]


def greedy_by_recomputation(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(recomputed(model, tuple(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


GREEDY = SamplingConfig(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize(
    "window,sinks,chunk", [(None, False, 512), (None, False, 5), (6, False, 512), (6, True, 5), (1, False, 3), (40, False, 4)]
)
def test_a_ragged_batch_equals_recomputation_one_by_one(window, sinks, chunk, kernel):
    from intarsia import ops

    model = make_model(window, sinks)
    choices = ops.select({"attention": kernel}, current(), frozenset({"cpu"}), "float32").choices
    found = generator(model, chunk=chunk, choices=choices).generate(PROMPTS, GREEDY)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        assert list(completion.tokens) == greedy_by_recomputation(model, prompt, 24)
        logits_SV = recomputed(model, prompt + completion.tokens)[len(prompt) - 1 : -1]
        expected = logits_SV.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [512, 4])
def test_prefill_logits_in_a_batch_equal_those_alone(chunk):
    model = make_model(6)
    one = generator(model, chunk=chunk)
    with torch.inference_mode():
        together = one.prefill(CacheContext(model, len(PROMPTS), CPU, chunk), PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(together[row], recomputed(model, prompt)[-1], atol=1e-5, rtol=0)


def test_windowed_caches_are_bounded():
    model, chunk = make_model(6), 4
    context = CacheContext(model, 1, CPU, chunk)
    with torch.inference_mode():
        generator(model, chunk=chunk).prefill(context, [tuple(range(100))])
    sizes = {key: cache.shape[1] for key, cache in context._caches.items()}
    assert sizes["layers.1.attention", "key"] == 6 + 4 - 1 and sizes["layers.0.attention", "key"] >= 100
    assert context.cache_bytes() == sum(2 * sizes[f"layers.{i}.attention", "key"] * 2 * 8 * 4 for i in (0, 1))


def test_samples_do_not_depend_on_the_batch():
    model = make_model()
    config = SamplingConfig(max_tokens=20, temperature=1.3, top_k=50, seed=7, samples=3, ignore_eos=True)
    together = generator(model).generate(PROMPTS, config)
    assert len({each.tokens for each in together}) == len(together) == 12
    for number, prompt in enumerate(PROMPTS):
        alone = generator(model).generate([prompt], config)
        assert [each.tokens for each in alone] == [each.tokens for each in together[3 * number : 3 * number + 3]]
    reversed_ = generator(model, batch=5).generate(PROMPTS[::-1], config)
    assert {(each.prompt_tokens, each.sample, each.tokens) for each in reversed_} == {
        (c.prompt_tokens, c.sample, c.tokens) for c in together
    }
    other = generator(model).generate(PROMPTS, SamplingConfig(**{**vars(config), "seed": 8}))
    assert [each.tokens for each in other] != [each.tokens for each in together]


def test_sequences_end_at_different_times():
    """Some by an end token, some by a stop text, some by length; those that go on are not disturbed."""
    model = make_model()
    free = generator(model).generate(PROMPTS, GREEDY)
    ended = free[0].tokens[3]
    found = generator(model).generate(PROMPTS, SamplingConfig(max_tokens=24, temperature=0.0), ends=[ended])
    for whole, each in zip(free, found, strict=True):
        cut = whole.tokens.index(ended) + 1 if ended in whole.tokens else 24
        assert each.tokens == whole.tokens[:cut] and each.finish == ("eos" if ended in whole.tokens else "length")
    assert {each.finish for each in found} == {"eos", "length"}
    text = free[2].text
    stop = text[4:7]
    pieces: dict[int, str] = {}
    config = SamplingConfig(max_tokens=24, temperature=0.0, ignore_eos=True, stop=(stop,))
    found = generator(model).generate(PROMPTS, config, lambda number, piece: pieces.update({number: pieces.get(number, "") + piece}))
    for number, (whole, each) in enumerate(zip(free, found, strict=True)):
        assert each.text == whole.text.partition(stop)[0] == pieces.get(number, "")
        assert (each.finish, each.stopped_by) == (("stop", stop) if stop in whole.text else ("length", None))
    assert found[2].finish == "stop"


def test_the_end_token_is_of_the_tokenizer_and_can_be_ignored():
    model = make_model()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[257] = 1.0
        model.norm.weight.fill_(1.0)
    hidden = model(torch.tensor([[5]]), TrainContext(torch.zeros(1, 1, dtype=torch.int64), None, ((1,),)))
    with torch.no_grad():
        model.head.weight[257] = hidden[0, 0]  # eos is by far the likeliest
    (found,) = generator(model).generate([(5,)], SamplingConfig(max_tokens=4, temperature=0.0))
    assert (found.tokens, found.finish, found.text) == ((257,), "eos", "")
    (found,) = generator(model).generate([(5,)], SamplingConfig(max_tokens=1, temperature=0.0, ignore_eos=True))
    assert (found.tokens, found.finish) == ((257,), "length")


def test_texts_begin_with_bos_as_documents_do():
    made = generator(make_model())
    assert made.encode("ab") == (256, 97, 98) and made.encode("") == (256,) and made.encode([97]) == (97,)
    made.tokenizer.bos_id = None
    with pytest.raises(UsageError, match="prompt is empty"):
        made.encode("")
    with pytest.raises(UsageError, match="Token 264 is not in the model's vocabulary of 264"):
        made.encode([1, 264])


def test_too_many_positions():
    with pytest.raises(
        UsageError, match=r"Prompt 2 has 22 tokens; with max_tokens 107 that is 129, but the model has 128 positions.*at most 106"
    ):
        generator(make_model()).generate([(1,), PROMPTS[2]], SamplingConfig(max_tokens=107))
    with pytest.raises(
        UsageError, match=r"Prompt 1 has 128 tokens; .* has 128 positions. Shorten it: a prompt and what follows share them"
    ):
        generator(make_model()).generate([(1,) * 128], SamplingConfig(max_tokens=1))


def test_weights_that_are_not_sound():
    model = make_model()
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        generator(model).generate([(1,)], GREEDY)


class Mixing(nn.Module):
    def __init__(self, spec: MixerSpec):
        super().__init__()
        self.spec = spec

    def cache_spec(self) -> MixerSpec:
        return self.spec


@pytest.mark.parametrize("kind,storage", [("recurrent", "paged"), ("indexed", "paged"), ("softmax", "state")])
def test_kinds_that_are_not_served_are_refused_by_name(kind, storage):
    model = nn.Module()
    model.mixing = Mixing(MixerSpec(kind, (CacheSpec("c", storage, (4,), "float32"),)))
    with pytest.raises(UsageError, match=rf"'mixing'.*{kind!r}.*CacheContext"):
        CacheContext(model, 1, CPU)


def test_a_latent_mixer_sees_what_is_cached():
    model = nn.Module()
    model.mixing = Mixing(MixerSpec("latent", (CacheSpec("latent", "paged", (2,), "float32"),)))
    context = CacheContext(model, 2, CPU)
    seen: list[Any] = []

    def attend(latent_BTC, positions_BT, documents_BT):
        seen.append((latent_BTC[:, :, 0].tolist(), positions_BT.tolist(), documents_BT if documents_BT is None else documents_BT.tolist()))
        return latent_BTC

    for counts, first in (([2, 1], 0.0), ([1, 1], 10.0)):
        context.begin(counts)
        context.latent("mixing", torch.arange(first, first + 2 * max(counts)).view(2, -1, 1).expand(-1, -1, 2), attend)
    # Padding comes last, so that no token sees it.
    assert seen[0] == ([[0, 1], [2, 3]], [[0, 1], [0, 1]], None)
    assert seen[1] == ([[0, 1, 10], [2, 11, 0]], [[0, 1, 2], [0, 1, -1]], [[0, 0, 0], [0, 0, -1]])


def test_misuse_is_named():
    context = CacheContext(make_model(), 2, CPU, chunk=4)
    for counts in ([1], [0, 0], [5, 1], [-1, 2]):
        with pytest.raises(PluginError, match="2 sequences and chunks of 4"):
            context.begin(counts)
    context.begin([1, 1])
    x = torch.zeros(2, 1, 2, 8)
    with pytest.raises(PluginError, match=r"'layers\.0\.attentoin' is no module.*layers\.0\.attention"):
        context.softmax("layers.0.attentoin", x, x, x, scale=1.0)
    with pytest.raises(PluginError, match="calls latent"):
        context.latent("layers.0.attention", x, lambda *a: x)
