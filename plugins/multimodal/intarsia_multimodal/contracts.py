"""Processors: documents with images and video become tokens, of which some stand for visual features, and patches of pixels. Torch-free.

Shapes: n tokens of a document, N patches, C values of a patch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy
from intarsia.contracts import Document, Media, Parts
from intarsia.errors import UsageError


class MediaError(UsageError):
    """An image or a video cannot be used: missing, damaged, refused. A loader stops at it or leaves its document out, by policy. Stability: provisional."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One image or video of a document. Stability: provisional.

    Tokens `at` to `stop` are its block, marks and timestamps included, which is never cut in two; of these, `spans` (first token, count) stand for its features, in order.
    `grid` is (frames, rows, columns) in patches, `frames` the numbers of a video's frames that are taken, `size` its (height, width) before any resizing.
    """

    media: Media
    at: int
    stop: int
    spans: tuple[tuple[int, int], ...]
    grid: tuple[int, int, int]
    frames: tuple[int, ...] = ()
    size: tuple[int, int] = (0, 0)

    @property
    def patches(self) -> int:
        """How many patches it has."""
        return math.prod(self.grid)

    @property
    def features(self) -> int:
        """How many tokens stand for its features."""
        return sum(count for _, count in self.spans)


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A document as tokens: int64 ids [n], whether each is trained on (bool [n]; never in a medium's block), its media in order, positions in time, height and
    width (int64 [3, n], from 0), and the bytes of UTF-8 that it holds. Stability: provisional."""

    tokens_N: numpy.ndarray
    trained_N: numpy.ndarray
    positions_3N: numpy.ndarray
    media: tuple[Slot, ...]
    text_bytes: int

    def visual(self, first: int = 0) -> numpy.ndarray:
        """The number of the feature that stands in each token's place, counted from `first` on; -1: none. int64 [n]."""
        numbers = numpy.full(len(self.tokens_N), -1, numpy.int64)
        for slot in self.media:
            for at, count in slot.spans:
                numbers[at : at + count] = numpy.arange(first, first + count)
                first += count
        return numbers

    @property
    def features(self) -> int:
        """How many tokens stand for features."""
        return sum(slot.features for slot in self.media)

    def cut(self, length: int) -> Prepared:
        """Its first `length` tokens, which cut no block in two."""
        kept = tuple(slot for slot in self.media if slot.stop <= length)
        return Prepared(self.tokens_N[:length], self.trained_N[:length], self.positions_3N[:, :length], kept, self.text_bytes)


@runtime_checkable
class Processor(Protocol):
    """Documents to tokens and patches. Built from its settings and the tokenizer, alike in every process. Stability: provisional.

    `patch_values` is C, `merge` how many patches on a side make one feature, `ids` the special tokens that it uses, by the names that a model's settings have
    for them (`image_id`, `video_id`, `vision_start_id`, `vision_end_id`), and `shape` further numbers that a model's `vision` settings must agree with
    (`patch`, `temporal_patch`, `merge`, `channels`).
    """

    patch_values: int
    merge: int
    ids: Mapping[str, int]
    shape: Mapping[str, int]

    def prepare(self, document: Document) -> Prepared:
        """Tokens of a document, with bos and eos where the tokenizer has them. Reads no more of media than their headers: what it gives decides the plan of a run.

        Errors: MediaError where a medium cannot be used, UsageError where the document is wrong.
        """

    def as_ids(self, parts: Parts) -> Parts:
        """The parts with each medium as the ids of its block: for whoever writes a conversation himself, and gives its tokens to `locate`. Errors: MediaError."""

    def locate(self, tokens: Sequence[int], media: Sequence[Media]) -> Prepared:
        """Tokens that are final, in which the blocks of these media stand, in order: their slots and positions; nothing is trained on. Errors: MediaError; UsageError where the
        tokens have more placeholders than the media need, or fewer, or other tokens around them."""

    def load(self, slot: Slot) -> numpy.ndarray:
        """The patches of a medium, float32 [frames * rows * columns, C], in merge-block order: frame, block row, block column, row in the block, column in the
        block. Errors: MediaError where it cannot be decoded or is another one than it was when it was prepared."""

    def fingerprint(self) -> str:
        """Equal exactly when `prepare` and `load` behave the same, apart from the tokenizer."""


def check_model(processor: Processor, model: Any) -> None:
    """UsageError unless the processor's special tokens and the shape of its patches are those that the model's settings say."""
    vision = getattr(model, "vision", None)
    wrong = [
        f"model.{name} is {theirs}, and the tokenizer's special token has the id {ours}"
        for name, ours in processor.ids.items()
        if (theirs := getattr(model, name, ours)) != ours
    ]
    wrong += [
        f"model.vision.{name} is {theirs}, and the processor's {ours}"
        for name, ours in processor.shape.items()
        if (theirs := getattr(vision, name, ours)) != ours
    ]
    if wrong:
        raise UsageError(
            f"data.loader.processor is not that of the model: {'; '.join(wrong)}. Take the family's processor and tokenizer for this model."
        )
