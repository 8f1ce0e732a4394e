"""The service of an environment worker: holds an environment and its episodes, and makes every failure there an EnvironmentFailure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from intarsia.contracts import Environment, Episode, Limits, Media, Observation, StepResult, Task, ToolCall, ToolSpec, Turn
from intarsia.contracts.environment import Boundary, EnvironmentFailure
from intarsia.errors import IntarsiaError, PluginError, UsageError, did_you_mean
from intarsia.plugins import current

from intarsia_rl.given import is_number, numbers_or_words, told
from intarsia_rl.processes.codec import CodecError, MessageTooLarge, check
from intarsia_rl.processes.failures import words
from intarsia_rl.processes.following import WHO, follow
from intarsia_rl.processes.pages import pages
from intarsia_rl.processes.plain import config_of
from intarsia_rl.rubrics import distinct

ROLES = ("system", "user", "assistant", "tool")
"""Of turns, as `intarsia.contracts.Turn` has them."""

CLOSE_S = 5.0
"""How long a step that was cancelled may take to end before its episode is closed all the same."""


async def serve(config: Mapping[str, Any], answer_bytes: int, followed: bool = False) -> EnvironmentService:
    """Build the environment. `followed`: send a message `at` with the name of each call whenever it goes on, and an empty one when it waits."""
    plugins = current()
    settings = config_of(config, plugins)
    environment, name = plugins.build(settings), plugins.entry_of(settings).full_name
    if not isinstance(environment, Environment):
        raise PluginError(
            f"environment {name!r} builds a {type(environment).__name__}, which lacks a part of `intarsia.contracts.Environment`."
        )
    try:
        return EnvironmentService(environment, answer_bytes, followed)
    except IntarsiaError:
        raise
    except Exception as error:
        raise PluginError(f"environment {name!r}: {words(error)}") from error


class EnvironmentService:
    """Calls of an environment, its episodes by name, and its rubrics."""

    def __init__(self, environment: Environment, answer_bytes: int, followed: bool = False) -> None:
        self._environment, self._answer_bytes, self._followed = environment, answer_bytes, followed
        if wrong := wrong_limits(environment.limits):
            raise UsageError(f"The environment's limits cannot be: {', '.join(wrong)}.")
        self._rubrics = {rubric.name: rubric for rubric in distinct(*environment.rubrics())}
        self._episodes: dict[str, Episode] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}

    def connected(self, send: Callable[[str, Any], None]) -> None:
        """Take the way to tell who runs."""
        if self._followed:
            send("at", "")
            follow(lambda name: send("at", name))

    async def facts(self) -> tuple[Limits, dict[str, float]]:
        """The limits, and the rubrics' weights by name."""
        return self._environment.limits, {name: float(rubric.weight) for name, rubric in self._rubrics.items()}

    async def tasks(self, split: str, start: int, count: int) -> tuple[list[Task], bool]:
        """Tasks of a split from `start`, `count` or as many as go into a page, and whether there are more."""
        try:
            found = self._environment.tasks(split)
            page = next(pages(found[start : start + count]))
            return page, len(found) > start + len(page)
        except IntarsiaError:
            raise
        except Exception as error:
            raise failure("environment", f"tasks({split!r})", error) from error

    # ------------------------------------------------------------ episodes

    async def reset(self, name: str, task: Task, seed: int) -> Observation:
        """Begin an episode, known by `name` until it is closed."""
        WHO.set(name)

        async def begin() -> Observation:
            episode = self._environment.episode(task, seed)
            self._episodes[name] = episode
            return await episode.reset()

        return await self._answer(name, "reset", begin(), Observation)

    async def step(self, name: str, action: Turn) -> StepResult:
        """Take a turn."""
        WHO.set(name)
        episode = self._episodes.get(name)
        if episode is None:
            raise EnvironmentFailure("environment", f"there is no episode {name!r} (any more)")
        result: StepResult = await self._answer(name, "step", episode.step(action), StepResult)
        if result.reward is not None and not is_number(result.reward):
            raise EnvironmentFailure("environment", f"step gave the reward {told(result.reward)}, which is no finite number")
        if wrong := wrong_metrics(result.metrics):
            raise EnvironmentFailure("environment", f"step gave {wrong}, and metrics are finite numbers by name")
        for word in ("ended", "truncated"):
            if not isinstance(getattr(result, word), bool):
                raise EnvironmentFailure("environment", f"step gave {word}={getattr(result, word)!r:.200}, which is neither true nor false")
        if result.observation is None and not result.ended and not result.truncated:
            raise EnvironmentFailure("environment", "step neither ended the episode nor observed anything")
        return result

    async def close_episode(self, name: str) -> None:
        """Release an episode; a step that still runs is cancelled first. Unknown names are ignored."""
        WHO.set(name)
        episode, running = self._episodes.pop(name, None), self._running.get(name)
        if running is not None:
            running.cancel()
            await asyncio.wait([running], timeout=CLOSE_S)
        if episode is not None:
            await asyncio.ensure_future(guard("environment", "close", episode.close()))

    async def _answer(self, name: str, what: str, call: Awaitable[Any], kind: type) -> Any:
        """What an episode answers, of the right class and not too large."""
        task = asyncio.ensure_future(guard("environment", what, call))
        self._running[name] = task
        try:
            answer = await task
        finally:
            task.cancel()  # where this call was cancelled
            self._running.pop(name, None)
        if not isinstance(answer, kind):
            raise EnvironmentFailure("environment", f"{what} gave a {type(answer).__name__}, which is no {kind.__name__}")
        if (problem := wrong_observation(answer.observation if isinstance(answer, StepResult) else answer)) is not None:
            raise EnvironmentFailure("environment", f"{what} gave {problem}")
        try:
            check(answer, self._answer_bytes)
        except CodecError as error:
            hint = " An environment cuts what its tools print." if isinstance(error, MessageTooLarge) else ""
            raise EnvironmentFailure("environment", f"what {what} gave is not sent on: {error}.{hint}") from error
        return answer

    # ------------------------------------------------------------ rubrics

    async def score(
        self, name: str, task: Task, episodes: Sequence[Sequence[Turn]]
    ) -> tuple[dict[str, list[float | str]], dict[str, float]]:
        """By rubric one score for each episode (in words what was given where that is no finite number: that episode's failure, not the group's), and the weights. `name` is this call's. All rubrics run at once; the first failure in their order is raised."""
        WHO.set(name)
        group = [tuple(turns) for turns in episodes]
        calls = [guard("scorer", f"rubric {rubric.name!r}", rubric.score(task, group)) for rubric in self._rubrics.values()]
        values: dict[str, list[float | str]] = {}
        for title, scores in zip(self._rubrics, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(scores, BaseException):
                raise scores
            if not isinstance(scores, Sequence) or len(scores) != len(group):
                text = f"rubric {title!r} gave {told(scores)} for {len(group)} episodes: it gives one finite number for each"
                raise EnvironmentFailure("scorer", text)
            values[title] = numbers_or_words(scores)
        return values, {name: float(rubric.weight) for name, rubric in self._rubrics.items()}

    async def close(self) -> None:
        """Close all episodes."""
        for name in list(self._episodes):
            with contextlib.suppress(EnvironmentFailure):
                await self.close_episode(name)


async def guard(boundary: Boundary, what: str, call: Awaitable[Any]) -> Any:
    """Await a call of an environment's code; whatever it raises is an EnvironmentFailure, its own ones as they are."""
    try:
        return await call
    except EnvironmentFailure:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise failure(boundary, what, error) from error
    except BaseException as error:
        raise failure(boundary, what, error) from error


def failure(boundary: Boundary, what: str, error: BaseException) -> EnvironmentFailure:
    """The failure that an exception of an environment's code is; one of the system (files, network, time) may pass."""
    return EnvironmentFailure(boundary, f"{what}: {words(error)}", retry=isinstance(error, OSError))


def wrong_metrics(metrics: Any) -> str | None:
    """What of a step's metrics is not as the contract says, in words; None where all is."""
    if not isinstance(metrics, Mapping):
        return f"the metrics {told(metrics)}"
    for name, value in metrics.items():
        if not isinstance(name, str):
            return f"a metric with the name {told(name)}"
        if not is_number(value):
            return f"the metric {name!r:.200} as {told(value)}"
    return None


def wrong_limits(limits: Any) -> list[str]:
    """What of an environment's limits is not as the contract says, in words."""
    if not isinstance(limits, Limits):
        return [f"they are a {type(limits).__name__}, and no Limits"]
    counts = {name: getattr(limits, name) for name in ("turns", "tokens_per_turn", "tokens")}
    seconds = {name: getattr(limits, name) for name in ("seconds_per_turn", "seconds")}
    wrong = [
        f"{name}={value!r} must be a whole number of at least 1, or None"
        for name, value in counts.items()
        if value is not None and not (isinstance(value, int) and is_number(value) and value >= 1)
    ]
    return wrong + [
        f"{name}={value!r} must be a number above 0, or None"
        for name, value in seconds.items()
        if value is not None and not (is_number(value) and value > 0)
    ]


def wrong_observation(observation: Any) -> str | None:
    """What of an observation (None: there is none) is not as the contract says, in words; None where all is. A renderer would find it later, and end the run by it."""
    if observation is None:
        return None
    if not isinstance(observation, Observation):
        return f"the observation {observation!r:.200}, which is no Observation"
    for name, of in (("turns", "Turn"), ("tools", "ToolSpec")):
        if not isinstance(given := getattr(observation, name), (tuple, list)):
            return f"an observation whose {name} are a {type(given).__name__}, and no tuple of {of}"
    if not isinstance(observation.rewrites, bool):
        return f"an observation whose rewrites is {told(observation.rewrites)}, which is neither true nor false"
    if not isinstance(observation.next_actor, str) or not observation.next_actor:
        return f"an observation whose next_actor is {observation.next_actor!r:.200}, and no name"
    for tool in observation.tools:
        if not isinstance(tool, ToolSpec):
            return f"a {type(tool).__name__} as a tool of its observation, and no ToolSpec"
        if not isinstance(tool.name, str) or not isinstance(tool.description, str) or not isinstance(tool.parameters, Mapping):
            return f"the tool {tool!r:.200} in its observation: name and description are texts, parameters a mapping"
    for place, turn in enumerate(observation.turns):
        if not isinstance(turn, Turn):
            return f"a {type(turn).__name__} as turn {place} of its observation, and no Turn"
        if turn.role not in ROLES:
            return f"turn {place} of its observation with the role {turn.role!r}. {did_you_mean(str(turn.role), ROLES)}"
        parts = (turn.content,) if isinstance(turn.content, str) else turn.content
        if not isinstance(parts, (tuple, list)) or not all(isinstance(part, (str, Media)) for part in parts):
            return f"turn {place} of its observation with the content {turn.content!r:.200}, which is neither text nor a tuple of texts and Media"
        if (medium := next((part for part in parts if isinstance(part, Media) and not is_medium(part)), None)) is not None:
            return f"turn {place} of its observation with a medium of the kind {medium.kind!r:.50} whose data are a {type(medium.data).__name__}: an image is a path or bytes, a video these or a tuple of bytes"
        for name, value in (("tokens", () if turn.tokens is None else turn.tokens), ("tool_calls", turn.tool_calls)):
            kind = int if name == "tokens" else ToolCall
            if not isinstance(value, (tuple, list)) or not all(type(item) is kind for item in value):
                return f"turn {place} of its observation with {name}={value!r:.200}, and no tuple of {kind.__name__}"
        texts = {"actor": turn.actor, **({} if turn.tool_call_id is None else {"tool_call_id": turn.tool_call_id})}
        texts |= {
            f"tool_calls.{number}.{name}": getattr(call, name)
            for number, call in enumerate(turn.tool_calls)
            for name in ("id", "name", "arguments")
        }
        if (wrong := next((name for name, text in texts.items() if not isinstance(text, str)), None)) is not None:
            return f"turn {place} of its observation with {wrong}={texts[wrong]!r:.200}, which is no text"
    return None


def is_medium(medium: Media) -> bool:
    """Whether an image or a video is as the contract says."""
    frames = medium.data if medium.kind == "video" and isinstance(medium.data, (tuple, list)) else None
    is_file = isinstance(medium.data, (str, bytes)) or (frames is not None and all(isinstance(frame, bytes) for frame in frames))
    return medium.kind in ("image", "video") and isinstance(medium.media_type, str) and is_file
