"""What a run's tokenizer makes of its environment's first words, looked at before anything is generated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from intarsia.contracts import Observation, Task
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError

from intarsia_rl.contracts import ProcessDied
from intarsia_rl.controller.protocols import Workers
from intarsia_rl.controller.rollout import all_of, texts_of

TASKS = 16
"""Tasks of a split whose first observations are looked at."""
NAMED = 12
"""Characters that are named."""


async def check_characters(tokenizer: Any, workers: Workers, *splits: Sequence[Task]) -> None:
    """UsageError where first observations have characters that the tokenizer cannot tell from each other. Of tokenizers that know such (`lacking`); episodes that fail are left to the run."""
    lacking: Callable[[str], str] | None = getattr(tokenizer, "lacking", None)
    if lacking is None:
        return
    tasks = [task for split in splits for task in split[:TASKS]]
    found: dict[str, tuple[str, str]] = {}
    for task, texts in zip(tasks, await all_of(_first_texts(workers, task) for task in tasks), strict=True):
        for text in texts:
            for character in lacking(text):
                found.setdefault(character, (task.id, text))
    if found:
        named = ", ".join(map(repr, list(found)[:NAMED])) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
        task_id, text = next(iter(found.values()))
        raise UsageError(
            f"The environment's prompts have characters that the tokenizer has no ids for, so that a policy could not tell them apart: {named} (task {task_id!r} begins {text[:80]!r}). Add them to "
            "data.tokenizer.alphabet, have the environment leave them out (data.loader.environment.instructions, where it has such), or choose another tokenizer."
        )


async def _first_texts(workers: Workers, task: Task) -> list[str]:
    """The texts of a task's first observation."""
    episode = workers.episode(task, 0)
    try:
        seen: Observation = await episode.reset()
    except (TimeoutError, EnvironmentFailure, ProcessDied):
        return []
    finally:
        with contextlib.suppress(EnvironmentFailure, ProcessDied, asyncio.TimeoutError):
            await episode.close()
    return [text for turn in seen.turns for text in texts_of(turn)]
