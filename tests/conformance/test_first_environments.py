"""The environments of `intarsia-environments` keep the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from intarsia.contracts import Task, Turn
from intarsia_environments.config import AlphabetSortConfig, ArithmeticConfig
from intarsia_testing import EnvironmentConformance

SPLITS = ("train", "held_out")


class TestArithmetic(EnvironmentConformance):
    entry = "intarsia-environments:arithmetic"
    splits = SPLITS
    configs: ClassVar = (ArithmeticConfig(tasks=50, held_out=10),)

    def action(self, task: Task, history: Sequence[Turn]) -> Turn:
        return Turn("assistant", task.data["answer"], tokens=(1, 2))


class TestHardArithmetic(TestArithmetic):
    configs: ClassVar = (ArithmeticConfig(level=4, tasks=50, held_out=10, instructions=""),)


class TestAlphabetSort(EnvironmentConformance):
    entry = "intarsia-environments:alphabet_sort"
    splits = SPLITS
    configs: ClassVar = (AlphabetSortConfig(tasks=50, held_out=10),)

    def action(self, task: Task, history: Sequence[Turn]) -> Turn:
        names = [name for turn in history if turn.role == "user" for name in str(turn.content).split()]
        return Turn("assistant", " ".join(sorted(names)), tokens=(1, 2))
