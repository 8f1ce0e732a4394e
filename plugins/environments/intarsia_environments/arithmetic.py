"""The environment `arithmetic`: a question, a number, the end. Torch-free."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from intarsia.contracts import Limits, Observation, Rubric, StepResult, Task, Turn
from intarsia.errors import UsageError

from intarsia_environments.config import ArithmeticConfig
from intarsia_environments.splits import Splits
from intarsia_environments.turns import said

NUMBER = re.compile(r"-?\d+")


@dataclasses.dataclass(frozen=True)
class Level:
    """Questions of `terms` numbers from 0 to `largest`; sums alone have no brackets."""

    operators: str
    largest: int
    terms: int = 2


LEVELS = {0: Level("+", 2, 5), 1: Level("+", 9), 2: Level("+-", 99), 3: Level("+-*", 999), 4: Level("+-*", 99, 4)}
MOST_LISTED = 20_000
"""Up to this many questions of a level are all listed; of more, some are drawn."""


def questions(level: Level, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Questions in an order that the seed decides. Its key is the question."""
    chance = random.Random(f"arithmetic {seed}")
    numbers, flat = range(level.largest + 1), level.terms == 2 or level.operators == "+"
    if flat and len(level.operators) ** (level.terms - 1) * len(numbers) ** level.terms <= MOST_LISTED:
        every = [
            _question(terms, operators)
            for operators in itertools.product(level.operators, repeat=level.terms - 1)
            for terms in itertools.product(numbers, repeat=level.terms)
        ]
        chance.shuffle(every)
        yield from every
        return
    for _ in range(MOST_LISTED):
        if flat:
            yield _question(chance.choices(numbers, k=level.terms), chance.choices(level.operators, k=level.terms - 1))
        else:
            text, value = _expression(chance, level, level.terms)
            yield text, {"question": text, "answer": str(value)}


def _question(terms: Sequence[int], operators: Sequence[str]) -> tuple[str, dict[str, Any]]:
    text, value = str(terms[0]), terms[0]
    for operator, number in zip(operators, terms[1:], strict=True):
        text, value = f"{text}{operator}{number}", _apply(value, operator, number)
    return text, {"question": text, "answer": str(value)}


def _expression(chance: random.Random, level: Level, terms: int) -> tuple[str, int]:
    """An expression of so many numbers, every operation of several in brackets, and its value."""
    if terms == 1:
        number = chance.randint(0, level.largest)
        return str(number), number
    left = chance.randint(1, terms - 1)
    (a, x), (b, y) = _expression(chance, level, left), _expression(chance, level, terms - left)
    operator = chance.choice(level.operators)
    text = f"{a if left == 1 else f'({a})'}{operator}{b if terms - left == 1 else f'({b})'}"
    return text, _apply(x, operator, y)


def _apply(a: int, operator: str, b: int) -> int:
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def reward(answer: str, text: str, partial: float) -> float:
    """1 where the last whole number in the text is the answer; else `partial` times the share of its digits that are right, counted from the last one."""
    found = NUMBER.findall(text)
    given = _plain(found[-1]) if found else ""
    if given == answer:
        return 1.0
    right = sum(a == b for a, b in zip(reversed(given), reversed(answer), strict=False))
    return partial * right / max(len(given), len(answer))


def _plain(number: str) -> str:
    """Without zeros before it; as text, for a policy may write more digits than Python takes for a number."""
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    digits = digits.lstrip("0") or "0"
    return digits if digits == "0" else sign + digits


class ArithmeticEpisode:
    """One question."""

    def __init__(self, environment: Arithmetic, task: Task):
        self._environment, self._task, self._over = environment, task, False

    async def reset(self) -> Observation:
        """The question."""
        instructions = self._environment.config.instructions
        first = (Turn("system", instructions),) if instructions else ()
        return Observation((*first, Turn("user", self._task.data["question"])))

    async def step(self, action: Turn) -> StepResult:
        """Judge the answer."""
        if self._over:
            raise UsageError(f"arithmetic: the episode of task {self._task.id} is over: take no step after its end.")
        self._over = True
        earned = reward(self._task.data["answer"], said(action), self._environment.config.partial)
        return StepResult(None, reward=earned, ended=True, metrics={"right": float(earned == 1.0)})

    async def close(self) -> None:
        """Nothing is held."""


class Arithmetic:
    """The environment."""

    def __init__(self, config: ArithmeticConfig):
        if config.level not in LEVELS:
            raise UsageError(f"arithmetic: level is {config.level}; levels are {', '.join(map(str, LEVELS))}.")
        if not 0 <= config.partial < 1:
            raise UsageError(
                f"arithmetic: partial is {config.partial}; it must be from 0 on and below 1, which is the right answer's reward."
            )
        if config.tokens is not None and config.tokens < 1:
            raise UsageError(f"arithmetic: tokens is {config.tokens}; it must be at least 1, or none.")
        self.config = config
        self._splits = Splits("arithmetic", config.seed, questions(LEVELS[config.level], config.seed), config.tasks, config.held_out)
        longest = max(len(task.data["answer"]) for split in ("train", "held_out") for task in self.tasks(split))
        self.limits = Limits(turns=1, tokens_per_turn=config.tokens or longest + 1)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split."""
        return self._splits.tasks(split)

    def episode(self, task: Task, seed: int) -> ArithmeticEpisode:
        """A try; there is no chance in it."""
        return ArithmeticEpisode(self, task)

    def rubrics(self) -> Sequence[Rubric]:
        """None: the step carries the reward."""
        return ()


def build(config: ArithmeticConfig) -> Arithmetic:
    """The environment."""
    return Arithmetic(config)
