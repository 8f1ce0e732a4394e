"""The environment `drawn`: an image, a question about it, a word. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intarsia.contracts import Limits, Observation, Rubric, StepResult, Task, Turn
from intarsia.errors import UsageError, did_you_mean
from intarsia_data.tokenizer import text_of

from intarsia_multimodal.config import DrawnConfig, DrawnTasksConfig
from intarsia_multimodal.drawn import DrawnSource
from intarsia_multimodal.exam import plain
from intarsia_multimodal.scenes import ANSWERS

SPLITS = ("train", "held_out")
REASONED = "</think>"


def reward(answer: str, text: str, partial: float) -> float:
    """1 where the text behind its reasoning is the answer, but for case and for blanks and punctuation around it; else `partial` times the share of letters that are in their places."""
    given, wanted = plain(text.rpartition(REASONED)[2]), plain(answer)
    if given == wanted:
        return 1.0
    return partial * sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))


class DrawnEpisode:
    """One question."""

    def __init__(self, environment: Drawn, task: Task):
        self._environment, self._task, self._over = environment, task, False

    async def reset(self) -> Observation:
        """The image and the question."""
        config = self._environment.config
        first = (Turn("system", config.instructions),) if config.instructions else ()
        (asked, _) = self._environment.source(self._task.split)[self._task.data["number"]].messages or ()
        shown = asked.content if config.ask else asked.content[:1]
        return Observation((*first, Turn("user", shown)))

    async def step(self, action: Turn) -> StepResult:
        """Judge the answer."""
        if self._over:
            raise UsageError(f"drawn: the episode of task {self._task.id} is over: take no step after its end.")
        self._over = True
        earned = reward(self._task.data["answer"], text_of(action.content), self._environment.config.partial)
        return StepResult(None, reward=earned, ended=True, metrics={"right": float(earned == 1.0)})

    async def close(self) -> None:
        """Nothing is held."""


class Drawn:
    """The environment."""

    def __init__(self, config: DrawnTasksConfig):
        self.config = config
        alike: dict[str, Any] = {"questions": config.questions, "size": config.size, "noise": config.noise, "seed": config.seed}
        counts = {"train": config.tasks, "held_out": config.held_out}
        self._sources = {split: DrawnSource(DrawnConfig(documents=counts[split], part=split, **alike)) for split in SPLITS}
        for kind in config.questions:
            if len({self.shortened(answer) for answer in ANSWERS[kind]}) < len(ANSWERS[kind]):
                raise UsageError(
                    f"drawn: answers to {kind!r} begin with the same letter ({', '.join(ANSWERS[kind])}). Set answer=words, or ask other questions."
                )
        longest = max(len(self.shortened(answer)) for kind in config.questions for answer in ANSWERS[kind])
        self.limits = Limits(turns=1, tokens_per_turn=config.tokens or longest + 1)

    def source(self, split: str) -> DrawnSource:
        """The documents that tasks of a split show."""
        return self._sources[split]

    def shortened(self, answer: str) -> str:
        """An answer as it is asked for."""
        return answer[0] if self.config.answer == "letter" else answer

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split. UsageError for one that does not exist."""
        if split not in SPLITS:
            raise UsageError(f"drawn: there is no split {split!r}. {did_you_mean(split, SPLITS)} Splits: {', '.join(SPLITS)}.")
        source = self.source(split)
        return [
            Task(
                f"{split}/{number}",
                {"number": number, "kind": source.kind_of(number), "answer": self.shortened(source.scene(number).answer)},
                split,
            )
            for number in range(len(source))
        ]

    def episode(self, task: Task, seed: int) -> DrawnEpisode:
        """A try; there is no chance in it."""
        return DrawnEpisode(self, task)

    def rubrics(self) -> Sequence[Rubric]:
        """None: the step carries the reward."""
        return ()


def build(config: DrawnTasksConfig) -> Drawn:
    """The environment."""
    return Drawn(config)
