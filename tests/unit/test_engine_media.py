"""The embedded generator with images and video: in batches, in pieces that cut images, by shared and by scarce blocks, what one pass over everything gives; and a prefix is known by what it shows."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any, Literal

import pytest
import torch
from intarsia import ops
from intarsia.contracts import Media, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_data.tokenizer import encode_parts
from intarsia_eager.context import TrainContext
from intarsia_generation.engine.engine import Engine, Sizes
from intarsia_generation.engine.generator import LocalGenerator
from intarsia_generation.engine.request import Job
from intarsia_generation.engine.sight import look
from intarsia_models_common.vision.config import VisionLanguageModelConfig
from intarsia_multimodal.config import PatchProcessorConfig
from intarsia_multimodal.decoding import Decoder
from intarsia_multimodal.recipes import SPECIALS
from intarsia_qwen3_5 import config as qwen3_5
from intarsia_qwen3_vl import config as qwen3_vl
from intarsia_rl import media
from intarsia_rl.contracts import Generated, GeneratorFacts, PlacedMedia, Request, Sampling, WeightVersion
from intarsia_testing.model import fill

from tests.support.media import encoded, image, noise

CPU = torch.device("cpu")
PROCESSOR = PatchProcessorConfig(patch=8, min_pixels=1024, max_pixels=8192, video_min_pixels=1024, video_max_pixels=16384)
FRAMES = tuple(encoded(noise(16, 24, number)) for number in range(4))
PROMPTS: list[Any] = [
    ("What is ", image(32, 16), " and ", image(24, 40, 1), "?"),
    ("Text alone.",),
    (Media("video", FRAMES), "And then ", image(16, 16, 2), "?"),
    ("What is ", image(32, 16), " and ", image(24, 40, 3), "?"),
    (image(40, 40, 3),),
]


@functools.cache
def tokenizer() -> Any:
    from intarsia_data.config import ByteTokenizerConfig

    return current().build(ByteTokenizerConfig(specials=SPECIALS))


@functools.cache
def processor() -> Any:
    return current().build(PROCESSOR, tokenizer())


@functools.cache
def decoder() -> Decoder:
    return Decoder(processor())


@functools.cache
def model(family: str) -> Any:
    config: VisionLanguageModelConfig = {"qwen3_vl": qwen3_vl, "qwen3_5": qwen3_5}[family].debug()
    return fill(current().build(config), 0, 0.3).eval()


@functools.cache
def kernels() -> Any:
    return ops.select({"*": "reference"}, current(), frozenset({"cpu"}), "float32").choices


def engine(
    family: str, *, blocks: int = 200, batch: int = 64, prefix: bool = True, sequences: int = 5, graphs: Literal["off", "eager"] = "off"
) -> Engine:
    sizes = Sizes(4, blocks, sequences, batch, min(256, 4 * blocks), prefix)
    made = Engine(model(family), CPU, sizes, lambda weights: None, choices=kernels(), graphs=graphs)
    made.begin(0)
    return made


def request(number: int, parts: Any, count: int = 6, forced: tuple[int, ...] = (), **settings: Any) -> Request:
    ids = encode_parts(processor().as_ids(parts), tokenizer().encode, tokenizer().vocab_size)
    shown = [part for part in parts if isinstance(part, Media)]
    sampling = Sampling(len(forced) or count, seed=number, **settings)
    return Request(str(number), tuple(ids), sampling, forced, media=media.placed(ids, shown, processor()) if shown else ())


def run(made: Engine, requests: list[Request]) -> list[Generated]:
    ended: dict[str, Any] = {}
    for number, each in enumerate(requests):
        sight = look(each, decoder()) if each.media else None
        made.add(Job(each, number, None, functools.partial(ended.__setitem__, each.id), sight=sight))
    while made.step():
        pass
    assert made.pool.used == 0
    return [ended[each.id] for each in requests]


def log_probs(family: str, one: Request, tokens: tuple[int, ...]) -> torch.Tensor:
    """Those of the trainer: of one pass over everything, without a cache."""
    ids = (*one.tokens, *tokens)
    found = media.prepared(ids, one.media, processor())
    visual_S = torch.full((len(ids),), -1, dtype=torch.int64)
    seen = 0
    for slot in found.media:
        for first, count in slot.spans:
            visual_S[first : first + count] = torch.arange(seen, seen + count)
            seen += count
    extra: dict[str, Any] = {"positions_3BS": torch.from_numpy(found.positions_3N)[:, None], "visual_BS": visual_S[None]}
    if found.media:
        extra["patches_NC"] = torch.cat([torch.from_numpy(processor().load(slot)) for slot in found.media])
        extra["grids"] = tuple(slot.grid for slot in found.media)
    context = TrainContext(torch.arange(len(ids))[None], extra=extra)
    with torch.no_grad(), ops.installed(kernels()):
        logits = model(family).project(model(family)(torch.tensor([ids]), context))[0]
    return logits.float().log_softmax(-1)[len(one.tokens) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def agree(family: str, requests: list[Request], results: list[Generated]) -> None:
    for one, made in zip(requests, results, strict=True):
        expected = log_probs(family, one, made.tokens)
        torch.testing.assert_close(torch.tensor(made.log_probs), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    ("batch", "blocks", "prefix", "graphs"),
    [(400, 200, True, "off"), (7, 200, True, "off"), (13, 28, True, "off"), (400, 200, False, "off"), (7, 200, True, "eager")],
    ids=["whole", "cut", "scarce", "no prefixes", "fixed shapes"],
)
def test_every_arrangement_gives_what_one_pass_gives(family: str, batch: int, blocks: int, prefix: bool, graphs: Any) -> None:
    """Images cut by the border of a step, requests without media beside, blocks that run out, steps in fixed shapes: log-probabilities are the trainer's."""
    made = engine(family, batch=batch, blocks=blocks, prefix=prefix, graphs=graphs)
    requests = [request(number, parts, 20) for number, parts in enumerate(PROMPTS)]
    results = run(made, requests)
    agree(family, requests, results)
    assert (made.scheduler.preemptions > 0) == (blocks < 200)
    assert made.eyes.looks == 6, "equal images are looked at once"
    assert (made.runner.static.computed >= 19) == (graphs == "eager")


def test_a_prefix_is_known_by_what_it_shows() -> None:
    """Equal tokens with another image share nothing from the image on; with an equal one they share it."""
    made = engine("qwen3_vl")
    same, other = PROMPTS[0], ("What is ", image(32, 16, 9), " and ", image(24, 40, 1), "?")
    requests = [request(number, parts, temperature=0.0) for number, parts in enumerate((same, other, same))]
    assert requests[0].tokens == requests[1].tokens
    results = [run(made, [each])[0] for each in requests]
    agree("qwen3_vl", requests, results)
    before = requests[0].media[0].at
    assert results[1].cached_tokens == before // 4 * 4 and results[2].cached_tokens == (len(requests[2].tokens) - 1) // 4 * 4
    assert results[0].log_probs != results[1].log_probs and results[0].tokens == results[2].tokens


def test_placeholders_that_a_policy_writes_are_text() -> None:
    """Before an image, behind it and looking like one: positions and features are those of the media that were shown."""
    fake = tuple(part for part in processor().as_ids((image(32, 16),)) if isinstance(part, int))
    first, second = request(0, ("a", image(16, 16))), request(1, (image(32, 16, 5), "?"))
    forced = (*fake, *second.tokens, *fake[:2], 7)
    shown = (*first.media, *(PlacedMedia(each.media, each.at + len(first.tokens) + len(fake)) for each in second.media))
    both = dataclasses.replace(first, sampling=Sampling(len(forced)), forced=forced, media=shown)
    for batch in (400, 6):
        (made,) = run(engine("qwen3_vl", batch=batch), [both])
        assert made.tokens == forced
        agree("qwen3_vl", [both], [made])


def test_new_weights_see_anew() -> None:
    made = engine("qwen3_vl")
    one = request(0, PROMPTS[0])
    run(made, [one])
    made.update(WeightVersion(1, "in_hand", {}, {}, {}))
    run(made, [dataclasses.replace(one, id="again")])
    assert made.eyes.looks == 4


def local(with_processor: bool = True) -> LocalGenerator:
    facts = GeneratorFacts("local", 300, 256, 5, ("forced", *(("media",) if with_processor else ())))
    return LocalGenerator(engine("qwen3_vl"), facts, tokenizer, processor() if with_processor else None)


def test_what_cannot_be_served_is_refused() -> None:
    """By a generator without a processor, a damaged image, media that are not where they are said to be; nothing is left behind, and the next request is served."""
    good = request(0, PROMPTS[0])
    whole = image(32, 16)
    assert isinstance(whole.data, bytes)
    cut = Media("image", whole.data[: len(whole.data) // 2], "image/png")
    damaged = dataclasses.replace(good, id="1", media=(PlacedMedia(cut, good.media[0].at), good.media[1]))
    moved = dataclasses.replace(good, id="2", media=(PlacedMedia(whole, good.media[0].at + 1), good.media[1]))

    async def work(made: LocalGenerator) -> list[Any]:
        found = await asyncio.gather(*(made.generate(each) for each in (damaged, moved, good)), return_exceptions=True)
        found.append(await made.generate(dataclasses.replace(good, id="1")))
        await made.close()
        return found

    one, two, three, four = asyncio.run(work(local()))
    assert isinstance(one, EnvironmentFailure) and one.boundary == "environment" and "truncated" in str(one)
    assert isinstance(two, UsageError)
    assert three.tokens == four.tokens and len(three.tokens) == 6
    with pytest.raises(UsageError, match="it has images or video, and the generator 'local' serves text alone"):
        asyncio.run(local(False).generate(good))


@pytest.mark.parametrize("ended", ["abort", "close"])
def test_an_end_finds_a_request_whose_images_are_being_loaded(ended: str) -> None:
    """As it finds those that run; nothing is told that the images would be to blame for."""
    made = local()

    async def work() -> Generated:
        running = asyncio.ensure_future(made.generate(request(0, PROMPTS[0])))
        await asyncio.sleep(0)
        await (made.abort(["0"]) if ended == "abort" else made.close())
        found = await running
        await made.close()
        return found

    result = asyncio.run(work())
    assert result.finish == "abort" and result.tokens == ()


def test_what_requests_show_alike_is_decoded_once() -> None:
    """And held once, for as long as one of them does."""
    made = local()
    made._decoder = Decoder(processor())
    made._engine.step = lambda admit=True: False  # type: ignore[method-assign]

    async def work() -> None:
        running = []
        for number in range(3):
            running.append(asyncio.ensure_future(made.generate(request(number, PROMPTS[0]))))
            while len(made._engine.jobs) <= number:
                await asyncio.sleep(0.01)
        shown = [[each.loaded for each in job.sight.media] for job in made._engine.jobs if job.sight is not None]
        assert len(shown) == 3 and all(one is other for first in shown[1:] for one, other in zip(first, shown[0], strict=True))
        await made.abort()
        await asyncio.gather(*running)

    asyncio.run(work())
    asyncio.run(made.close())
    assert (made._decoder.decoded, made._decoder.spared) == (2, 4)


def test_videos_of_which_one_begins_like_the_other_are_told_apart() -> None:
    """In either order; and the shorter one's tokens are still not taken for it where nobody showed it."""
    short, long = Media("video", FRAMES[:2]), Media("video", FRAMES)
    blocks = {each: [part for part in processor().as_ids((each,)) if isinstance(part, int)] for each in (short, long)}
    assert blocks[long][: len(blocks[short])] == blocks[short]
    for shown in ([short, long], [long, short]):
        ids = [5, *blocks[shown[0]], 6, *blocks[shown[1]]]
        places = media.placed(ids, shown, processor())
        assert [(each.media, each.at) for each in places] == [(shown[0], 1), (shown[1], 2 + len(blocks[shown[0]]))]
        with pytest.raises(EnvironmentFailure, match="model: the policy has written"):
            media.placed([*ids, *blocks[short]], shown, processor())


def test_turns_become_ids_and_are_found_again() -> None:
    """Blocks in order, equal ones too; a block that is missing is told, and one that the policy wrote among rendered ids is not taken for an image."""
    shown = image(16, 16)
    turns = [Turn("user", ("a", shown, "b", shown)), Turn("user", "c")]
    ids = [
        part
        for turn in media.with_ids(turns, processor())
        if not isinstance(turn.content, str)
        for part in turn.content
        if isinstance(part, int)
    ]
    places = media.placed([5, *ids, 6], media.media_of(turns), processor(), first=10)
    assert [each.at for each in places] == [11, 11 + len(ids) // 2] and all(each.media == shown for each in places)
    from intarsia.errors import PluginError

    with pytest.raises(PluginError, match="left out"):
        media.placed(ids[:-1], [shown, shown], processor())
    with pytest.raises(EnvironmentFailure, match="model: the policy has written"):
        media.placed([*ids, *ids], [shown, shown], processor())
    with pytest.raises(UsageError, match=r"data\.loader\.processor"):
        media.with_ids(turns, None)
    with pytest.raises(EnvironmentFailure, match="environment: a turn shows a medium that cannot be used"):
        media.with_ids([Turn("user", (Media("image", b"none"),))], processor())
    with pytest.raises(EnvironmentFailure, match="environment: a turn shows a medium that cannot be used"):
        media.placed(ids, [Media("image", "gone.png")], processor())  # it was there when the turn was written
