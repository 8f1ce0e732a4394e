"""Functions to write: the tasks of the environment `code`. Each is a sentence, a reference that gives the answers, and a way to draw arguments. Torch-free."""

from __future__ import annotations

import dataclasses
import itertools
import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """Functions that differ in a number k. `draws` names what each argument is drawn from."""

    name: str
    text: str
    parameters: tuple[str, ...]
    draws: tuple[str, ...]
    reference: Callable[..., Any]


DRAWS: dict[str, Callable[[random.Random], Any]] = {
    "digit": lambda chance: chance.randint(0, 9),
    "number": lambda chance: chance.randint(-20, 20),
    "count": lambda chance: chance.randint(1, 30),
    "numbers": lambda chance: [chance.randint(-9, 9) for _ in range(chance.randint(0, 7))],
    "text": lambda chance: "".join(chance.choice(string.ascii_lowercase + "  ") for _ in range(chance.randint(0, 12))),
}
ONE, TWO = ("x",), ("a", "b")

ARITHMETIC = (
    Family("add", "x plus {k}", ONE, ("number",), lambda k, x: x + k),
    Family("subtract", "x minus {k}", ONE, ("number",), lambda k, x: x - k),
    Family("multiply", "x times {k}", ONE, ("number",), lambda k, x: x * k),
    Family("subtract_from", "{k} minus x", ONE, ("number",), lambda k, x: k - x),
    Family("square_plus", "the square of x, plus {k}", ONE, ("number",), lambda k, x: x * x + k),
    Family("remainder", "the remainder of x divided by {k}, as Python's % gives it", ONE, ("count",), lambda k, x: x % k),
)
EXPRESSIONS = tuple(dataclasses.replace(family, draws=("digit",)) for family in ARITHMETIC[:4])
CONDITIONS = (
    Family("larger", "the larger one of a and b, plus {k}", TWO, ("number", "number"), lambda k, a, b: max(a, b) + k),
    Family("distance", "how far apart a and b are, but at most {k}", TWO, ("number", "number"), lambda k, a, b: min(abs(a - b), k)),
    Family("clamp", "a, but at least -{k} and at most {k}", ("a",), ("number",), lambda k, a: max(-k, min(k, a))),
    Family("divides", "True if a is divisible by {k}, else False", ("a",), ("count",), lambda k, a: a % k == 0),
    Family("either", "a if a is above {k}, else b", TWO, ("number", "number"), lambda k, a, b: a if a > k else b),
    Family("digits", "the sum of the decimal digits of a times {k}", ("a",), ("count",), lambda k, a: sum(map(int, str(a * k)))),
)
SEQUENCES = (
    Family("above", "how many of the list a are above {k}", ("a",), ("numbers",), lambda k, a: sum(x > k for x in a)),
    Family("scaled", "the list a with every number times {k}", ("a",), ("numbers",), lambda k, a: [x * k for x in a]),
    Family("every", "every {k}-th element of the list a, beginning with the first", ("a",), ("numbers",), lambda k, a: a[::k]),
    Family("rotate", "the list a rotated to the left by {k}; empty if it is empty", ("a",), ("numbers",), lambda k, a: a[k % len(a) :] + a[: k % len(a)] if a else []),
    Family("long_words", "the words of the text a that have at least {k} letters, as a list", ("a",), ("text",), lambda k, a: [w for w in a.split() if len(w) >= k]),
    Family("repeat", "the text a reversed and then repeated {k} times", ("a",), ("text",), lambda k, a: a[::-1] * k),
)  # fmt: skip
STEPS: tuple[tuple[str, str, Callable[[int, list[int]], list[int]]], ...] = (
    ("keep_above", "keep the numbers above {k}", lambda k, a: [x for x in a if x > k - 5]),
    ("times", "multiply every number by {k}", lambda k, a: [x * k for x in a]),
    ("sort", "sort them", lambda k, a: sorted(a)),
    ("reverse", "reverse their order", lambda k, a: a[::-1]),
    ("unique", "leave out every number that came before", lambda k, a: list(dict.fromkeys(a))),
    ("sums", "replace each number by the sum of all up to it", lambda k, a: list(itertools.accumulate(a))),
)
FAMILIES = {0: EXPRESSIONS, 1: ARITHMETIC, 2: CONDITIONS, 3: SEQUENCES}
LEVELS = (0, 1, 2, 3, 4)
NAME = "f"


def functions(level: int, seed: int, tests: int, shown: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, data) of every function of a level, in an order that the seed decides. The data holds the question and the tests, (arguments, answer) each, those that are shown first."""
    found = list(_steps() if level == 4 else _families(FAMILIES[level]))
    random.Random(f"code {seed} {level}").shuffle(found)
    for key, text, parameters, draws, reference in found:
        chance = random.Random(f"code {seed} {key}")
        cases: list[list[Any]] = []
        for number in range(tests):
            # The first example of an expression is that of 0: it shows the number.
            arguments = [0 if level == 0 and number == 0 else DRAWS[draw](chance) for draw in draws]
            cases.append([arguments, reference(*arguments)])
        yield (
            key,
            {"question": _question(level, text, parameters, cases[:shown]), "parameters": list(parameters), "tests": cases, "shown": shown},
        )


Found = tuple[str, str, tuple[str, ...], tuple[str, ...], Callable[..., Any]]


def _families(families: Sequence[Family]) -> Iterator[Found]:
    for family in families:
        for k in range(1, 10):
            yield f"{family.name} {k}", family.text.format(k=k), family.parameters, family.draws, _bind(family.reference, k)


def _steps() -> Iterator[Found]:
    """Two or three different steps one after the other."""
    met: set[str] = set()
    for count in (2, 3):
        for steps in itertools.permutations(STEPS, count):
            for k in (2, 3, 7):
                text = "the numbers of the list a after these steps: " + ", then ".join(
                    words.format(k=k - 5 if name == "keep_above" else k) for name, words, _ in steps
                )
                if text not in met:  # Steps without a number are one function for every k.
                    met.add(text)
                    yield text, text, ("a",), ("numbers",), _chain(steps, k)


def _bind(reference: Callable[..., Any], k: int) -> Callable[..., Any]:
    return lambda *arguments: reference(k, *arguments)


def _chain(steps: Sequence[tuple[str, str, Callable[[int, list[int]], list[int]]]], k: int) -> Callable[..., Any]:
    def run(numbers: list[int]) -> list[int]:
        for _, _, step in steps:
            numbers = step(k, numbers)
        return numbers

    return run


def _question(level: int, text: str, parameters: Sequence[str], shown: Sequence[Sequence[Any]]) -> str:
    """What the policy is asked. An expression is asked for by numbers alone: argument and answer, in turn."""
    if level == 0:
        return " ".join(f"{arguments[0]} {answer}" for arguments, answer in shown)
    examples = [f"{NAME}({', '.join(map(repr, arguments))}) == {answer!r}" for arguments, answer in shown]
    return "\n".join([f"Write a Python function {NAME}({', '.join(parameters)}) that returns {text}.", *examples])
