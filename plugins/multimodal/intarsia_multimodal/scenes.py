"""What the images of `drawn` show, and the questions on them: values, drawn from numbers by arithmetic of our own, so that they never depend on the version of a library."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {"red": (235, 60, 60), "green": (50, 190, 80), "blue": (70, 110, 245), "yellow": (240, 215, 60)}
PLACES = ("top left", "top right", "bottom left", "bottom right")
FONTS = ("regular", "bold", "slanted", "bitmap")
DIGITS = tuple("0123456789")
COUNTS = ("1", "2", "3", "4")
ANSWERS: dict[str, tuple[str, ...]] = {
    "shape": SHAPES, "colour": tuple(COLOURS), "count": COUNTS, "digit": DIGITS, "place": PLACES, "colour_of": tuple(COLOURS),
}  # fmt: skip
"""The answers to each kind of question, all equally often: a guess is right once in their number."""
UNIT = 24
"""Places and sizes in a scene are in parts of this of the image's side."""
HELD_OUT = 10
"""One scene in so many is held out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A shape or digit: its middle and its width, in units, its colour, and for a digit its font."""

    what: str
    colour: str
    x: int
    y: int
    width: int
    font: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """Items on a dark background of a grey level, and a question with its answer."""

    items: tuple[Item, ...]
    background: int
    question: str
    answer: str

    def is_held_out(self) -> bool:
        """Whether it belongs to the held-out scenes: a function of what is to be seen alone."""
        return _hash((self.items, self.background)) % HELD_OUT == 0


class Draws:
    """Numbers from a key, one after the other."""

    def __init__(self, *key: object):
        self._key, self._count = key, 0

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1."""
        self._count += 1
        return _hash((self._key, self._count)) % count

    def between(self, first: int, last: int) -> int:
        """A number from `first` to `last`."""
        return first + self.below(last - first + 1)

    def one_of(self, choices: Sequence[Choice]) -> Choice:
        """One of them."""
        return choices[self.below(len(choices))]

    def some_of(self, choices: Sequence[Choice], count: int) -> list[Choice]:
        """Different ones, in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


def scene(kind: str, answer: int, draws: Draws) -> Scene:
    """A scene with a question of this kind, whose answer is number `answer` of `ANSWERS[kind]`."""
    words = ANSWERS[kind][answer]
    items, question = _ITEMS[kind](words, draws)
    return Scene(tuple(items), draws.between(10, 60), question, words)


def _one(what: str, colour: str, draws: Draws, font: str = "") -> Item:
    """An item alone, anywhere that leaves it whole."""
    width = draws.between(UNIT // 2, UNIT - 6)
    reach = range((width + 1) // 2 + 1, UNIT - (width + 1) // 2)
    return Item(what, colour, draws.one_of(reach), draws.one_of(reach), width, font)


def _shape(answer: str, draws: Draws) -> tuple[list[Item], str]:
    return [_one(answer, draws.one_of(tuple(COLOURS)), draws)], "What shape is it?"


def _colour(answer: str, draws: Draws) -> tuple[list[Item], str]:
    return [_one(draws.one_of(SHAPES), answer, draws)], "What colour is it?"


def _digit(answer: str, draws: Draws) -> tuple[list[Item], str]:
    return [_one(answer, draws.one_of(tuple(COLOURS)), draws, draws.one_of(FONTS))], "Which digit is it?"


def _count(answer: str, draws: Draws) -> tuple[list[Item], str]:
    cells = draws.some_of([(row, column) for row in range(3) for column in range(3)], int(answer))
    third = UNIT // 3
    items = [
        Item(draws.one_of(SHAPES), draws.one_of(tuple(COLOURS)), column * third + third // 2, row * third + third // 2, draws.between(5, 7))
        for row, column in sorted(cells)
    ]
    return items, "How many shapes are there?"


def _place(answer: str, draws: Draws) -> tuple[list[Item], str]:
    what, half = draws.one_of(SHAPES), UNIT // 2
    x = draws.between(4, 7) + half * answer.endswith("right")
    y = draws.between(4, 7) + half * answer.startswith("bottom")
    return [Item(what, draws.one_of(tuple(COLOURS)), x, y, draws.between(5, 8))], f"Where is the {what}?"


def _colour_of(answer: str, draws: Draws) -> tuple[list[Item], str]:
    asked, other = draws.some_of(SHAPES, 2)
    different = draws.one_of([colour for colour in COLOURS if colour != answer])
    left, right = draws.some_of([(asked, answer), (other, different)], 2)
    quarter, width = UNIT // 4, draws.between(8, 11)
    items = [Item(*each, place, draws.between(8, UNIT - 8), width) for each, place in ((left, quarter), (right, UNIT - quarter))]
    return items, f"What colour is the {asked}?"


_ITEMS = {"shape": _shape, "colour": _colour, "count": _count, "digit": _digit, "place": _place, "colour_of": _colour_of}
