"""The kit's own environment keeps every promise of the contract."""

from __future__ import annotations

import json
from collections.abc import Sequence

from intarsia.contracts import Environment, Task, ToolCall, Turn
from intarsia_testing import EnvironmentConformance
from intarsia_testing.environment_double import GuessEnvironment


class TestGuess(EnvironmentConformance):
    splits = ("train", "evaluation")

    def environment(self) -> Environment:
        return GuessEnvironment()

    def action(self, task: Task, history: Sequence[Turn]) -> Turn:
        """Bisect."""
        low, high, guess = 1, 10, 5
        for turn in history:
            if turn.tool_calls:
                guess = json.loads(turn.tool_calls[0].arguments)["number"]
            elif turn.role == "tool":
                low, high = (guess + 1, high) if turn.content == "higher" else (low, guess - 1)
        return Turn("assistant", "", (1,), (ToolCall("a", "guess", json.dumps({"number": (low + high) // 2})),))

    def failure(self) -> tuple[Environment, Task, Turn]:
        environment = GuessEnvironment(fail_at=1)
        return environment, environment.tasks("train")[0], Turn("assistant", "5")


class TestGuessBySilence(EnvironmentConformance):
    def environment(self) -> Environment:
        return GuessEnvironment(turns=3)
