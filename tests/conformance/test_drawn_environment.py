"""The environment `drawn` keeps the contract; its answers are judged by letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from intarsia.contracts import Media, Task, Turn
from intarsia.errors import UsageError
from intarsia_multimodal.config import DrawnTasksConfig
from intarsia_multimodal.environment import build, reward
from intarsia_testing import EnvironmentConformance


class TestDrawn(EnvironmentConformance):
    entry = "intarsia-multimodal:drawn"
    splits = ("train", "held_out")
    configs: ClassVar = (DrawnTasksConfig(tasks=20, held_out=5), DrawnTasksConfig(questions=("colour",), ask=False, instructions=""))
    max_tasks = 4

    def action(self, task: Task, history: Sequence[Turn]) -> Turn:
        return Turn("assistant", task.data["answer"], tokens=(1, 2))


@pytest.mark.parametrize(
    ("text", "earned"), [("Circle.", 1.0), ("so red</think> circle", 1.0), ("cross", 0.3 * 1 / 6), ("circus", 0.3 * 4 / 6), ("", 0.0)]
)
def test_letters_in_their_places_earn_a_part(text: str, earned: float) -> None:
    assert reward("circle", text, 0.3) == pytest.approx(earned)


def test_what_is_shown_is_what_is_asked_about() -> None:
    """The question may be left out; scenes of the two splits are others, and the longest answer fits."""
    environment = build(DrawnTasksConfig(questions=("colour",), ask=False, instructions=""))
    shown = set()
    for split in ("train", "held_out"):
        for task in environment.tasks(split)[:8]:
            asked, answer = environment.source(split)[task.data["number"]].messages or ()
            assert answer.content == task.data["answer"] and isinstance(asked.content[0], Media)
            shown.add(asked.content[0].data)
    assert len(shown) == 16 and environment.limits.tokens_per_turn == len("yellow") + 1
    short = build(DrawnTasksConfig(questions=("colour",), ask=False, answer="letter"))
    assert {task.data["answer"] for task in short.tasks("train")} == set("rgby") and short.limits.tokens_per_turn == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ask": False}, "ask is false, and there are 4 kinds"),
        ({"partial": 1.0}, "partial is 1.0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tasks": 0}, "tasks is 0"),
        ({"answer": "letters"}, "letter"),
        ({"answer": "letter", "questions": ("shape",)}, "answers to 'shape' begin with the same letter"),
        ({"questions": ("colours",)}, "colour"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(DrawnTasksConfig(**values))
