"""The environment `code`: write a function; hidden tests run in a sandbox, and what they say comes back. Torch-free."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.contracts import Limits, Observation, Rubric, StepResult, Task, ToolSpec, Turn
from intarsia.errors import UsageError, did_you_mean
from intarsia.plugins import current
from intarsia_sandbox.contracts import Completed, Sandbox, SandboxLimits

from intarsia_environments.config import CodeConfig
from intarsia_environments.functions import LEVELS, NAME, functions
from intarsia_environments.splits import Splits
from intarsia_environments.turns import said

SUBMIT = ToolSpec(
    "submit",
    "Hand in the function. The answer is what the tests say.",
    {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source that defines the function."}},
        "required": ["code"],
    },
)
FORMS = {
    "tool": "Write the function that is asked for and hand it in with the tool `submit`. If tests fail, correct it and hand it in again.",
    "text": "Write the function that is asked for, as a Python code block. If tests fail, correct it and write it again.",
    "expression": "Answer with the expression of x alone that gives each second number from the one before.",
}
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
ENDS = {
    "seconds": "it took too long",
    "cpu_seconds": "it took too long",
    "memory": "it took too much memory",
    "output": "it printed too much",
}


class Verdict:
    """What the tests say of one try: score, metrics, and words for the policy."""

    def __init__(self, environment: Code, task: Task, results: Sequence[Mapping[str, Any]] | str):
        self._task = task
        cases = task.data["tests"]
        if isinstance(results, str):
            self.passed, self.ran, self.words = 0, False, f"No test was passed: {ADDRESS.sub('0x', results)}"
        else:
            right = ["value" in result and same(result["value"], answer) for result, (_, answer) in zip(results, cases, strict=True)]
            self.passed, self.ran = sum(right), all("value" in result for result in results)
            lines = [f"{self.passed} of {len(cases)} tests are passed."]
            lines += [self._line(number, result) for number, result in enumerate(results) if not right[number]][:3]
            self.words = ADDRESS.sub("0x", "\n".join(lines))
        self.solved = self.passed == len(cases)
        runs = environment.config.runs
        self.score = 1.0 if self.solved else runs * self.ran + (1 - runs) * self.passed / len(cases)

    def _line(self, number: int, result: Mapping[str, Any]) -> str:
        """One failed test. Only examples of the question say what was right."""
        arguments, answer = self._task.data["tests"][number]
        gave = f"raised {result['error']}" if "error" in result else f"gave {result.get('value')!r}"
        if number < self._task.data["shown"]:
            return f"{NAME}({', '.join(map(repr, arguments))}) {gave}, not {answer!r}."
        return f"A hidden test {gave.partition(' ')[0] + ' something else' if 'error' not in result else gave}."


class CodeEpisode:
    """One function, in several tries."""

    def __init__(self, environment: Code, task: Task):
        self._environment, self._task = environment, task
        self._taken, self._over = 0, False
        self._score, self._passed = 0.0, 0

    async def reset(self) -> Observation:
        """The question, and the tool."""
        config = self._environment.config
        instructions = FORMS[config.form] if config.instructions is None else config.instructions
        first = (Turn("system", instructions),) if instructions else ()
        return self._observe(*first, Turn("user", self._task.data["question"]))

    def _observe(self, *turns: Turn) -> Observation:
        return Observation(turns, tools=(SUBMIT,) if self._environment.config.form == "tool" else ())

    async def step(self, action: Turn) -> StepResult:
        """Run a try."""
        if self._over:
            raise UsageError(f"code: the episode of task {self._task.id} is over: take no step after its end.")
        self._taken += 1
        solved, turns = await self._judge(action)
        truncated = not solved and self._taken == self._environment.limits.turns
        self._over = solved or truncated
        metrics = {"tests_passed": self._passed / len(self._task.data["tests"]), "solved": float(solved)}
        if self._over:
            return StepResult(None, reward=self._score, ended=solved, truncated=truncated, metrics=metrics)
        return StepResult(self._observe(*turns), metrics=metrics)

    async def _judge(self, action: Turn) -> tuple[bool, tuple[Turn, ...]]:
        """Whether the function is right, and what the policy is told."""
        if self._environment.config.form != "tool":
            verdict = await self._try(source_of(said(action), self._task, self._environment.config.form))
            return verdict.solved, (Turn("user", verdict.words),)
        if not action.tool_calls:
            return False, (Turn("user", "Hand the function in with the tool `submit`."),)
        answers: list[Turn] = []
        solved = tried = False
        for call in action.tool_calls:
            source = self._source(call.name, call.arguments)
            if source is None:
                words = f'error: call the tool `submit` with {{"code": "def {NAME}..."}}.'
            elif tried:
                words = "error: hand in one function at a time."
            else:
                verdict = await self._try(source)
                solved, tried, words = verdict.solved, True, verdict.words
            answers.append(Turn("tool", words, tool_call_id=call.id))
        return solved, tuple(answers)

    @staticmethod
    def _source(name: str, arguments: str) -> str | None:
        try:
            source = json.loads(arguments)["code"] if name == SUBMIT.name else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return source if isinstance(source, str) else None

    async def _try(self, source: str) -> Verdict:
        verdict = Verdict(self._environment, self._task, await self._environment.results(self._task, source))
        self._score, self._passed = verdict.score, verdict.passed
        return verdict

    async def close(self) -> None:
        """The sandbox holds nothing between tries."""


class Code:
    """The environment. `sandbox` is where functions run, if not the config's."""

    def __init__(self, config: CodeConfig, sandbox: Sandbox | None = None):
        _check(config)
        self.config = config
        self._sandbox: Sandbox = sandbox or current().build(config.sandbox)
        self._splits = Splits(
            "code", config.seed, functions(config.level, config.seed, config.tests, config.shown), config.tasks, config.held_out
        )
        self.limits = Limits(turns=config.turns, tokens_per_turn=config.tokens)
        self._harness = Path(__file__).with_name("harness.py").read_text(encoding="utf-8")

    async def results(self, task: Task, source: str) -> Sequence[Mapping[str, Any]] | str:
        """What the function gives for the arguments of each test; in words, why it gives nothing. EnvironmentFailure where the sandbox fails."""
        config = self.config
        arguments = [arguments for arguments, _ in task.data["tests"]]
        asked = json.dumps({"source": source, "name": NAME, "arguments": arguments})
        # A busy machine makes a function slow and not wrong: what counts is CPU time.
        limits = SandboxLimits(
            seconds=4 * config.seconds, cpu_seconds=config.seconds, memory_bytes=config.memory_mb << 20, file_bytes=1 << 20, processes=8
        )
        python = config.python or (sys.executable, "-I", "-S")
        done = await self._sandbox.run([*python, "main.py"], {"main.py": self._harness}, asked, limits)
        return read_results(done, len(arguments))

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split."""
        return self._splits.tasks(split)

    def episode(self, task: Task, seed: int) -> CodeEpisode:
        """A try; there is no chance in it."""
        return CodeEpisode(self, task)

    def rubrics(self) -> Sequence[Rubric]:
        """None: the last step carries the reward."""
        return ()


def read_results(done: Completed, count: int) -> Sequence[Mapping[str, Any]] | str:
    """The harness's line. A function may end the process, or print what it likes: then there are no results."""
    if done.ended in ENDS:
        return f"{ENDS[done.ended]}."
    if done.ended == "signal":
        return f"it ended by signal {done.status}."
    try:
        found = json.loads(done.output.strip().rpartition("\n")[2])
        results, error = found.get("results"), found.get("error")
    except (ValueError, AttributeError, RecursionError):
        return "it ended before the tests did."
    if (
        isinstance(results, list)
        and len(results) == count
        and all(isinstance(result, dict) and ("value" in result or "error" in result) for result in results)
    ):
        return results
    return f"{error}." if isinstance(error, str) else "it ended before the tests did."


def same(value: Any, answer: Any) -> bool:
    """Whether two JSON values are one, types included: True is not 1."""
    return json.dumps(value) == json.dumps(answer)


def source_of(text: str, task: Task, form: str) -> str:
    """The function in a turn: its last code block, or all of it."""
    if form == "expression":
        return f"def {NAME}({', '.join(task.data['parameters'])}):\n    return {text.strip()}\n"
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _check(config: CodeConfig) -> None:
    if config.form not in FORMS:
        raise UsageError(f"code: form is {config.form!r}. {did_you_mean(config.form, FORMS)}")
    wrong = {
        f"level is {config.level}; levels are {', '.join(map(str, LEVELS))}": config.level not in LEVELS,
        f"turns is {config.turns}; it must be at least 1": config.turns < 1,
        f"shown is {config.shown} and tests {config.tests}; at least one test must be hidden": not 0 <= config.shown < config.tests,
        f"runs is {config.runs}; it must be from 0 on and below 1, which is the right function's reward": not 0 <= config.runs < 1,
        f"tokens is {config.tokens}; it must be at least 1, or none": config.tokens is not None and config.tokens < 1,
        f"memory_mb is {config.memory_mb}; it must be at least 1": config.memory_mb < 1,
        f"seconds is {config.seconds}; it must be above 0": not 0 < config.seconds < float("inf"),
        f"memory_mb is {config.memory_mb}; Python needs 64 at least": config.memory_mb < 64,
    }
    found = [text for text, is_wrong in wrong.items() if is_wrong]
    if found:
        raise UsageError(f"code: {'; '.join(found)}.")


def build(config: CodeConfig) -> Code:
    """The environment."""
    return Code(config)
