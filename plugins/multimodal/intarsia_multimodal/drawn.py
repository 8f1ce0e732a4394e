"""The source `drawn`: questions on images that the program draws."""

from __future__ import annotations

import functools
import hashlib

from intarsia.contracts import Document, Media, Message
from intarsia.errors import UsageError
from intarsia_data.order import key_of
from PIL import Image

from intarsia_multimodal.config import DrawnConfig
from intarsia_multimodal.drawing import draw, png
from intarsia_multimodal.scenes import ANSWERS, Draws, Scene, scene

VERSION = 1
"""Of scenes and drawing. It goes up whenever a document's number comes to mean another one."""


class DrawnSource:
    """Document n asks a question of kind n mod K; the answers to a kind take turns, so that each is given equally often. Scenes are drawn until one belongs to the part that is asked
    for: the same scene is never in `train` and in `held_out`, whatever their seeds."""

    def __init__(self, config: DrawnConfig):
        self._config = config

    def __len__(self) -> int:
        return self._config.documents

    def kind_of(self, index: int) -> str:
        """The kind of document `index`'s question."""
        return self._config.questions[index % len(self._config.questions)]

    def chance(self) -> float:
        """The share of right answers that one gets who knows the question and does not look."""
        return sum(1 / len(ANSWERS[kind]) for kind in self._config.questions) / len(self._config.questions)

    def scene(self, index: int) -> Scene:
        """What document `index` shows and asks."""
        config, kind = self._config, self.kind_of(index)
        answer = index // len(config.questions) % len(ANSWERS[kind])
        number = 0
        while True:
            found = scene(kind, answer, Draws(VERSION, config.seed, config.part, kind, index, number))
            if config.part == "all" or found.is_held_out() == (config.part == "held_out"):
                return found
            number += 1

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise UsageError(f"drawn: there is no document {index}; there are {len(self)}.")
        found, config = self.scene(index), self._config
        return conversation(found, png(draw(found, config.size, config.noise, key_of(VERSION, config.seed, config.part, index))))

    def outline(self, index: int) -> Document:
        """Document `index` with an image of the same size that is not drawn: enough to know its tokens."""
        return conversation(self.scene(index), self._blank)

    @functools.cached_property
    def _blank(self) -> bytes:
        return png(Image.new("RGB", (self._config.size, self._config.size)))

    def fingerprint(self) -> str:
        """Over the version of the drawing and the settings."""
        return hashlib.blake2b(f"drawn {VERSION} {self._config}".encode(), digest_size=16).hexdigest()


def conversation(asked: Scene, image: bytes) -> Document:
    """The user shows an image and asks; the assistant answers."""
    content = (Media("image", image, "image/png"), asked.question)
    return Document(messages=(Message("user", content), Message("assistant", asked.answer)))
