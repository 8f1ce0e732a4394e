"""Tasks, splits and rewards of `arithmetic` and `alphabet_sort`; the tokenizer `characters`."""

from __future__ import annotations

import asyncio

import pytest
from intarsia.contracts import Message, StepResult, Turn
from intarsia.errors import UsageError
from intarsia_environments import alphabet_sort, arithmetic, code
from intarsia_environments.config import AlphabetSortConfig, ArithmeticConfig, CharactersConfig, CodeConfig
from intarsia_environments.splits import is_held_out
from intarsia_environments.tokenizer import CharacterTokenizer


def play(environment, task, *answers: str) -> list[StepResult]:
    async def all_turns() -> list[StepResult]:
        episode = environment.episode(task, 0)
        await episode.reset()
        return [await episode.step(Turn("assistant", answer)) for answer in answers]

    return asyncio.run(all_turns())


def names_of(task) -> list[str]:
    return [name for names in task.data["turns"] for name in names]


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_questions_have_their_answers_and_no_split_knows_the_other(level):
    environment = arithmetic.build(ArithmeticConfig(level=level, tasks=300, held_out=50))
    questions = {split: [task.data["question"] for task in environment.tasks(split)] for split in ("train", "held_out")}
    assert all(eval(task.data["question"]) == int(task.data["answer"]) for task in environment.tasks("train"))
    assert not set(questions["train"]) & set(questions["held_out"])
    assert len(set(questions["train"])) == len(questions["train"]) > 50 and len(questions["held_out"]) > 10


def test_tasks_depend_on_the_seed_and_a_side_does_not_depend_on_how_many():
    many, few, other = (
        arithmetic.build(ArithmeticConfig(level=3, tasks=tasks, seed=seed)).tasks("train") for tasks, seed in ((200, 0), (20, 0), (200, 1))
    )
    assert many[:20] == few and many[:20] != other[:20]
    assert not any(is_held_out(task.data["question"], 0) for task in many)


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("12", "12", 1.0),
        ("12", "012", 1.0),
        ("12", "It is 12.", 1.0),
        ("12", "7, no: 12", 1.0),
        ("12", "12 7", 0.0),
        ("12", "42", 0.15),
        ("12", "2", 0.15),
        ("12", "1112", 0.15),
        ("12", "", 0.0),
        ("12", "-12", 0.2),
        ("-3", "-3", 1.0),
        ("-3", "3", 0.15),
        ("0", "000", 1.0),
        ("0", "-0", 1.0),
        ("12", "9" * 9000 + "2", 0.3 / 9001),
        ("12", "x", 0.0),
    ],
)  # fmt: skip
def test_answers_are_judged(answer, text, expected):
    assert arithmetic.reward(answer, text, 0.3) == pytest.approx(expected)


def test_reasoning_is_no_answer():
    environment = arithmetic.build(ArithmeticConfig(instructions=""))
    task = environment.tasks("train")[0]
    (result,) = play(environment, task, f"<think>1 or 2 or 77</think>{task.data['answer']}")
    assert result == StepResult(None, reward=1.0, ended=True, metrics={"right": 1.0})
    assert play(environment, task, f"<think>{task.data['answer']}</think>none")[0].reward == 0.0


def test_names_come_in_turns_and_are_judged_by_place():
    environment = alphabet_sort.build(AlphabetSortConfig(letters=8, length=1, first=2, more=1, turns=2, separator="", instructions=""))
    task = environment.tasks("train")[0]
    first, second = ("".join(sorted("".join(names))) for names in (task.data["turns"][0], names_of(task)))
    right = play(environment, task, first, second)
    assert [result.reward for result in right] == [0.5, 0.5] and right[0].observation.turns == (Turn("user", task.data["turns"][1][0]),)
    assert not right[0].ended and right[1].ended and right[1].observation is None
    assert [result.reward for result in play(environment, task, first[:1], second + "a")] == [0.25, 0.375]
    assert [result.reward for result in play(environment, task, "", "zzz")] == [0.0, 0.0]
    assert environment.limits.tokens_per_turn == 4 and environment.limits.turns == 2


def test_no_held_out_task_is_trained_on():
    environment = alphabet_sort.build(AlphabetSortConfig(letters=8, length=1, first=2, more=1, turns=2, separator=""))
    questions = [{" ".join(names_of(task)) for task in environment.tasks(split)} for split in ("train", "held_out")]
    assert all(questions) and not questions[0] & questions[1]


def test_what_is_nearly_right_may_earn_less():
    environment = alphabet_sort.build(AlphabetSortConfig(exponent=2.0, turns=1, separator=", "))
    task = environment.tasks("train")[0]
    names = sorted(task.data["turns"][0])
    assert play(environment, task, ", ".join(names))[0].reward == 1.0
    assert play(environment, task, f"{names[0]},{names[1]}, none")[0].reward == pytest.approx(4 / 9)


@pytest.mark.parametrize(
    ("build", "config", "words"),
    [
        (arithmetic.build, ArithmeticConfig(level=9), "levels are 0, 1, 2, 3, 4"),
        (arithmetic.build, ArithmeticConfig(partial=1.0), "below 1"),
        (arithmetic.build, ArithmeticConfig(tasks=0), "at least 1"),
        (arithmetic.build, ArithmeticConfig(tokens=0), "tokens is 0; it must be at least 1, or none"),
        (alphabet_sort.build, AlphabetSortConfig(tokens=0), "tokens is 0; it must be at least 1, or none"),
        (code.build, CodeConfig(tokens=0), "tokens is 0; it must be at least 1, or none"),
        (code.build, CodeConfig(memory_mb=0), "memory_mb is 0; it must be at least 1"),
        (alphabet_sort.build, AlphabetSortConfig(separator=""), "could tell them apart"),
        (alphabet_sort.build, AlphabetSortConfig(separator="a"), "letter of names"),
        (alphabet_sort.build, AlphabetSortConfig(letters=1), "from 2 to 26"),
        (alphabet_sort.build, AlphabetSortConfig(letters=2, length=2), "only 4"),
        (alphabet_sort.build, AlphabetSortConfig(letters=2, length=1, first=1, more=1, turns=2, separator=""), "without a task"),
    ],
)
def test_settings_that_make_no_sense_are_refused(build, config, words):
    with pytest.raises(UsageError, match=words):
        build(config)


def test_unknown_splits_name_the_near_one():
    with pytest.raises(UsageError, match="held_out"):
        arithmetic.build(ArithmeticConfig()).tasks("heldout")


def test_a_step_after_the_end_is_refused():
    environment = arithmetic.build(ArithmeticConfig())
    with pytest.raises(UsageError, match="over"):
        play(environment, environment.tasks("train")[0], "1", "2")


def test_characters_are_ids():
    tokenizer = CharacterTokenizer(CharactersConfig(alphabet="ab", roles=("user", "assistant")))
    assert (tokenizer.vocab_size, tokenizer.unknown_id, tokenizer.eos_id, tokenizer.role_ids) == (6, 2, 3, {"user": 4, "assistant": 5})
    assert tokenizer.encode("abz") == [0, 1, 2] and tokenizer.decode([4, 0, 1, 2, 3]) == "ab\N{REPLACEMENT CHARACTER}"
    assert tokenizer.render([Message("user", "a"), Message("assistant", "b")]) == ([4, 0, 3, 5, 1, 3], [False] * 4 + [True] * 2)
    assert len(tokenizer.byte_lengths) == 6 and tokenizer.byte_lengths[:3] == [1, 1, 0]
    others = [CharactersConfig(alphabet="ba"), CharactersConfig(alphabet="ab", roles=("user",))]
    assert len({CharacterTokenizer(config).fingerprint() for config in others} | {tokenizer.fingerprint()}) == 3


@pytest.mark.parametrize("config", [CharactersConfig(alphabet="aa"), CharactersConfig(roles=("user", "user"))])
def test_characters_and_roles_come_once(config):
    with pytest.raises(UsageError, match="twice"):
        CharacterTokenizer(config)


def test_unknown_roles_are_refused():
    with pytest.raises(UsageError, match="no role"):
        CharacterTokenizer(CharactersConfig(roles=("user",))).render([Message("tool", "x")])
