"""Images and video of episodes: as ids in what is rendered, found again in the tokens, and as positions and patches for a model. Torch-free.

A renderer is given turns whose media are ids already (`with_ids`); where these came to stand is kept beside the tokens (`placed`), so that placeholders which a policy writes of its own accord are
tokens like any other, for generator and trainer alike (`prepared`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from intarsia.contracts import Media, Parts, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import PluginError, UsageError

from intarsia_rl.contracts import PlacedMedia

if TYPE_CHECKING:
    from intarsia_multimodal.contracts import Prepared, Processor
    from intarsia_multimodal.decoding import Decoder

HASHED_BYTES = 16 << 20
"""Larger files are told apart by their size and times: the loop that hashes them serves all tries."""


def processor_of(data: Any, model: Any, plugins: Any) -> Processor | None:
    """The processor of a run's loader; None where it names none. `data` and `model` are the recipe's. UsageError for one that is not the model's, and for a model that does not see."""
    config = getattr(data.loader, "processor", None)
    if config is None:
        return None
    from intarsia_multimodal.contracts import check_model

    if getattr(model, "vision", None) is None:
        raise UsageError(
            f"data.loader.processor is {type(config).__name__}, and the model has no vision tower (model.vision). Take a size of a family that sees, or set data.loader.processor=none."
        )
    processor: Processor = plugins.build(config, plugins.build(data.tokenizer))
    check_model(processor, model)
    return processor


def decoder_of(processor: Processor | None) -> Decoder | None:
    """What loads media by it."""
    if processor is None:
        return None
    from intarsia_multimodal.decoding import Decoder

    return Decoder(processor)


def media_of(turns: Sequence[Turn]) -> list[Media]:
    """The media in turns, in order."""
    return [part for turn in turns if not isinstance(turn.content, str) for part in turn.content if isinstance(part, Media)]


def with_ids(turns: Sequence[Turn], processor: Processor | None) -> list[Turn]:
    """The turns with each medium as the ids of its block. EnvironmentFailure for a medium that cannot be used, UsageError where the run has no processor."""
    if not media_of(turns):
        return list(turns)
    if processor is None:
        raise UsageError(
            "The environment shows images or video, and the run has no processor that makes tokens of them: set data.loader.processor (patches is the one of the Qwen families) and take a model that "
            "sees."
        )
    with used("a turn"):
        return [
            turn if isinstance(turn.content, str) else dataclasses.replace(turn, content=processor.as_ids(turn.content)) for turn in turns
        ]


class Files:
    """The files that an episode has shown, each by what was in it: to the end they have to hold what the policy saw, since every later turn, and the trainer, read them again."""

    def __init__(self) -> None:
        self._found: dict[str, object] = {}

    def take(self, shown: Sequence[Media]) -> None:
        """Of a turn, where they can be used. EnvironmentFailure for one that was shown before and is another one now."""
        for medium in shown:
            if isinstance(medium.data, str):
                self._found.setdefault(medium.data, contents_of(medium.data))
        self.check()

    def check(self) -> None:
        """EnvironmentFailure for a file that is gone, or another one."""
        for path, found in self._found.items():
            if contents_of(path) != found:
                raise EnvironmentFailure(
                    "environment",
                    f"the file {path} was shown, and has been written anew or removed since: the policy would be trained on what it has not seen. Give what changes as bytes, or each turn a file of "
                    "its own, and leave it there",
                )


def contents_of(path: str) -> object:
    """What tells a file from one that stands in its place later: its contents or, where it is large, its size and when it was written; None for what is no file, such as an URL."""
    from intarsia_multimodal.decoding import digest_of

    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return None
    return digest_of(Media("image", path)) if facts.st_size <= HASHED_BYTES else (facts.st_size, facts.st_mtime_ns, facts.st_ino)


@contextlib.contextmanager
def used(where: str) -> Iterator[None]:
    """A medium that cannot be used (MediaError) is a failure of the environment, which shows it, and not the end of the run: EnvironmentFailure. What is missing here, such as a library that decodes,
    is none, and stays a UsageError."""
    from intarsia_multimodal.contracts import MediaError

    try:
        yield
    except MediaError as error:
        raise EnvironmentFailure("environment", f"{where} shows a medium that cannot be used: {error}") from error


def placed(ids: Sequence[int], media: Sequence[Media], processor: Processor, first: int = 0) -> tuple[PlacedMedia, ...]:
    """Where the blocks of these media, in order, stand in rendered ids, of which the first is token `first`.

    Errors: PluginError where a renderer left one out; EnvironmentFailure where a policy's own tokens among them look like one, and nobody could tell which is which.
    """
    if not media:
        return ()
    ids = list(ids)
    with used("a turn"):
        blocks = [tuple(processor.as_ids((medium,))) for medium in media]
    starts = {block: occurrences(ids, block) for block in blocks}
    found: list[PlacedMedia] = []
    taken = bytearray(len(ids))
    cursor = 0
    for medium, block in zip(media, blocks, strict=True):
        at = next((start for start in starts[block] if start >= cursor), None)
        if at is None:
            raise PluginError("The renderer left out or changed the tokens of a medium, which it has to take as they are.")
        found.append(PlacedMedia(medium, first + at))
        cursor = at + len(block)
        taken[at:cursor] = b"\1" * len(block)
    # A block may be within another one: a longer video begins like a shorter one.
    if not all(all(taken[start : start + len(block)]) for block, where in starts.items() for start in where):
        raise EnvironmentFailure("model", "the policy has written the tokens of an image itself, in a history that is rendered anew")
    return tuple(found)


def occurrences(ids: Sequence[int], block: Parts) -> list[int]:
    """Where `block` begins in `ids`."""
    found, at = [], -1
    with contextlib.suppress(ValueError):  # there is no further one
        while True:
            at = ids.index(block[0], at + 1)  # type: ignore[arg-type]
            if tuple(ids[at : at + len(block)]) == block:
                found.append(at)
    return found


def prepared(tokens: Sequence[int], media: Sequence[PlacedMedia], processor: Processor) -> Prepared:
    """Slots and positions of tokens in which these media stand. Placeholders elsewhere count as text. Errors: MediaError; UsageError where a block is not at its place."""
    own = set(processor.ids.values())
    text = next(number for number in range(len(own) + 1) if number not in own)
    shown = [text if token in own else token for token in tokens]
    for each in media:
        stop = each.at + len(processor.as_ids((each.media,)))
        shown[each.at : stop] = tokens[each.at : stop]
    found = processor.locate(shown, [each.media for each in media])
    if [slot.at for slot in found.media] != [each.at for each in media]:
        raise UsageError(
            f"The media of a sequence begin at tokens {[slot.at for slot in found.media]}, and were said to at {[each.at for each in media]}."
        )
    return found
