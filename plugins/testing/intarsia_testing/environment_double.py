"""Test doubles for reinforcement learning: an environment, a generator and a clock, all exact and without waiting. Torch-free."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Callable, Sequence

from intarsia.contracts import Limits, Observation, StepResult, Task, ToolSpec, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError, did_you_mean
from intarsia_data.tokenizer import text_of

GUESS = ToolSpec(
    "guess",
    "Guess the number. The answer says whether it is higher or lower.",
    {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
)


@dataclasses.dataclass
class GuessEpisode:
    """Guess a number between 1 and 10 by a tool, in a bounded number of turns."""

    task: Task
    secret: int
    limits: Limits
    fail_at: int | None = None
    turns: int = 0
    over: bool = False
    closed: int = 0

    async def reset(self) -> Observation:
        """The question and the tool."""
        text = f"{self.task.data['hint']} Guess the number between 1 and 10 with the tool `guess`."
        return Observation((Turn("user", text),), tools=(GUESS,))

    async def step(self, action: Turn) -> StepResult:
        """Answer one guess."""
        if self.over:
            raise UsageError(f"The episode of task {self.task.id!r} is over: take no step after `ended` or `truncated`.")
        await asyncio.sleep(0)
        self.turns += 1
        if self.turns == self.fail_at:
            raise EnvironmentFailure("sandbox", "the sandbox is gone", retry=True)
        replies, right = self.replies(action)
        truncated = not right and self.turns == self.limits.turns
        self.over = right or truncated
        observation = None if self.over else Observation(replies, tools=(GUESS,))
        return StepResult(observation, reward=float(right), ended=right, truncated=truncated, metrics={"turns": self.turns})

    def replies(self, action: Turn) -> tuple[tuple[Turn, ...], bool]:
        """One answer for each call, and whether a guess was right."""
        if not action.tool_calls:
            return (Turn("user", "Use the tool `guess`."),), False
        answers, right = [], False
        for call in action.tool_calls:
            try:
                number = json.loads(call.arguments)["number"] if call.name == "guess" else None
            except (ValueError, KeyError, TypeError):
                number = None
            if isinstance(number, int):
                right |= number == self.secret
                text = "right" if number == self.secret else "higher" if number < self.secret else "lower"
            else:
                text = 'error: call the tool `guess` with {"number": INTEGER}.'
            answers.append(Turn("tool", text, tool_call_id=call.id))
        return tuple(answers), right

    async def close(self) -> None:
        """Count."""
        self.closed += 1


@dataclasses.dataclass
class FewTurns:
    """Scores 1 for the shortest episode of a group and less for the others: a rubric that needs the whole group."""

    name: str = "few_turns"
    weight: float = 0.1

    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> list[float]:
        """The shortest length over each length."""
        lengths = [max(1, len(episode)) for episode in episodes]
        return [min(lengths) / length for length in lengths]


class GuessEnvironment:
    """An Environment of the contract that keeps every promise. `fail_at` is the turn at which every episode's sandbox fails. `episodes` are those begun."""

    def __init__(self, tasks: int = 4, turns: int = 6, fail_at: int | None = None) -> None:
        self.limits = Limits(turns=turns)
        self.fail_at = fail_at
        self.episodes: list[GuessEpisode] = []
        self._tasks = {
            split: [Task(f"{split}/{number}", {"hint": f"Riddle {number}."}, split) for number in range(tasks)]
            for split in ("train", "evaluation")
        }

    def tasks(self, split: str) -> Sequence[Task]:
        """Riddles of the splits train and evaluation."""
        if split not in self._tasks:
            raise UsageError(f"There is no split {split!r}. {did_you_mean(split, self._tasks)} Splits: {', '.join(self._tasks)}.")
        return self._tasks[split]

    def episode(self, task: Task, seed: int) -> GuessEpisode:
        """A new try; the number follows from the task and the seed."""
        secret = random.Random(f"{task.id} {seed}").randint(1, 10)
        episode = GuessEpisode(task, secret, self.limits, self.fail_at)
        self.episodes.append(episode)
        return episode

    def rubrics(self) -> Sequence[FewTurns]:
        """One that compares the episodes of a group."""
        return (FewTurns(),)


class ScriptedGenerator:
    """A policy that says what it is told: the texts or turns of a script in order, or what a function of the history gives.

    Every turn gets tokens (the bytes of its text), as a real generator's turns have. `histories` are the questions it was asked. A script that is used up is an
    AssertionError: the test asked for more turns than it meant to.
    """

    def __init__(self, script: Sequence[str | Turn] | Callable[[Sequence[Turn]], str | Turn]) -> None:
        self._script = script
        self.histories: list[tuple[Turn, ...]] = []

    async def generate(self, history: Sequence[Turn], tools: Sequence[ToolSpec] = ()) -> Turn:
        """The next turn."""
        await asyncio.sleep(0)
        return self.next(history)

    def next(self, history: Sequence[Turn]) -> Turn:
        """The next turn, without a loop."""
        self.histories.append(tuple(history))
        if callable(self._script):
            said = self._script(history)
        else:
            number = len(self.histories)
            assert number <= len(self._script), f"the script has {len(self._script)} turns and turn {number} was asked for"
            said = self._script[number - 1]
        turn = Turn("assistant", said) if isinstance(said, str) else said
        return turn if turn.tokens is not None else dataclasses.replace(turn, tokens=tuple(text_of(turn.content).encode()))
