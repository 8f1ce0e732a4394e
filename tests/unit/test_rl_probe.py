"""Before anything is generated: prompts whose characters the tokenizer cannot tell apart are told, with the setting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_data.config import ByteTokenizerConfig
from intarsia_environments import arithmetic
from intarsia_environments.config import ArithmeticConfig, CharactersConfig
from intarsia_environments.tokenizer import CharacterTokenizer
from intarsia_rl.controller import probe


class Here:
    """Workers in this process. Episodes are counted; those of a task in `broken` fail."""

    def __init__(self, config: ArithmeticConfig, broken: tuple[str, ...] = ()):
        self.environment, self.broken, self.open, self.asked = arithmetic.build(config), broken, 0, 0

    def episode(self, task: Any, seed: int, timeout_s: float | None = None) -> Any:
        workers, episode = self, self.environment.episode(task, seed)

        class Counted:
            async def reset(self) -> Any:
                workers.open, workers.asked = workers.open + 1, workers.asked + 1
                if task.id in workers.broken:
                    raise EnvironmentFailure("environment", "broken")
                return await episode.reset()

            async def close(self) -> None:
                workers.open -= 1

        return Counted()


def check(tokenizer: Any, workers: Here) -> None:
    splits = [workers.environment.tasks(split) for split in ("train", "held_out")]
    asyncio.run(probe.check_characters(tokenizer, workers, *splits))
    assert workers.open == 0


def test_characters_that_have_no_ids_are_named_with_the_setting() -> None:
    digits = CharacterTokenizer(CharactersConfig(alphabet="0123456789+"))
    within = Here(ArithmeticConfig(level=1, instructions=""))
    check(digits, within)
    assert within.asked
    with pytest.raises(UsageError, match=r"(?s)'C', 'o', 'm'.*and \d+ more.*train/0.*'Compute\. Answer.*data\.tokenizer\.alphabet"):
        check(digits, Here(ArithmeticConfig(level=1)))
    with pytest.raises(UsageError, match=r"apart: '-' \(task"):
        check(digits, Here(ArithmeticConfig(level=2, instructions="")))


def test_a_task_of_any_split_is_looked_at_and_one_that_fails_is_left_to_the_run() -> None:
    workers = Here(ArithmeticConfig(level=1))
    every = tuple(task.id for task in workers.environment.tasks("train"))
    with pytest.raises(UsageError, match="held_out/0"):
        check(CharacterTokenizer(CharactersConfig(alphabet="0123456789+")), Here(ArithmeticConfig(level=1), every))


def test_tokenizers_that_take_all_text_are_not_asked() -> None:
    workers = Here(ArithmeticConfig(level=1))
    check(current().build(ByteTokenizerConfig()), workers)
    assert not workers.asked
