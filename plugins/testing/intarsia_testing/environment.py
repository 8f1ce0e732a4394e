"""Conformance of environments. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestRiddles(EnvironmentConformance):
        entry = "acme-riddles:riddles"

        def action(self, task, history):
            return Turn("assistant", task.data["answer"])

The promises are those of `intarsia.contracts.Environment`, `Episode` and `Rubric`. The kit plays whole episodes with the actions that you give, and with
mistakes that any policy makes. It imports no torch. Run as a module, this file answers from another process.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_args

from intarsia.contracts import Environment, Episode, Limits, Media, Observation, Rubric, StepResult, Task, ToolCall, Turn
from intarsia.contracts.environment import Boundary, EnvironmentFailure
from intarsia.errors import UsageError
from intarsia.plugins import current

from intarsia_testing.base import Conformance, heavy
from intarsia_testing.plain import ask_another_process, from_plain
from intarsia_testing.promise import broken, keep

Result = TypeVar("Result")
ROLES = ("system", "user", "assistant", "tool")
BOUNDARIES = get_args(Boundary)


class Played:
    """One episode as it went: every observation, every result, and the history that a policy sees at the end."""

    def __init__(self, first: Observation) -> None:
        self.first = first
        self.results: list[StepResult] = []
        self.history: list[Turn] = list(first.turns)
        self.tools = first.tools

    @property
    def over(self) -> bool:
        """Whether the last result ended or truncated it."""
        return bool(self.results) and (self.results[-1].ended or self.results[-1].truncated)

    def take(self, action: Turn, result: StepResult) -> None:
        """Append an action and its answer."""
        self.history.append(action)
        self.results.append(result)
        if result.observation is not None:
            self.history = [*([] if result.observation.rewrites else self.history), *result.observation.turns]
            self.tools = result.observation.tools or self.tools

    def facts(self) -> list[Any]:
        """What equal episodes must have in common."""
        return [self.first, *((result.observation, result.reward, result.ended, result.truncated) for result in self.results)]


def task_facts(environment: Environment, splits: Iterable[str]) -> list[list[Any]]:
    """Split, id and data of every task, as JSON gives them back."""
    return [json.loads(json.dumps([split, task.id, task.data], sort_keys=True)) for split in splits for task in environment.tasks(split)]


class EnvironmentConformance(Conformance):
    """Every promise of `intarsia.contracts.Environment`, one test each.

    Set `entry`, `config` where settings have no defaults, `splits` to the splits there are. Override `action` so that episodes get somewhere, and `failure`
    where something other than the policy can fail. `max_tasks` and `max_turns` bound the time.
    """

    kind: ClassVar[str] = "environment"
    splits: ClassVar[tuple[str, ...]] = ("train",)
    max_tasks: ClassVar[int] = 3
    max_turns: ClassVar[int] = 20
    timeout_s: ClassVar[float] = 600.0

    # ------------------------------------------------------------ what is tested

    def environment(self) -> Environment:
        """A freshly built environment under test."""
        return current().build(self.given_configs()[0])

    def action(self, task: Task, history: Sequence[Turn]) -> Turn:
        """What the policy does next; equal questions must get equal answers. By default it says that it does not know."""
        return Turn("assistant", "I do not know.", tokens=(1, 2, 3))

    def failure(self) -> tuple[Environment, Task, Turn] | None:
        """An environment, a task and an action by which something other than the policy fails (a sandbox that is gone, a service that is down). None
        where nothing can."""
        return None

    # ------------------------------------------------------------ help

    def run(self, work: Awaitable[Result]) -> Result:
        """Run a coroutine to its end, bounded by `timeout_s`."""

        async def bounded() -> Result:
            return await asyncio.wait_for(work, self.timeout_s)

        try:
            return asyncio.run(bounded())
        except TimeoutError:
            broken("ends", f"nothing came back within {self.timeout_s:g} s.")

    def some_tasks(self, environment: Environment) -> list[Task]:
        """The first tasks of the first split."""
        tasks = list(environment.tasks(self.splits[0])[: self.max_tasks])
        keep("tasks", tasks, f"the split {self.splits[0]!r} has no task: set `splits` to those there are.")
        return tasks

    async def play(self, environment: Environment, task: Task, seed: int = 0, act: Callable[..., Turn] | None = None) -> Played:
        """One whole episode, closed; every answer is checked to be one."""
        episode = environment.episode(task, seed)
        keep("is an environment", isinstance(episode, Episode), f"episode() gives {episode!r}, which lacks `reset`, `step` or `close`.")
        try:
            first = await episode.reset()
            check_observation(first, f"the first observation of task {task.id!r}", first=True)
            played = Played(first)
            while not played.over and len(played.results) < self.max_turns:
                action = (act or self.action)(task, tuple(played.history))
                result = await episode.step(action)
                check_result(result, f"step {len(played.results) + 1} of task {task.id!r}")
                played.take(action, result)
            return played
        finally:
            await episode.close()

    # ------------------------------------------------------------ promises about the environment and its tasks

    def test_it_is_an_environment(self) -> None:
        """It has tasks, episodes, rubrics, and limits that are Limits of positive numbers."""
        environment = self.environment()
        keep(
            "is an environment",
            isinstance(environment, Environment),
            f"{environment!r} lacks one of `limits`, `tasks`, `episode`, `rubrics`.",
        )
        keep("limits", isinstance(environment.limits, Limits), f"`limits` is {environment.limits!r}, not an intarsia.contracts.Limits.")
        for name in Limits.__dataclass_fields__:
            value = getattr(environment.limits, name)
            keep("limits", value is None or value > 0, f"`limits.{name}` is {value!r}; it is None (unbounded) or positive.")

    def test_target_imports_no_torch(self) -> None:
        """Environment workers are light processes: many of them run beside a trainer."""
        if not self.entry:
            return
        module = self.found_entry().target.partition(":")[0]
        problem = heavy([module])
        keep("light", not problem, f"importing {module} {problem}. Import what is heavy where it is used, or keep it out of environments.")

    def test_tasks_are_stable(self) -> None:
        """Ids are unique texts, data is JSON, and a second object gives the same tasks in the same order."""
        environment = self.environment()
        for split in self.splits:
            tasks = environment.tasks(split)
            keep("tasks", len(tasks), f"the split {split!r} has no task.")
            for task in tasks:
                keep("tasks", isinstance(task, Task), f"split {split!r} holds {task!r}, which is no intarsia.contracts.Task.")
                keep("tasks", isinstance(task.id, str) and task.id, f"a task of {split!r} has the id {task.id!r}; it must be text.")
                keep("tasks", task.split == split, f"task {task.id!r} of split {split!r} says that it is of {task.split!r}.")
                try:
                    same = json.loads(json.dumps(task.data)) == task.data
                except (TypeError, ValueError) as error:
                    broken("task data is JSON", f"the data of task {task.id!r} cannot be written as JSON: {error}.")
                keep(
                    "task data is JSON", same, f"the data of task {task.id!r} comes back from JSON as something else (tuples become lists)."
                )
        ids = [task.id for split in self.splits for task in environment.tasks(split)]
        twice = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
        keep("task ids are unique", not twice, f"{twice[:3]} name several tasks.")
        again = task_facts(self.environment(), self.splits)
        keep("tasks are stable", again == task_facts(environment, self.splits), "a second object with the same settings has other tasks.")

    def test_tasks_are_the_same_in_another_process(self) -> None:
        """A resumed run, and every worker, must see the same tasks: nothing may depend on hash seeds, clocks or the order of a folder."""
        if not self.entry:
            return
        try:
            there = ask_another_process("intarsia_testing.environment", self.given_configs()[0], splits=list(self.splits))
        except RuntimeError as error:
            broken("tasks are stable", f"a fresh process cannot list the tasks: {error}")
        keep(
            "tasks are stable", there == task_facts(self.environment(), self.splits), "a fresh process sees other tasks, or another order."
        )

    def test_unknown_split_is_a_usage_error(self) -> None:
        """A split that does not exist is a UsageError that names those there are."""
        try:
            self.environment().tasks("no-such-split")
        except UsageError as error:
            missing = [split for split in self.splits if split not in str(error)]
            keep("unknown splits", not missing, f"the error does not name the splits there are ({', '.join(missing)}): {error}")
        except Exception as error:
            broken("unknown splits", f"tasks('no-such-split') raises {type(error).__name__} ({error}), not UsageError.")
        else:
            broken("unknown splits", "tasks('no-such-split') raises nothing: a misspelt split would train on no task.")

    # ------------------------------------------------------------ promises about episodes

    def test_observations_are_well_formed(self) -> None:
        """Roles are known, tools have JSON schemas, the environment never sends tokens, an unended step observes something."""
        environment = self.environment()
        for task in self.some_tasks(environment):
            self.run(self.play(environment, task))

    def test_equal_actions_give_equal_observations(self) -> None:
        """Equal (task, seed) and actions: equal observations and rewards, from another object and while other episodes were played."""
        environment, other = self.environment(), self.environment()
        for task in self.some_tasks(environment):
            for seed in (0, 7):
                one = self.run(self.play(environment, task, seed))
                again = self.run(self.play(other, task, seed))
                keep(
                    "deterministic",
                    one.facts() == again.facts(),
                    f"task {task.id!r} with seed {seed} and the same actions went another way the second time.",
                )

    def test_episodes_share_no_state(self) -> None:
        """Episodes played at the same time are what each is alone."""
        environment = self.environment()
        tasks = [(task, seed) for task in self.some_tasks(environment) for seed in (0, 1)]
        alone = [self.run(self.play(self.environment(), task, seed)).facts() for task, seed in tasks]

        async def together() -> list[Played]:
            return await asyncio.gather(*(self.play_slowly(environment, task, seed) for task, seed in tasks))

        for (task, seed), one, played in zip(tasks, alone, self.run(together()), strict=True):
            keep(
                "episodes share no state",
                one == played.facts(),
                f"task {task.id!r} with seed {seed} went another way while other episodes were played: state belongs on the episode.",
            )

    async def play_slowly(self, environment: Environment, task: Task, seed: int) -> Played:
        """`play`, letting other episodes act between any two turns."""
        episode = environment.episode(task, seed)
        try:
            played = Played(await episode.reset())
            while not played.over and len(played.results) < self.max_turns:
                await asyncio.sleep(0)
                action = self.action(task, tuple(played.history))
                played.take(action, await episode.step(action))
            return played
        finally:
            await episode.close()

    def test_an_ended_episode_earns_nothing(self) -> None:
        """A step after the end is refused, or is still the end and earns nothing."""
        environment = self.environment()

        async def one_more(task: Task) -> None:
            episode = environment.episode(task, 0)
            try:
                played = Played(await episode.reset())
                while not played.over and len(played.results) < self.max_turns:
                    action = self.action(task, tuple(played.history))
                    played.take(action, await episode.step(action))
                if not played.over:
                    return
                try:
                    late = await episode.step(self.action(task, tuple(played.history)))
                except Exception as error:
                    keep(
                        "the end is the end",
                        isinstance(error, (UsageError, EnvironmentFailure, RuntimeError)),
                        f"a step after the end of task {task.id!r} raises {type(error).__name__} ({error}): raise UsageError.",
                    )
                else:
                    keep("the end is the end", late.ended or late.truncated, f"task {task.id!r} goes on after its end.")
                    keep("the end is the end", not late.reward, f"a step after the end of task {task.id!r} earns {late.reward}.")
            finally:
                await episode.close()

        for task in self.some_tasks(environment):
            self.run(one_more(task))

    def test_limits_are_respected(self) -> None:
        """An episode is over when `limits.turns` turns are taken."""
        environment = self.environment()
        bound = environment.limits.turns
        if bound is None or bound > self.max_turns:
            return
        for task in self.some_tasks(environment):
            played = self.run(self.play(environment, task))
            keep(
                "limits are respected",
                played.over and len(played.results) <= bound,
                f"`limits.turns` is {bound} and task {task.id!r} goes on after {len(played.results)} turns: truncate it.",
            )

    def test_mistakes_of_the_policy_are_answers(self) -> None:
        """Nothing that a policy says is an exception: broken JSON, an unknown tool, no words. The episode answers or ends."""
        environment = self.environment()
        for what, mistake in MISTAKES.items():
            for task in self.some_tasks(environment)[:1]:
                try:
                    self.run(self.play(environment, task, 0, lambda task, history, mistake=mistake: mistake))
                except Exception as error:
                    broken(
                        "a policy's mistakes are answers",
                        f"{what} makes step() raise {type(error).__name__} ({error}): answer with a message, or end the episode.",
                    )

    def test_close_may_come_at_any_time(self) -> None:
        """Before reset, after a cancelled step, twice: close releases everything and raises nothing."""
        environment = self.environment()
        task = self.some_tasks(environment)[0]

        async def close(after: str) -> None:
            episode = environment.episode(task, 0)
            if after != "nothing":
                history = (await episode.reset()).turns
                if after == "a cancelled step":
                    step = asyncio.ensure_future(episode.step(self.action(task, history)))
                    await asyncio.sleep(0)
                    step.cancel()
                    await asyncio.gather(step, return_exceptions=True)
            for times in ("", " a second time"):
                try:
                    await episode.close()
                except Exception as error:
                    broken("close", f"close() after {after}{times} raises {type(error).__name__}: {error}")

        for after in ("nothing", "reset", "a cancelled step"):
            self.run(close(after))

    def test_failures_are_typed_and_no_reward(self) -> None:
        """What fails besides the policy raises EnvironmentFailure with its boundary; it is never a result, and close() still works."""
        case = self.failure()
        if case is None:
            return
        environment, task, action = case

        async def fail() -> None:
            episode = environment.episode(task, 0)
            try:
                await episode.reset()
                result = await episode.step(action)
                broken("a failure is never a reward", f"something failed and step() gave {result!r}: raise EnvironmentFailure.")
            except EnvironmentFailure as error:
                keep("failures are typed", error.boundary in BOUNDARIES, f"the boundary is {error.boundary!r}, not one of {BOUNDARIES}.")
            except Exception as error:
                broken("failures are typed", f"{type(error).__name__} ({error}) reaches the loop: raise EnvironmentFailure(boundary, ...).")
            finally:
                await episode.close()

        self.run(fail())

    # ------------------------------------------------------------ promises about rewards

    def test_rubrics_score_every_episode(self) -> None:
        """Each rubric has a name of its own and a finite weight, and gives one finite score for each episode of a group of any size."""
        environment = self.environment()
        rubrics = environment.rubrics()
        names = [rubric.name for rubric in rubrics]
        keep("rubrics", len(set(names)) == len(names) and all(names), f"each rubric needs a name of its own; they are {names}.")
        for rubric in rubrics:
            keep("rubrics", isinstance(rubric, Rubric), f"{rubric!r} lacks one of `name`, `weight`, `score`.")
            keep("rubrics", math.isfinite(rubric.weight), f"the weight of {rubric.name!r} is {rubric.weight}.")
            task = self.some_tasks(environment)[0]
            for count in (1, 3):
                group = [self.run(self.play(environment, task, seed)).history for seed in range(count)]
                scores = self.run(rubric.score(task, group))
                keep(
                    "one score for each episode", len(scores) == count, f"{rubric.name!r} gives {len(scores)} scores for {count} episodes."
                )
                keep("scores are finite", all(map(is_number, scores)), f"{rubric.name!r} gives {list(scores)}.")

    def test_every_episode_is_scored(self) -> None:
        """There is a rubric, or some step of every episode that ends carries a reward."""
        environment = self.environment()
        if environment.rubrics():
            return
        for task in self.some_tasks(environment):
            played = self.run(self.play(environment, task))
            scored = any(result.reward is not None for result in played.results)
            keep("every episode is scored", scored or not played.over, f"task {task.id!r} ended without a reward, and there is no rubric.")

    def test_random_generators_are_left_alone(self) -> None:
        """Chance comes from the episode's seed: nothing draws from Python's global generator."""
        state = random.getstate()
        environment = self.environment()
        for task in self.some_tasks(environment):
            self.run(self.play(environment, task))
        keep("random generators are left alone", random.getstate() == state, "it draws from Python's global random generator.")


MISTAKES = {
    "an empty message": Turn("assistant", ""),
    "a call of an unknown tool": Turn("assistant", "", tool_calls=(ToolCall("call-1", "no_such_tool", "{}"),)),
    "a call whose arguments are no JSON": Turn("assistant", "", tool_calls=(ToolCall("call-1", "no_such_tool", '{"x": '),)),
    "a very long message": Turn("assistant", "word " * 5000),
}
"""What every policy does some day."""


def is_number(value: Any) -> bool:
    """Whether it is a finite int or float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_turn(turn: Any, words: str) -> None:
    """A turn that an environment sends."""
    keep("observations", isinstance(turn, Turn), f"{words} holds {turn!r}, which is no intarsia.contracts.Turn.")
    keep("roles", turn.role in ROLES, f"{words} has a turn of role {turn.role!r}; roles are {', '.join(ROLES)}.")
    parts = (turn.content,) if isinstance(turn.content, str) else turn.content
    keep(
        "observations",
        isinstance(parts, tuple) and all(isinstance(part, (str, Media)) for part in parts),
        f"{words}: a turn's content is {turn.content!r}; it is text, or a tuple of texts and Media.",
    )
    keep("tool answers", turn.role != "tool" or turn.tool_call_id, f"{words}: a turn of role `tool` must say which call it answers.")
    keep(
        "environments never tokenise",
        turn.tokens is None or turn.role == "assistant",
        f"{words}: a turn of role {turn.role!r} has tokens; only what the policy generated has, and the loop owns them.",
    )


def check_observation(observation: Any, words: str, first: bool = False) -> None:
    """An observation."""
    keep("observations", isinstance(observation, Observation), f"{words} is {observation!r}, not an intarsia.contracts.Observation.")
    keep("observations", not first or observation.turns, f"{words} has no turn: the policy has nothing to answer.")
    for turn in observation.turns:
        check_turn(turn, words)
    names = [tool.name for tool in observation.tools]
    keep("tools", len(set(names)) == len(names), f"{words} offers two tools of one name: {names}.")
    for tool in observation.tools:
        keep("tools", tool.name and tool.description, f"{words}: tool {tool.name!r} needs a name and a description for the policy to read.")
        schema = tool.parameters
        keep(
            "tool schemas",
            isinstance(schema, Mapping) and schema.get("type") == "object" and isinstance(schema.get("properties", {}), Mapping),
            f"{words}: the parameters of tool {tool.name!r} must be a JSON schema of type 'object'; they are {schema!r}.",
        )
        unknown = sorted(set(schema.get("required", ())) - set(schema.get("properties", {})))
        keep("tool schemas", not unknown, f"{words}: tool {tool.name!r} requires {unknown}, which are none of its properties.")
        try:
            json.dumps(schema)
        except (TypeError, ValueError) as error:
            broken("tool schemas", f"{words}: the parameters of tool {tool.name!r} are no JSON: {error}")


def check_result(result: Any, words: str) -> None:
    """A step's answer."""
    keep("results", isinstance(result, StepResult), f"{words} gives {result!r}, not an intarsia.contracts.StepResult.")
    keep("rewards are finite", result.reward is None or is_number(result.reward), f"{words} earns {result.reward!r}.")
    other = {name: value for name, value in result.metrics.items() if not isinstance(name, str) or not is_number(value)}
    keep("metrics are numbers", not other, f"{words} gives the metrics {other}; they are finite numbers by name.")
    if result.observation is not None:
        check_observation(result.observation, words)
    keep("results", result.observation is not None or result.ended or result.truncated, f"{words} neither ends nor observes anything.")


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(task_facts(current().build(from_plain(asked["config"])), asked["splits"])))
