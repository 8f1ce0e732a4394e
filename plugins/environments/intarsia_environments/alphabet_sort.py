"""The environment `alphabet_sort`: names come in several turns, and each answer is all of them, sorted. Torch-free."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

from intarsia.contracts import Limits, Observation, Rubric, StepResult, Task, Turn
from intarsia.errors import UsageError

from intarsia_environments.config import AlphabetSortConfig
from intarsia_environments.splits import SPLITS, Splits
from intarsia_environments.turns import said

DRAWS = 20
"""Draws for each task that is wanted, before the tasks are taken to be used up."""


def draws(config: AlphabetSortConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names by turn, drawn by the seed; no name twice in a task. The key is all names in their order."""
    chance = random.Random(f"alphabet_sort {config.seed}")
    letters = string.ascii_lowercase[: config.letters]
    count = config.first + config.more * (config.turns - 1)
    for _ in range(DRAWS * (config.tasks + config.held_out)):
        names: list[str] = []
        while len(names) < count:
            name = "".join(chance.choices(letters, k=config.length))
            if name not in names:
                names.append(name)
        starts = [0, *(config.first + config.more * turn for turn in range(config.turns))]
        turns = [names[begin:end] for begin, end in itertools.pairwise(starts)]
        yield " ".join(names), {"turns": turns}


class AlphabetSortEpisode:
    """One list that grows."""

    def __init__(self, environment: AlphabetSort, task: Task):
        self._environment, self._task = environment, task
        self._turns: list[list[str]] = task.data["turns"]
        self._taken, self._over = 0, False

    async def reset(self) -> Observation:
        """The first names."""
        instructions = self._environment.config.instructions
        first = (Turn("system", instructions),) if instructions else ()
        return Observation((*first, self._ask(0)))

    def _ask(self, turn: int) -> Turn:
        return Turn("user", self._environment.config.separator.join(self._turns[turn]))

    async def step(self, action: Turn) -> StepResult:
        """Judge one answer; the next names."""
        if self._over:
            raise UsageError(f"alphabet_sort: the episode of task {self._task.id} is over: take no step after its end.")
        self._taken += 1
        self._over = self._taken == len(self._turns)
        right = sorted(name for names in self._turns[: self._taken] for name in names)
        share = self._environment.share(right, said(action))
        observation = None if self._over else Observation((self._ask(self._taken),))
        earned = share**self._environment.config.exponent / len(self._turns)
        return StepResult(observation, reward=earned, ended=self._over, metrics={"sorted": float(share == 1.0)})

    async def close(self) -> None:
        """Nothing is held."""


class AlphabetSort:
    """The environment."""

    def __init__(self, config: AlphabetSortConfig):
        _check(config)
        self.config = config
        self._splits = Splits("alphabet_sort", config.seed, draws(config), config.tasks, config.held_out)
        longest = max(
            len(config.separator.join(name for names in task.data["turns"] for name in names))
            for split in SPLITS
            for task in self.tasks(split)
        )
        self.limits = Limits(turns=config.turns, tokens_per_turn=config.tokens or longest + 1)

    def share(self, right: Sequence[str], text: str) -> float:
        """The share of places of the longer list at which both have one name."""
        separator = self.config.separator
        if not separator:
            given = list(text.strip())
        elif separator.isspace():
            given = text.split()
        else:
            given = [name.strip() for name in text.split(separator.strip())]
        return sum(a == b for a, b in zip(given, right, strict=False)) / max(len(given), len(right))

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split."""
        return self._splits.tasks(split)

    def episode(self, task: Task, seed: int) -> AlphabetSortEpisode:
        """A try; there is no chance in it."""
        return AlphabetSortEpisode(self, task)

    def rubrics(self) -> Sequence[Rubric]:
        """None: the steps carry the rewards."""
        return ()


def _check(config: AlphabetSortConfig) -> None:
    """Refuse settings under which there is nothing to sort."""
    count = config.first + config.more * (config.turns - 1)
    wrong = {
        f"letters is {config.letters}; it must be from 2 to 26": not 2 <= config.letters <= 26,
        f"length is {config.length}; it must be at least 1": config.length < 1,
        f"first is {config.first}; it must be at least 1": config.first < 1,
        f"more is {config.more}; it must be at least 1": config.more < 1,
        f"turns is {config.turns}; it must be at least 1": config.turns < 1,
        f"tokens is {config.tokens}; it must be at least 1, or none": config.tokens is not None and config.tokens < 1,
        f"exponent is {config.exponent}; it must be above 0": not 0 < config.exponent < float("inf"),
        "separator is empty, and names have several letters: nobody could tell them apart": not config.separator and config.length > 1,
        f"separator is {config.separator!r}, which has a letter of names in it": any(
            letter in string.ascii_lowercase for letter in config.separator
        ),
    }
    found = [text for text, is_wrong in wrong.items() if is_wrong]
    if not found and config.letters**config.length < count:
        found = [f"a task has {count} different names, and there are only {config.letters**config.length}"]
    if found:
        raise UsageError(f"alphabet_sort: {'; '.join(found)}.")


def build(config: AlphabetSortConfig) -> AlphabetSort:
    """The environment."""
    return AlphabetSort(config)
