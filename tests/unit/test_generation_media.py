"""Generation with images and video: ragged batches in pieces equal full recomputation one by one, an image is looked at once, and what cannot be seen is refused in words."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import chz
import numpy
import pytest
import torch
from intarsia.contracts import Document, Media, Message
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import current
from intarsia_chat.config import TemplatedConfig
from intarsia_data.config import ByteTokenizerConfig
from intarsia_eager.context import TrainContext
from intarsia_generation import CacheContext, Generator, SamplingConfig
from intarsia_generation.prompts import Input, look, prefill
from intarsia_llama3.config import llama3
from intarsia_multimodal.config import PatchProcessorConfig
from intarsia_qwen3_5 import config as qwen3_5
from intarsia_qwen3_vl import config as qwen3_vl
from intarsia_testing.model import fill
from PIL import Image

CPU = torch.device("cpu")
SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROCESSOR = PatchProcessorConfig(patch=8, min_pixels=1024, max_pixels=8192, video_min_pixels=1024, video_max_pixels=16384)
GREEDY = SamplingConfig(max_tokens=10, temperature=0.0, ignore_eos=True)


def picture(height: int, width: int, seed: int) -> bytes:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    output = io.BytesIO()
    Image.fromarray(pixels).save(output, "PNG")
    return output.getvalue()


def image(height: int, width: int, seed: int = 0) -> Media:
    return Media("image", picture(height, width, seed))


VIDEO = Media("video", tuple(picture(16, 24, number) for number in range(4)))
PROMPTS: list[Any] = [
    ("What is ", image(32, 16), " and ", image(24, 40, 1), "?"),
    "Text alone.",
    [Message("user", (VIDEO, "And then ", image(16, 16, 2), "?"))],
    Document(parts=(image(40, 40, 3), "Describe it, please.")),
    [7, 8, 9],
]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def model(request: Any) -> Any:
    config = (qwen3_vl if request.param == "qwen3_vl" else qwen3_5).debug()
    return fill(current().build(config), 0, 0.3).eval()


@pytest.fixture(scope="module")
def seeing() -> Any:
    return fill(current().build(qwen3_vl.debug()), 0, 0.3).eval()


def generator(model: Any, **settings: Any) -> Generator:
    tokenizer = current().build(ByteTokenizerConfig(specials=SPECIALS))
    return Generator(model, tokenizer, 512, CPU, processor=lambda: current().build(PROCESSOR, tokenizer), **settings)


def recomputed(model: Any, one: Generator, prompt: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits behind the prompt and each further token, by one pass without a cache, [S, V]."""
    read = one.read(prompt)
    ids = (*read.tokens, *tokens)
    extra: dict[str, Any] = {}
    if read.prepared is not None:
        shown = look(read.prepared, one.decoder)
        first, more = int(shown.positions_3S.max()) + 1, len(tokens)
        behind_3S = torch.arange(first, first + more).expand(3, more)
        none_S = torch.full((more,), -1)
        extra = {
            "positions_3BS": torch.cat((shown.positions_3S, behind_3S), 1)[:, None],
            "visual_BS": torch.cat((shown.visual_S, none_S))[None],
            "patches_NC": shown.patches_NC,
            "grids": shown.grids,
        }
    context = TrainContext(torch.arange(len(ids))[None], None, ((len(ids),),), extra=extra)
    with torch.no_grad():
        return model.project(model(torch.tensor([ids]), context))[0, len(read.tokens) - 1 :]


@pytest.mark.parametrize("chunk", [512, 7])
def test_a_ragged_batch_in_pieces_equals_recomputation_one_by_one(model, chunk):
    one = generator(model, chunk=chunk)
    found = one.generate(PROMPTS, GREEDY)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        logits_SV = recomputed(model, one, prompt, completion.tokens)[:-1]
        assert completion.tokens == tuple(logits_SV.argmax(-1).tolist()) and len(completion.tokens) == 10
        expected = logits_SV.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_what_is_shown_matters_and_positions_go_on_behind_it(model):
    one = generator(model)
    read = one.read(PROMPTS[0])
    shown = look(read.prepared, one.decoder)
    context = CacheContext(model, 1, CPU)
    with torch.inference_mode():
        prefill(model, context, [Input(read.tokens, shown.digest, shown)])
        context.begin([2])
    first = int(shown.positions_3S.max()) + 1
    assert first < len(read.tokens)
    assert context.extra["positions_3BS"].tolist() == [[[first, first + 1]]] * 3
    assert context.positions_BS.tolist() == [[len(read.tokens), len(read.tokens) + 1]]
    other = dataclasses.replace(shown, patches_NC=shown.patches_NC.flip(0))
    with torch.inference_mode():
        a, b = (prefill(model, CacheContext(model, 1, CPU), [Input(read.tokens, "", each)]) for each in (shown, other))
    assert (a - b).abs().max() > 1e-3


def test_an_image_is_looked_at_once(seeing, monkeypatch):
    calls: list[int] = []
    forward = seeing.visual.forward
    monkeypatch.setattr(seeing.visual, "forward", lambda patches, grids: calls.append(len(grids)) or forward(patches, grids))
    one = generator(seeing, chunk=5)
    one.generate(PROMPTS, dataclasses.replace(GREEDY, temperature=1.0, samples=2))
    assert calls == [2, 2, 1]  # once for each prompt with media, whatever their samples, pieces and further tokens
    calls.clear()
    one.generate([PROMPTS[1], PROMPTS[4]], GREEDY)
    assert calls == []


def test_samples_depend_on_the_prompt_and_what_it_shows_alone(seeing):
    config = SamplingConfig(max_tokens=12, temperature=1.5, seed=3, samples=2, ignore_eos=True)
    together = generator(seeing).generate(PROMPTS, config)
    for number, prompt in enumerate(PROMPTS):
        alone = generator(seeing, chunk=9).generate([prompt], config)
        assert [each.tokens for each in alone] == [each.tokens for each in together[2 * number : 2 * number + 2]]
    few = generator(seeing, batch=3).generate(PROMPTS[::-1], config)
    assert {each.tokens for each in few} == {each.tokens for each in together}
    first, second = (generator(seeing)._input(generator(seeing).read((image(16, 16, seed), "x"))) for seed in (0, 1))
    assert first.tokens == second.tokens and first != second and len({first, second}) == 2


def test_texts_are_drawn_as_before_there_were_images():
    from intarsia_generation.sampling import generator_for

    assert torch.rand((), generator=generator_for(5, (1, 2), 0)) == torch.rand((), generator=generator_for(5, (1, 2), 0, ""))
    assert torch.rand((), generator=generator_for(5, (1, 2), 0)) != torch.rand((), generator=generator_for(5, (1, 2), 0, "a"))


def test_sequences_that_see_leave_and_move(seeing):
    """Those that go on keep their own offset of positions."""
    one = generator(seeing)
    free = one.generate(PROMPTS, GREEDY)
    ended = free[1].tokens[2]
    found = one.generate(PROMPTS, SamplingConfig(max_tokens=10, temperature=0.0), ends=[ended])
    for whole, each in zip(free, found, strict=True):
        stop = {ended, 258, *(one.read(PROMPTS[2]).ends if each.prompt_tokens == found[2].prompt_tokens else ())}
        cut = next((place + 1 for place, token in enumerate(whole.tokens) if token in stop), 10)
        assert each.tokens == whole.tokens[:cut]
    context = CacheContext(seeing, 3, CPU)
    context.begin([2, 2, 1], {"positions_3BS": torch.tensor([[[0, 1], [0, 0], [0, 9]]] * 3)})
    context.select([1, 0, 1, 2])
    context.begin([1, 1, 1, 0])
    assert context.extra["positions_3BS"][2].tolist() == [[1], [2], [1], [1]]  # what is padding counts for nothing
    context.begin([1, 1, 1, 1])
    assert context.extra["positions_3BS"][0].tolist() == [[2], [3], [2], [1]]


def test_a_conversation_with_images_ends_as_one_of_text(seeing):
    one = generator(seeing)
    read = one.read(PROMPTS[2])
    plain = one.read([Message("user", "Hello")])
    assert read.ends == plain.ends and len(read.ends) == 1
    assert read.tokens[-1] == plain.tokens[-1]
    assert len(read.prepared.media) == 2


def test_chat_templates_write_conversations_with_images(seeing):
    specials = (*SPECIALS, "<|im_start|>", "<|im_end|>", "<|endoftext|>")
    tokenizer = current().build(TemplatedConfig(tokenizer=ByteTokenizerConfig(specials=specials), template="qwen3_5"))
    one = Generator(seeing, tokenizer, 512, CPU, processor=lambda: current().build(PROCESSOR, tokenizer))
    read = one.read([Message("system", "Be."), Message("user", (image(16, 16), "What?"))])
    start, end = (tokenizer.special_id(text) for text in specials[4:6])
    asked = (start, *b"user\n", 264, 266, 266, 266, 266, 265, *b"What?", end, *b"\n")
    assert read.tokens == (start, *b"system\nBe.", end, *b"\n", *asked, start, *b"assistant\n<think>\n") and end in read.ends
    assert read.prepared.media[0].grid == (1, 4, 4)
    assert one.generate([[Message("user", (image(16, 16), "What?"))]], GREEDY)[0].tokens


def test_texts_are_shown_nothing(seeing):
    """Not even positions: what a model of text computes is what it was."""
    context = CacheContext(seeing, 2, CPU)
    assert context.extra == {}
    with torch.inference_mode():
        prefill(seeing, context, [Input((1, 2, 3)), Input((4,))])
        assert context.extra == {}
        context.begin([1, 1])
    assert context.extra == {}


def text_model() -> Any:
    return fill(current().build(llama3(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, hidden=32, vocab_size=272)), 0, 0.3).eval()


def test_what_cannot_be_seen_is_refused(seeing):
    one = generator(seeing)
    tokenizer = one.tokenizer
    with pytest.raises(UsageError, match=r"Llama3?, has no vision tower"):
        generator(text_model()).generate([PROMPTS[0]], GREEDY)
    blind = fill(current().build(chz.replace(qwen3_vl.debug(), vision=None)), 0, 0.3)
    with pytest.raises(UsageError, match="no vision tower"):
        generator(blind).generate([PROMPTS[2]], GREEDY)
    with pytest.raises(UsageError, match=r"Prompt 2 has the token 266.*model\.image_id.*nothing to see"):
        one.generate(["a", [1, 266, 3]], GREEDY)
    with pytest.raises(UsageError, match=r"placeholder tokens.*its 1 media"):
        one.generate([("a", 266, image(16, 16))], GREEDY)
    with pytest.raises(UsageError, match="Name one by --processor"):
        Generator(seeing, tokenizer, 512, CPU).generate([PROMPTS[0]], GREEDY)
    with pytest.raises(UsageError, match="image of 3 bytes"):
        one.generate([(Media("image", b"abc"), "?")], GREEDY)
    with pytest.raises(UsageError, match="has 512 positions"):
        one.generate([(image(32, 32), "?" * 500)], GREEDY)
    assert generator(text_model()).generate([[1, 266, 3]], GREEDY)[0].tokens


def test_positions_of_another_shape_are_named(seeing):
    with pytest.raises(PluginError, match=r"int64 \[3, 1, 2\]"):
        CacheContext(seeing, 1, CPU).begin([2], {"positions_3BS": torch.zeros(3, 1, 3, dtype=torch.int64)})
