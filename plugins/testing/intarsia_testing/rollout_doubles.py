"""Test doubles for the loop of rollouts, in one process: generators with a script, workers, a renderer over a tokenizer that merges, and an event loop without waiting.

Torch-free. Everything is a function of what it is asked, so that two runs can be compared bit for bit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from intarsia.contracts import Environment, Limits, Observation, StepResult, Task, ToolSpec, Turn
from intarsia.contracts.environment import Episode
from intarsia.errors import UsageError
from intarsia_rl.contracts import Finish, Generated, GeneratorFacts, GeneratorStats, Request, Sample, WeightVersion
from intarsia_rl.given import numbers_or_words
from intarsia_rl.processes.remote import EnvironmentFacts, Scores

Result = TypeVar("Result")


# ---------------------------------------------------------------- time


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on only when everything waits, and then at once to the next timer. Waiting for nothing is an AssertionError."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Seconds since it was made."""
        return self._now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        assert ready or timeout is not None, "everything waits, and nothing will happen: the loop is stuck"
        if not ready and timeout:
            self._loop._now += timeout
        return ready


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """What `asyncio.run` does, without waiting."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


# ---------------------------------------------------------------- tokens


class MergingTokenizer:
    """Ids 0 to 255 are bytes, and each pair of equal letters is one id more (256 + the letter): `encode(a) + encode(a)` is not `encode(aa)`, so that who tokenises text again is found out.
    Markers: 512 user, 513 assistant, 514 end of turn, 515 tool, 516 system."""

    vocab_size = 520
    bos_id = eos_id = pad_id = 514
    roles: Mapping[str, int] = {"user": 512, "assistant": 513, "tool": 515, "system": 516}

    def encode(self, text: str) -> list[int]:
        """Greedy from the left."""
        found: list[int] = []
        for byte in text.encode():
            if found and found[-1] == byte:
                found[-1] = 256 + byte
            else:
                found.append(byte)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text without markers."""
        return b"".join(bytes([each]) if each < 256 else bytes([each - 256] * 2) for each in ids if each < 512).decode("utf-8", "replace")


class MergingRenderer:
    """A Renderer over the MergingTokenizer. `forgets`: its template drops what the assistant said in earlier turns up to a `.`, as templates drop reasoning: histories are then rendered
    anew at every turn."""

    stop_ids = (514,)

    def __init__(self, forgets: bool = False) -> None:
        self.tokenizer, self.forgets = MergingTokenizer(), forgets

    def begin(self, turns: Sequence[Turn], tools: Sequence[ToolSpec]) -> list[int]:
        """Everything."""
        if not turns:
            return []
        ids = [token for turn in turns for token in self._turn(turn)]
        return [*ids, self.tokenizer.roles["assistant"]]

    def extend(self, turns: Sequence[Turn], new: Sequence[Turn], tools: Sequence[ToolSpec], finish: Finish) -> list[int] | None:
        """What comes behind the generated tokens."""
        if self.forgets:
            return None
        end = [] if finish == "eos" else [514]
        return [*end, *(token for turn in new for token in self._turn(turn)), self.tokenizer.roles["assistant"]]

    def parse(self, tokens: Sequence[int], finish: Finish) -> Turn:
        """Text; no tools."""
        return Turn("assistant", self.tokenizer.decode(tokens), tuple(tokens))

    def _turn(self, turn: Turn) -> list[int]:
        assert isinstance(turn.content, str)
        if turn.tokens is not None and not self.forgets:
            ids = list(turn.tokens)
            return [self.tokenizer.roles["assistant"], *ids, *([] if ids[-1] == 514 else [514])]
        text = turn.content.rpartition(".")[2] if turn.role == "assistant" else turn.content
        return [self.tokenizer.roles[turn.role], *self.tokenizer.encode(text), 514]


# ---------------------------------------------------------------- generators


@dataclasses.dataclass(frozen=True)
class Said:
    """What the scripted generators say: tokens, and seconds for each of them."""

    tokens: Sequence[int]
    seconds: float = 0.0
    finish: Finish = "eos"


def log_prob(version: int, before: int, token: int) -> float:
    """A log-probability that is a function of the weights' version, the place and the token, so that it tells where it came from."""
    return -1.0 - (version * 7919 + before * 104729 + token * 31) % 1000 / 1000.0


class ScriptedGenerators:
    """`Generators` of the loop that say what `script(request)` gives. Tokens come one by one, each of the version that is in force then. `log` has every completion."""

    def __init__(self, script: Callable[[Request], Said]) -> None:
        self._script = script
        self.facts = GeneratorFacts("scripted", MergingTokenizer.vocab_size, 4096, 64, ("forced",))
        self.version = self.newest = -1
        self.log: list[Generated] = []
        self.requests: list[Request] = []
        self.kills = 0
        self._tokens, self._busy, self._running = 0, 0.0, 0

    async def generate(self, request: Request) -> Generated:
        """The script's tokens, cut at the request's limit, or the forced ones."""
        if self.version < 0:
            raise UsageError("the generators have no weights yet")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        self.requests.append(request)
        said = Said(request.forced) if request.forced else self._script(request)
        tokens = list(said.tokens[: request.sampling.max_tokens])
        versions: list[int] = []
        finish: Finish = said.finish if len(tokens) == len(said.tokens) and tokens else "length"
        log_probs = []
        self._running += 1
        for token in tokens:
            await asyncio.sleep(said.seconds)
            log_probs.append(log_prob(self.version, len(request.tokens) + len(versions), token))
            versions.append(self.version)
        self._running -= 1
        self._tokens += len(tokens)
        self._busy += loop.time() - begin
        made = Generated(request.id, tuple(tokens), tuple(log_probs), tuple(versions), finish)
        self.log.append(made)
        return made

    def announce(self, weights: WeightVersion) -> None:
        """Noted in `newest`."""
        self.newest = weights.version

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """In force when others have had their turn; `drain` waits for what runs."""
        await asyncio.sleep(0)
        while in_flight == "drain" and self._running:
            await asyncio.sleep(0.01)
        self.version = weights.version

    async def stats(self) -> dict[int, GeneratorStats]:
        """One."""
        return {0: await self.totals()}

    async def totals(self) -> GeneratorStats:
        """Its counts."""
        return GeneratorStats(version=self.version, running=self._running, generated_tokens=self._tokens, busy_s=self._busy)


# ---------------------------------------------------------------- environments


class InProcessWorkers:
    """`Workers` of the loop over an environment in this process."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.kills = 0

    def environment_facts(self) -> EnvironmentFacts:
        """Limits and rubrics."""
        return EnvironmentFacts(self.environment.limits, {rubric.name: rubric.weight for rubric in self.environment.rubrics()})

    async def tasks(self, split: str) -> Sequence[Task]:
        """All of a split."""
        return self.environment.tasks(split)

    def episode(self, task: Task, seed: int, timeout_s: float | None = None) -> Episode:
        """A try."""
        return self.environment.episode(task, seed)

    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> Scores:
        """All rubrics."""
        rubrics = self.environment.rubrics()
        values = {rubric.name: tuple(numbers_or_words(await rubric.score(task, episodes))) for rubric in rubrics}
        return Scores(values, {rubric.name: rubric.weight for rubric in rubrics})


class OneTurn:
    """An environment of one turn: `reward(task, seed, action)` scores it, and may raise."""

    limits = Limits(turns=1)

    def __init__(self, tasks: Mapping[str, Sequence[Task]], reward: Callable[[Task, int, Turn], float | None]) -> None:
        self._tasks, self.reward = tasks, reward

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks."""
        if split not in self._tasks:
            raise UsageError(f"There is no split {split!r}. Splits: {', '.join(self._tasks)}.")
        return self._tasks[split]

    def episode(self, task: Task, seed: int) -> OneTurnEpisode:
        """A try."""
        return OneTurnEpisode(self, task, seed)

    def rubrics(self) -> Sequence[Any]:
        """None: the step is scored."""
        return ()


@dataclasses.dataclass
class OneTurnEpisode:
    """See OneTurn."""

    home: OneTurn
    task: Task
    seed: int

    async def reset(self) -> Observation:
        """The task's text."""
        return Observation((Turn("user", self.task.data.get("text", self.task.id)),))

    async def step(self, action: Turn) -> StepResult:
        """The end."""
        await asyncio.sleep(0)
        return StepResult(None, reward=self.home.reward(self.task, self.seed, action), ended=True)

    async def close(self) -> None:
        """Nothing is held."""


class MeanBaseline:
    """An algorithm: the reward over the group's mean; `filters` leaves out groups whose rewards are equal."""

    def __init__(self, filters: bool = False, needs_reference: bool = False) -> None:
        self.filters, self.needs_reference = filters, needs_reference

    def advantages(self, samples: Sequence[Sample]) -> list[float]:
        """Centred."""
        mean = sum(sample.reward for sample in samples) / len(samples)
        return [sample.reward - mean for sample in samples]

    def keeps(self, samples: Sequence[Sample], advantages: Sequence[float]) -> bool:
        """Whether anything can be learnt."""
        return not self.filters or any(advantages)

    def token_weight(self, sample: Sample) -> float:
        """Each token counts once."""
        return 1.0

    def count(self, sample: Sample) -> int:
        """Its tokens."""
        return sample.trained_tokens

    def loss(self, log_probs_N: Any, extra: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Minus the weighted sum of advantages times log-probability."""
        return -(log_probs_N * extra["advantages"] * extra["weights"]).sum(), {}


def published(version: int) -> WeightVersion:
    """Weights that nobody reads."""
    return WeightVersion(version, "none", {}, {}, {})


def digest(text: str) -> int:
    """A number of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
