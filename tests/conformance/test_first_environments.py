"""The environments of `intarsia-environments` keep the contract."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from intarsia.contracts import Environment, Task, ToolCall, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia_environments.code import Code
from intarsia_environments.config import AlphabetSortConfig, ArithmeticConfig, CodeConfig
from intarsia_sandbox.contracts import Completed
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


class Broken:
    """A sandbox that is gone."""

    def confinement(self) -> Mapping[str, str]:
        return {"everything": "it is gone"}

    async def run(self, *arguments: object, **named: object) -> Completed:
        raise EnvironmentFailure("sandbox", "it is gone", retry=True)


class TestCode(EnvironmentConformance):
    entry = "intarsia-environments:code"
    splits = SPLITS
    configs: ClassVar = (CodeConfig(tasks=20, held_out=4, tests=4, turns=2),)
    max_tasks = 2

    def action(self, task: Task, history: Sequence[Turn]) -> Turn:
        """A wrong function, and then the right one where the question is to add."""
        words = str(next(turn.content for turn in history if turn.role == "user"))
        k = words.partition("x plus ")[2][:1] if history[-1].role == "tool" else "0"
        source = f"def f(x): return x + {k or 0}"
        return Turn("assistant", "", tokens=(1,), tool_calls=(ToolCall("call-1", "submit", json.dumps({"code": source})),))

    def failure(self) -> tuple[Environment, Task, Turn]:
        environment = Code(CodeConfig(form="text"), Broken())
        return environment, environment.tasks("train")[0], Turn("assistant", "def f(x): return x")
