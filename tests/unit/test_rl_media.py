"""Episodes with images: what is asked of a generator, kept of a sample and given to the trainer says which media stand where; and what cannot be used is a failure of the environment."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import chz
import numpy
import pytest
import torch
from intarsia.contracts import Limits, Media, Observation, StepResult, Task, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_environments.recipes import arithmetic_debug
from intarsia_environments.seeing import drawn_debug
from intarsia_generation.engine.build import build
from intarsia_generation.engine.config import LocalConfig
from intarsia_multimodal.decoding import Decoder
from intarsia_rl import media
from intarsia_rl.contracts import GeneratorContext, Request, Sampling
from intarsia_rl.controller.groups import Player, score_segments
from intarsia_rl.controller.rollout import Rules, Try
from intarsia_rl.controller.service import parts_of
from intarsia_rl.controller.state import sample_from_json, sample_to_json
from intarsia_rl.controller.writer import RolloutWriter
from intarsia_rl.packing import Packing, Weighed, micro_batches
from intarsia_rl.processes import codec
from intarsia_rl.render.chat import ChatRenderer
from intarsia_rl.render.config import ChatConfig
from intarsia_testing.rollout_doubles import InProcessWorkers, Said, ScriptedGenerators, run_virtually

from tests.support.media import SMALL, image, tokenizer

TASK = Task("t", {})
TOKENS = tokenizer()
PROCESSOR = current().build(SMALL, TOKENS)
ONE, TWO = image(16, 16, 1), image(16, 32, 2)
WROTE = (65, PROCESSOR.ids["image_id"], 66)
"""What the policy says: a placeholder is a token like any other."""


class Shows:
    """Two turns, an image in each; with `rewrites` the second begins anew with both."""

    def __init__(self, first: Any = ONE, rewrites: bool = False) -> None:
        self.limits, self.first, self.rewrites = Limits(turns=2, tokens_per_turn=3), first, rewrites

    def tasks(self, split: str) -> list[Task]:
        return [TASK]

    def episode(self, task: Task, seed: int) -> Any:
        return Showing(self)

    def rubrics(self) -> tuple[()]:
        return ()


class Showing:
    def __init__(self, home: Shows) -> None:
        self.home, self.turns = home, 0

    async def reset(self) -> Observation:
        return Observation((Turn("system", "Look."), Turn("user", (self.home.first, "what?"))))

    async def step(self, action: Turn) -> StepResult:
        self.turns += 1
        if self.turns == 2:
            return StepResult(None, 1.0, ended=True)
        if self.home.rewrites:
            return StepResult(Observation((Turn("user", ("both: ", self.home.first, TWO)),), rewrites=True))
        return StepResult(Observation((Turn("user", ("and this? ", TWO)),)))

    async def close(self) -> None:
        pass


class Anew(ChatRenderer):
    """A renderer that has to begin anew at every turn, as a template that rewrites histories."""

    def extend(self, *arguments: Any) -> None:
        return None


def play(
    environment: Shows, processor: Any = PROCESSOR, renderer: type[ChatRenderer] = ChatRenderer, say: Any = lambda request: Said(WROTE)
) -> tuple[Any, ScriptedGenerators]:
    generators, workers = ScriptedGenerators(say), InProcessWorkers(environment)
    generators.version = 0
    rules = Rules(11, Sampling(1, stop_ids=(TOKENS.end_of_turn_id,)), 200, 1, timeout_s=60.0, processor=processor)
    player = Player(rules, workers.environment_facts(), generators, workers, renderer(ChatConfig(), TOKENS))
    (sample,) = run_virtually(player.tries(TASK, [Try("s", 0, 0, (11, 0))]))
    return sample, generators


def blocks(tokens: Any, places: Any) -> list[Any]:
    """The tokens at these places, of each medium as many as its block has."""
    return [list(tokens[each.at : each.at + len(PROCESSOR.as_ids((each.media,)))]) for each in places]


@pytest.mark.parametrize(
    ("rewrites", "renderer"), [(False, ChatRenderer), (True, ChatRenderer), (False, Anew)], ids=["extended", "rewritten", "anew"]
)
def test_requests_and_segments_say_which_media_stand_where(rewrites: bool, renderer: type[ChatRenderer]) -> None:
    """Also of a history that is rendered anew, in which the policy's own placeholder stands."""
    sample, generators = play(Shows(rewrites=rewrites), renderer=renderer)
    first, second = generators.requests
    assert [each.media for each in first.media] == [ONE] and [each.media for each in second.media] == [ONE, TWO]
    for request in (first, second):
        assert blocks(request.tokens, request.media) == [list(PROCESSOR.as_ids((each.media,))) for each in request.media]
    assert len(sample.segments) == 1 + (rewrites or renderer is Anew)
    last = sample.segments[-1]
    assert last.media == second.media and last.tokens[: len(second.tokens)] == second.tokens
    assert next(turn.content for turn in sample.turns if turn.role == "user") == (ONE, "what?"), "the transcript has media, and no ids"
    for segment in sample.segments:
        trained = [token for token, trained in zip(segment.tokens, segment.trained, strict=True) if trained]
        assert trained == list(WROTE) * (2 if len(sample.segments) == 1 else 1)


def test_samples_travel_and_are_kept_with_their_media(tmp_path: Path) -> None:
    sample, generators = play(Shows())
    assert sample_from_json(json.loads(json.dumps(sample_to_json(sample)))) == sample
    _, _, text, *blobs = codec.encode(sample, 1 << 20)
    assert codec.decode(text, blobs) == sample
    shown = RolloutWriter(tmp_path, TOKENS.decode).line(sample)["segments"][0]["media"]
    assert shown == [{"at": each.at, "kind": "image"} for each in sample.segments[0].media]
    asyncio.run(score_segments(generators, sample, "audit"))
    (_, _, scored) = generators.requests
    assert scored.media == sample.segments[0].media and scored.media[1].at > len(scored.tokens), "the second image is among forced tokens"


def test_rows_have_what_a_model_sees() -> None:
    """Positions, places of features and patches are the processor's for each sequence alone, wherever in a row it lies; ranks and rows without media have none, and say so alike."""
    sample, _ = play(Shows())
    plain, _ = play(Shows(first="text"))
    weighed = [Weighed(each, 1.0, 1.0, 1) for each in (plain, sample, sample)]
    (segment,) = sample.segments
    packing = Packing(2 * len(segment.tokens) + 5, 2, TOKENS.pad_id, decoder=Decoder(PROCESSOR))
    (batch,) = micro_batches(weighed, packing, 0, 1, 0)
    alone = media.prepared(segment.tokens, segment.media, PROCESSOR)
    patches = numpy.concatenate([PROCESSOR.load(slot) for slot in alone.media])
    size = len(segment.tokens)
    places = [(row, at) for row, lengths in enumerate(batch.lengths) for at in starts(lengths)]
    found = [(row, at) for row, at in places if tuple(batch.tokens_BS[row, at : at + size].tolist()) == segment.tokens]
    assert len(found) == 2
    features = sum(slot.features for slot in alone.media)
    for row, at in found:
        here = slice(at, at + size)
        assert numpy.array_equal(batch.extra["positions_3BS"][:, row, here].numpy(), alone.positions_3N)
        visual = batch.extra["visual_BS"][row, here]
        assert (visual >= 0).sum() == features < segment.tokens.count(PROCESSOR.ids["image_id"]), "what the policy wrote is text"
        assert visual.max() - visual[visual >= 0].min() == features - 1
    patches_NC = batch.extra["patches_NC"]()
    assert batch.extra["grids"].count(tuple(alone.media[0].grid)) == 2 and patches_NC.shape[0] == 2 * len(patches) + patches_of(plain)
    assert sorted(batch.extra["visual_BS"][batch.extra["visual_BS"] >= 0].tolist()) == list(range(patches_NC.shape[0] // 4))
    nothing = micro_batches([], packing, 1, 2, 0)[0].extra
    assert (
        nothing["patches_NC"]().shape == (0, PROCESSOR.patch_values) and nothing["grids"] == () and bool((nothing["visual_BS"] == -1).all())
    )
    assert torch.equal(nothing["positions_3BS"][0], micro_batches([], packing, 1, 2, 0)[0].positions_BS)
    assert "visual_BS" not in micro_batches(weighed, Packing(packing.row, 2, 0), 0, 1, 0)[0].extra


def test_patches_are_made_by_micro_batch_and_of_equal_images_once() -> None:
    """When a model looks, and not before: tries at one task show the same, in whatever micro-batches they lie."""
    sample, _ = play(Shows())
    decoder = Decoder(PROCESSOR)
    weighed = [Weighed(sample, 1.0, 1.0, 1)] * 3
    batches = micro_batches(weighed, Packing(len(sample.segments[0].tokens), 1, TOKENS.pad_id, decoder=decoder), 0, 1, 0)
    assert len(batches) == 3 and decoder.decoded == 0
    patches = [batch.extra["patches_NC"]() for batch in batches]
    assert all(torch.equal(each, patches[0]) for each in patches) and len(patches[0])
    assert (decoder.decoded, decoder.spared) == (2, 4)


def starts(lengths: Any) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


def patches_of(sample: Any) -> int:
    return sum(
        PROCESSOR.load(slot).shape[0] for each in sample.segments for slot in media.prepared(each.tokens, each.media, PROCESSOR).media
    )


def test_media_that_cannot_be_used_fail_their_try() -> None:
    sample, _ = play(Shows(first=Media("image", b"none")))
    assert sample.failure is not None and sample.failure.boundary == "environment" and "cannot be used" in sample.failure.message
    with pytest.raises(UsageError, match=r"data\.loader\.processor"):
        play(Shows(), processor=None)


class ShowsFile(Shows):
    """The first image is a file, of which `turn` is told when the first turn is over, and `close` at the end."""

    def __init__(self, path: Path, turn: Any = None, close: Any = None, again: bool = False) -> None:
        super().__init__(Media("image", str(path)), rewrites=again)
        path.write_bytes(ONE.data)  # type: ignore[arg-type]
        self.path, self.turn, self.at_close = path, turn, close

    def episode(self, task: Task, seed: int) -> Any:
        return ShowingFile(self)


class ShowingFile(Showing):
    home: ShowsFile

    async def step(self, action: Turn) -> StepResult:
        result = await super().step(action)
        if self.turns == 1 and self.home.turn is not None:
            self.home.turn(self.home.path)
        return result

    async def close(self) -> None:
        if self.home.at_close is not None:
            self.home.at_close(self.home.path)


def anew(path: Path) -> None:
    """A screenshot of the same size, in the same place, later than the clock of any file system can miss."""
    written_s = path.stat().st_mtime
    path.write_bytes(image(16, 16, 7).data)  # type: ignore[arg-type]
    os.utime(path, (written_s + 10, written_s + 10))


def grown(path: Path) -> None:
    """Bytes behind the image, which no decoder looks at."""
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "what",
    [{"turn": anew}, {"turn": anew, "again": True}, {"close": anew}, {"close": Path.unlink}, {"turn": grown}],
    ids=["between", "between, shown again", "at the end", "removed", "grown"],
)
def test_files_that_an_episode_shows_have_to_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: dict[str, Any], large: bool
) -> None:
    """Later turns and the trainer read them again: a policy would be trained on what it has not seen, or the run end at a file that is gone."""
    if large:
        monkeypatch.setattr(media, "HASHED_BYTES", 0)
    sample, _ = play(ShowsFile(tmp_path / "screen.png", **what))
    assert sample.failure is not None and sample.failure.boundary == "environment"
    assert f"the file {tmp_path / 'screen.png'} was shown, and has been written anew or removed since" in sample.failure.message
    sample, _ = play(ShowsFile(tmp_path / "kept.png", again=True))
    assert sample.failure is None and sample.segments[-1].media[0].media.data == str(tmp_path / "kept.png")


def test_equal_contents_are_the_same_file(tmp_path: Path) -> None:
    sample, _ = play(ShowsFile(tmp_path / "screen.png", turn=lambda path: path.write_bytes(ONE.data), again=True))
    assert sample.failure is None


@pytest.mark.parametrize("error", [EnvironmentFailure("environment", "a request shows what is cut"), UsageError("Install a decoder.")])
def test_only_a_medium_that_cannot_be_used_is_laid_to_the_environment(error: Exception) -> None:
    """What a generator refuses for another reason ends the run with the reason, though the request shows something."""

    def refuse(request: Request) -> Said:
        raise error

    if isinstance(error, UsageError):
        with pytest.raises(UsageError, match=r"^Install a decoder\.$"):
            play(Shows(), say=refuse)
    else:
        sample, _ = play(Shows(), say=refuse)
        assert sample.failure is not None and (sample.failure.boundary, sample.failure.message) == (
            "environment",
            "a request shows what is cut",
        )


def test_generators_that_do_not_see_are_refused(tmp_path: Path) -> None:
    """By the loop, for one without the capability; by `local`, for a model without a tower."""
    recipe, plugins = drawn_debug(), current()
    generators, workers = ScriptedGenerators(lambda request: Said(WROTE)), InProcessWorkers(Shows())
    algorithm = plugins.build(recipe.loss.algorithm)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"generator '\w+' serves text alone \(capability `media`\)"):
        asyncio.run(parts_of(recipe, plugins, tmp_path, generators, workers, algorithm))
    loader: Any = recipe.data.loader
    blind = arithmetic_debug()
    blind = chz.replace(blind, data=chz.replace(blind.data, loader=chz.replace(blind.data.loader, processor=loader.processor)))
    with pytest.raises(UsageError, match="no vision tower"):
        build(LocalConfig(device="cpu"), GeneratorContext(blind, plugins))


def test_a_generator_of_a_run_that_sees_says_so() -> None:
    recipe = drawn_debug()
    made = build(
        LocalConfig(device="cpu", block=4, max_sequences=4, max_batch_tokens=16), GeneratorContext(recipe, current(), initial=True)
    )
    assert "media" in made.facts.capabilities
    processor = media.processor_of(recipe.data, recipe.model, current())
    assert processor is not None
    tokens = [part for part in processor.as_ids((image(32, 32),)) if isinstance(part, int)]
    request = Request("a", tuple(tokens), Sampling(3), media=media.placed(tokens, [image(32, 32)], processor))
    assert len(asyncio.run(made.generate(request)).tokens) == 3
    asyncio.run(made.close())
