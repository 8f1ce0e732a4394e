"""The environment `code` without its sandbox: tasks, what is read of a turn, what tests say, and rewards."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from intarsia.contracts import StepResult, Task, ToolCall, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError
from intarsia_environments import harness
from intarsia_environments.code import Code, read_results, source_of
from intarsia_environments.config import CodeConfig
from intarsia_environments.functions import LEVELS, functions
from intarsia_sandbox.contracts import Completed, SandboxLimits


class Trusting:
    """A sandbox that is none: the harness runs in a process of this user. `ended` is said in place of running."""

    def __init__(self, ended: Completed | Exception | None = None):
        self.ended, self.commands = ended, []

    def confinement(self) -> Mapping[str, str]:
        return {"nothing": "trust"}

    async def run(
        self, command: Sequence[str], files: Mapping[str, str | bytes] | None = None, stdin: str = "", limits: SandboxLimits | None = None
    ) -> Completed:
        self.commands.append((command, limits))
        if isinstance(self.ended, Exception):
            raise self.ended
        if self.ended:
            return self.ended
        code = "import sys; sys.argv = ['main.py']; exec(compile(" + repr(files["main.py"]) + ", 'main.py', 'exec'))"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], input=stdin, capture_output=True, text=True, timeout=600, check=False
        )
        return Completed("exit", done.returncode, done.stdout, done.stderr)


def environment(sandbox: Trusting | None = None, **settings) -> Code:
    return Code(CodeConfig(**{"form": "text", "level": 1, "tests": 4, **settings}), sandbox or Trusting())


def task_of(code: Code, key: str) -> Task:
    """The task whose question has these words."""
    return next(task for split in ("train", "held_out") for task in code.tasks(split) if key in task.data["question"])


def play(code: Code, task: Task, *turns: Turn | str) -> list[StepResult]:
    async def all_turns() -> list[StepResult]:
        episode = code.episode(task, 0)
        await episode.reset()
        try:
            return [await episode.step(turn if isinstance(turn, Turn) else Turn("assistant", turn)) for turn in turns]
        finally:
            await episode.close()

    return asyncio.run(all_turns())


@pytest.mark.parametrize("level", LEVELS)
def test_functions_are_many_and_their_tests_are_json(level):
    found = list(functions(level, 0, 8, 2))
    assert len({key for key, _ in found}) == len(found) >= 36
    assert found == list(functions(level, 0, 8, 2)) and [key for key, _ in found] != [key for key, _ in functions(level, 1, 8, 2)]
    for key, data in found:
        assert json.loads(json.dumps(data)) == data and len(data["tests"]) == 8, key
        assert all(len(arguments) == len(data["parameters"]) for arguments, _ in data["tests"])


@pytest.mark.parametrize("level", LEVELS)
def test_splits_share_no_function(level):
    code = environment(level=level)
    questions = [{task.data["question"].partition("\n")[0] for task in code.tasks(split)} for split in ("train", "held_out")]
    assert all(questions) and (level == 0 or not questions[0] & questions[1])


def test_a_right_function_earns_1_and_ends():
    code = environment()
    task = task_of(code, "x plus 3")
    (result,) = play(code, task, "Here:\n```python\ndef f(x):\n    return x + 3\n```\nDone.")
    assert result == StepResult(None, reward=1.0, ended=True, metrics={"tests_passed": 1.0, "solved": 1.0})


def test_errors_come_back_and_the_last_try_counts():
    code = environment(tests=4, shown=1, runs=0.1)
    task = task_of(code, "x plus 3")
    shown, right = task.data["tests"][0]
    first, second, third = play(code, task, "def f(x): return x +", "def f(x): return x", "def f(x): return [object()][x]")
    assert first.observation.turns[0].role == "user" and "SyntaxError: invalid syntax (line 1)" in first.observation.turns[0].content
    assert f"f({shown[0]}) gave {shown[0]}, not {right}." in second.observation.turns[0].content
    assert second.observation.turns[0].content.count("A hidden test gave something else.") == 2
    assert second.reward is None and not second.ended and third.truncated and third.reward == 0.0
    wrong = play(environment(turns=1), task, "def f(x): return x")[0]
    assert wrong.reward == pytest.approx(0.1) and wrong.truncated


def test_hidden_answers_are_never_told():
    code = environment(tests=6, shown=0)
    task = task_of(code, "x times 7")
    (first,) = play(code, task, "def f(x): return 1000")
    assert "A hidden test gave something else." in first.observation.turns[0].content
    assert not any(str(answer) in first.observation.turns[0].content for _, answer in task.data["tests"] if abs(answer) > 9)


def test_a_part_of_the_tests_earns_a_part():
    code = environment(turns=1, tests=4, runs=0.1)
    task = task_of(code, "x plus 3")
    (number,), answer = task.data["tests"][0]
    others = sum(arguments == [number] for arguments, _ in task.data["tests"])
    (result,) = play(code, task, f"def f(x):\n    return {answer} if x == {number} else 'no'")
    assert result.reward == pytest.approx(0.1 + 0.9 * others / 4)


@pytest.mark.parametrize(
    "source",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        'import os; os.write(1, b\'{"results": [{"value": 1}]}\\n\'); os._exit(0)',
        "print('x' * 100)",
        "def f(x): return float('nan')",
        "def f(x): return {1, 2}",
        "def f(x): return 'x' * 100000",
        "def f(x): return f(x)",
        "f = 3",
        "",
        "def f(x):\n    import json, sys\n    sys.stdout.write('[]')\n    return True",
    ],
)
def test_no_trick_passes_a_test(source):
    code = environment(turns=1)
    assert play(code, task_of(code, "x plus 3"), source)[0].reward < 0.2


def test_types_are_part_of_an_answer():
    code = environment(level=2, turns=1)
    task = task_of(code, "True if a is divisible by 3")
    assert play(code, task, "def f(a): return int(a % 3 == 0)")[0].reward == pytest.approx(0.1)
    assert play(code, task, "def f(a): return a % 3 == 0")[0].reward == 1.0


def test_functions_are_handed_in_by_the_tool():
    code = environment(form="tool")
    task = task_of(code, "x plus 3")
    good = json.dumps({"code": "def f(x): return x + 3"})
    calls = (
        ToolCall("a", "submit", "{"),
        ToolCall("b", "other", good),
        ToolCall("c", "submit", json.dumps({"code": "def f(x): return 1"})),
        ToolCall("d", "submit", good),
    )
    words, tried = play(code, task, "def f(x): return x + 3", Turn("assistant", "", tool_calls=calls))
    assert "with the tool" in words.observation.turns[0].content and [tool.name for tool in words.observation.tools] == ["submit"]
    answers = {turn.tool_call_id: turn.content for turn in tried.observation.turns}
    assert all(turn.role == "tool" for turn in tried.observation.turns)
    assert (
        answers["a"].startswith("error")
        and answers["b"].startswith("error")
        and "tests are passed" in answers["c"]
        and "one function at a time" in answers["d"]
    )
    assert play(code, task, Turn("assistant", "", tool_calls=(ToolCall("a", "submit", good),)))[0].reward == 1.0


def test_expressions():
    code = environment(level=0, form="expression", turns=1)
    task = next(task for task in code.tasks("train") if task.data["tests"][0][1] == 3 and task.data["tests"][1][1] > 3)
    assert task.data["question"].startswith("0 3 ")
    assert play(code, task, " x+3 ")[0].reward == 1.0
    assert source_of("x+3", task, "expression") == "def f(x):\n    return x+3\n"


def test_what_the_sandbox_says_is_told_and_its_failure_is_no_reward():
    for ended, words in (("seconds", "too long"), ("memory", "too much memory"), ("output", "printed too much"), ("signal", "signal 11")):
        assert words in read_results(Completed(ended, 11, "", ""), 2)
    with pytest.raises(EnvironmentFailure, match="sandbox: gone"):
        code = environment(Trusting(EnvironmentFailure("sandbox", "gone")))
        play(code, code.tasks("train")[0], "x")


def test_words_hold_no_address():
    code = environment()
    words = play(code, task_of(code, "x plus 3"), "def f(x): raise ValueError(object())")[0].observation.turns[0].content
    assert "<object object at 0x>" in words


def test_limits_reach_the_sandbox():
    sandbox = Trusting()
    code = environment(sandbox, seconds=2.0, memory_mb=100, python=("python3",))
    play(code, code.tasks("train")[0], "x")
    ((command, limits),) = sandbox.commands
    assert command == ["python3", "main.py"] and (limits.cpu_seconds, limits.seconds, limits.memory_bytes) == (2.0, 8.0, 100 << 20)


def test_the_harness_holds_no_answer():
    """What is sent into the sandbox has the arguments and never what is right."""
    source = Path(harness.__file__).read_text(encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        assert harness.call(lambda x: x, [3]) == {"value": 3}
    assert "answer" not in source.partition('"""\n')[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"form": "tools"}, "tool"),
        ({"level": 7}, "levels are"),
        ({"turns": 0}, "at least 1"),
        ({"shown": 4, "tests": 4}, "hidden"),
        ({"runs": 1.0}, "below 1"),
        ({"seconds": 0.0}, "above 0"),
        ({"memory_mb": 1}, "64"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        environment(**settings)
