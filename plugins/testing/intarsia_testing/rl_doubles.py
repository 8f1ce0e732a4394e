"""Test doubles for processes of reinforcement learning: a launcher without processes, and entries that real processes build: a scripted generator and an environment that misbehaves.

Torch-free. `offered` makes the entries those of a third-party distribution that processes of the test see as well.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import chz
from intarsia.config.bases import EnvironmentConfig
from intarsia.contracts import Entry, Limits, Observation, StepResult, Task, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError, did_you_mean
from intarsia.hookspecs import hookimpl
from intarsia.plugins import Plugins, import_reference, load
from intarsia_rl.bases import GeneratorConfig
from intarsia_rl.contracts import (
    Finish,
    Generated,
    GeneratorContext,
    GeneratorFacts,
    GeneratorStats,
    ProcessDied,
    Request,
    WeightVersion,
)
from intarsia_rl.processes.codec import HEAD, decode, encode
from intarsia_rl.processes.failures import error_of, plain_error
from intarsia_rl.processes.generator_service import GeneratorService, serve

from intarsia_testing.rollout_doubles import log_prob

INTARSIA_API = 1

# ---------------------------------------------------------------- a generator


@chz.chz(typecheck=True)
class ScriptedConfig(GeneratorConfig):
    """A policy without a model."""

    vocab_size: int = chz.field(default=64, doc="Ids that there are.")
    stop_id: int = chz.field(default=0, doc="The id that ends a completion.")
    token_s: float = chz.field(default=0.0, doc="Seconds for each token.")
    deadly_id: int | None = chz.field(default=None, doc="A prompt that begins with this id ends the process.")
    stuck_id: int | None = chz.field(default=None, doc="A prompt that begins with this id gets no token, ever.")
    fails: str | None = chz.field(default=None, doc="What building it raises.")
    bad_version: int | None = chz.field(default=None, doc="The version whose digests differ.")


class ScriptedTokens:
    """A Generator whose tokens are a function of prompt and seed, and whose log-probabilities are one of the version, too (`rollout_doubles.log_prob`).

    It keeps the contract: pause, drain, abort, versions of each token, forced tokens; no weights are read.
    """

    def __init__(self, config: ScriptedConfig, context: GeneratorContext) -> None:
        if config.fails is not None:
            raise UsageError(config.fails)
        self.config = config
        self.facts = GeneratorFacts("scripted", config.vocab_size, 4096, 64, ("forced",))
        self.version = 0 if context.initial else -1
        self._running: dict[str, list[int]] = {}
        self._ended: set[str] = set()
        self._going = asyncio.Event()
        self._going.set()
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Condition()
        self._generated = self._prompts = 0

    async def generate(self, request: Request, on_tokens: Callable[[Sequence[int]], None] | None = None) -> Generated:
        """Tokens one by one, each of the version in force."""
        if self.version < 0:
            raise UsageError("the generator has no weights yet")
        if request.tokens[0] == self.config.deadly_id:
            os._exit(7)
        if wrong := [token for token in request.tokens if not 0 <= token < self.config.vocab_size]:
            raise UsageError(f"the prompt holds {wrong[:3]}, and ids go from 0 to {self.config.vocab_size - 1}")
        await self._open.wait()
        told, versions, log_probs = self._running.setdefault(request.id, []), [], []
        finish: Finish = "length"
        self._prompts += len(request.tokens)
        try:
            for token in script(request, self.config):
                await asyncio.sleep(self.config.token_s)
                while request.tokens[0] == self.config.stuck_id:
                    await asyncio.sleep(3600.0)
                await self._going.wait()
                if request.id in self._ended:
                    finish = "abort"
                    break
                log_probs.append(log_prob(self.version, len(request.tokens) + len(told), token))
                versions.append(self.version)
                told.append(token)
                self._generated += 1
                if on_tokens is not None:
                    on_tokens([token])
                if token == self.config.stop_id and not request.forced:
                    finish = "eos"
        finally:
            del self._running[request.id]
            self._ended.discard(request.id)
            async with self._changed:
                self._changed.notify_all()
        return Generated(request.id, tuple(told), tuple(log_probs), tuple(versions), finish)

    async def abort(self, requests: Sequence[str] | None = None) -> None:
        """At the next token."""
        self._ended |= set(self._running) if requests is None else set(requests) & set(self._running)
        self._going.set()

    async def pause(self, keep: bool = True) -> None:
        """At the next token, or when all have finished."""
        self._open.clear()
        if not keep:
            await self._drained()
        self._going.clear()

    async def resume(self) -> None:
        """Go on."""
        self._going.set()
        self._open.set()

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """The number alone."""
        if weights.version < self.version:
            raise UsageError(f"version {weights.version} is older than {self.version}")
        if weights.version == self.config.bad_version:
            from intarsia.errors import NumericsError

            raise NumericsError("the digests of `head` differ")
        if in_flight == "drain" and self._running:
            was_open = self._open.is_set()
            self._open.clear()
            await self._drained()
            if was_open:
                self._open.set()
        self.version = weights.version

    async def stats(self) -> GeneratorStats:
        """Counts."""
        running = len(self._running)
        return GeneratorStats(self.version, running, 0, self._prompts, 0, self._generated, 0.0, 0.0, not self._going.is_set())

    async def close(self) -> None:
        """Nothing is held."""

    async def _drained(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running)


def script(request: Request, config: ScriptedConfig) -> Sequence[int]:
    """The tokens of a request: those forced, else random ones of its seed and prompt up to a stop id or the limit."""
    if request.forced:
        return request.forced
    text = f"{request.tokens} {request.sampling.seed}"
    chance = random.Random(hashlib.sha256(text.encode()).hexdigest())
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens and (not tokens or tokens[-1] != config.stop_id):
        tokens.append(chance.randrange(config.vocab_size))
    return tokens


# ---------------------------------------------------------------- an environment


@chz.chz(typecheck=True)
class MisbehavesConfig(EnvironmentConfig):
    """An environment whose tasks say what goes wrong."""

    tasks: int = chz.field(default=4, doc="Tasks of the split `train`.")
    fails: str | None = chz.field(default=None, doc="What building it raises.")
    once: str | None = chz.field(default=None, doc="A file: what ends or blocks the worker does so only until it is there.")


class Misbehaves:
    """An Environment. `task.data["do"]` says what `step` does: see `DEEDS`; `"do_reset"` the same for `reset`, `"do_score"` for the rubric. Episodes answer 'yes', with reward 1, and end."""

    def __init__(self, config: MisbehavesConfig) -> None:
        if config.fails is not None:
            raise ImportError(config.fails)
        self.config = config
        self.limits = Limits(turns=3, seconds=60.0)

    def tasks(self, split: str) -> Sequence[Task]:
        """`tasks` of `train`."""
        if split != "train":
            raise UsageError(f"There is no split {split!r}. {did_you_mean(split, ['train'])}")
        return [Task(f"train/{number}", {"do": "answer"}) for number in range(self.config.tasks)]

    def episode(self, task: Task, seed: int) -> MisbehavingEpisode:
        """A try."""
        return MisbehavingEpisode(self, task, seed)

    def rubrics(self) -> Sequence[MisbehavingRubric]:
        """One."""
        return (MisbehavingRubric(self),)

    async def do(self, what: str) -> Any:
        """Misbehave."""
        if self.config.once is not None and what in ("exit", "block", "abort"):
            if Path(self.config.once).exists():
                return None
            Path(self.config.once).touch()
        return await DEEDS[what]()


@dataclasses.dataclass
class MisbehavingEpisode:
    """See Misbehaves."""

    home: Misbehaves
    task: Task
    seed: int

    async def reset(self) -> Observation:
        """The question."""
        wrong = await self.home.do(self.task.data.get("do_reset", "answer"))
        return Observation((Turn("user", f"question {self.seed} of process {os.getpid()}"),)) if wrong is None else wrong

    async def step(self, action: Turn) -> StepResult:
        """The answer."""
        wrong = await self.home.do(self.task.data.get("do", "answer"))
        return StepResult(Observation((Turn("user", "yes"),)), reward=1.0, ended=True) if wrong is None else wrong

    async def close(self) -> None:
        """Misbehave, perhaps."""
        await self.home.do(self.task.data.get("do_close", "answer"))


@dataclasses.dataclass
class MisbehavingRubric:
    """Scores lengths."""

    home: Misbehaves
    name: str = "length"
    weight: float = 0.5

    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> Any:
        """The number of turns of each."""
        wrong = await self.home.do(task.data.get("do_score", "answer"))
        return [float(len(turns)) for turns in episodes] if wrong is None else wrong


async def _answer() -> None:
    return None


async def _raise() -> None:
    raise KeyError("the key")


async def _system() -> None:
    raise ConnectionRefusedError("nobody listens")


async def _fail() -> None:
    raise EnvironmentFailure("tool", "the tool is broken", retry=True)


async def _leave() -> None:
    sys.exit("enough")


async def _hang() -> None:
    await asyncio.Event().wait()


async def _stay() -> None:
    while True:
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            continue


async def _block() -> None:
    time.sleep(3600.0)


async def _exit() -> None:
    print("the worker's last words", flush=True)
    os._exit(3)


async def _abort() -> None:
    os.abort()


async def _flood() -> StepResult:
    return StepResult(Observation((Turn("tool", "x" * (1 << 26), tool_call_id="1"),)))


async def _print() -> None:
    for _ in range(1000):
        sys.stdout.write("x" * 10_000 + "\n")


async def _nan() -> StepResult:
    return StepResult(None, reward=float("nan"), ended=True)


async def _text() -> StepResult:
    return StepResult(None, reward="high", ended=True)  # type: ignore[arg-type]


async def _object() -> StepResult:
    return StepResult(None, reward=1.0, ended=True, metrics={"what": object()})  # type: ignore[dict-item]


async def _class() -> Any:
    return {"reward": 1.0}


async def _nothing() -> StepResult:
    return StepResult(None)


async def _few() -> list[float]:
    return []


DEEDS: dict[str, Callable[[], Any]] = {
    "answer": _answer,
    "raise": _raise,
    "system": _system,
    "fail": _fail,
    "leave": _leave,
    "hang": _hang,
    "stay": _stay,
    "block": _block,
    "exit": _exit,
    "abort": _abort,
    "flood": _flood,
    "print": _print,
    "nan": _nan,
    "text": _text,
    "object": _object,
    "class": _class,
    "nothing": _nothing,
    "few": _few,
}
"""answer: nothing wrong; raise: KeyError; system: ConnectionRefusedError; fail: EnvironmentFailure("tool", retry=True); leave: SystemExit; hang: wait forever; stay: wait forever, also when
cancelled; block: block the worker; exit: end it; abort: crash it; flood: a tool's output of 64 MiB; print: 10 MB to standard output; nan: that reward; object: a metric that is none; class: a
dict for a StepResult; nothing: neither end nor observation; few: no score."""


# ---------------------------------------------------------------- their entries


@hookimpl(optionalhook=True)
def offer_generators() -> Sequence[Entry]:
    """The generator."""
    home = "intarsia_testing.rl_doubles"
    return [Entry(name="scripted", config=f"{home}:ScriptedConfig", target=f"{home}:ScriptedTokens", doc="A policy without a model.")]


@hookimpl
def offer_environments() -> Sequence[Entry]:
    """The environment."""
    home = "intarsia_testing.rl_doubles"
    return [Entry(name="misbehaves", config=f"{home}:MisbehavesConfig", target=f"{home}:Misbehaves", doc="Whatever can go wrong.")]


def offered(folder: Path, monkeypatch: Any) -> Plugins:
    """Install the entries as distribution `acme-rl-doubles` into `folder`, put it on the path of this process and of those that it starts, and load the plugins. The caller calls
    `intarsia.plugins.use` with them, and with None at the end."""
    about = folder / "acme_rl_doubles-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rl-doubles\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[intarsia]\ndoubles = intarsia_testing.rl_doubles\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return load()


async def serve_until_a_token(**arguments: Any) -> GeneratorService:
    """The service of the generator `local`, which computes nothing more once a request has a token: what comes meanwhile finds it under way, however slow that is."""
    service = await serve(**arguments)
    generator: Any = service._generator
    engine = generator._engine
    step = engine.step
    engine.step = lambda admit=True: not any(job.log_probs for job in engine.jobs) and step(admit)
    return service


# ---------------------------------------------------------------- no processes


class InProcessLauncher:
    """A ProcessLauncher whose processes are objects in this loop. What is called and answered goes through the codec, as between processes. `started` are all that it made, in order;
    `refuse` is raised by the next starts, one each."""

    def __init__(self) -> None:
        self.started: list[InProcess] = []
        self.refuse: list[Exception] = []

    async def start(self, name: str, service: str, arguments: Mapping[str, Any], threads: int | None = None) -> InProcess:
        """Make the service."""
        await asyncio.sleep(0)
        if self.refuse:
            raise self.refuse.pop(0)
        process = InProcess(name, await import_reference(service)(**through(dict(arguments))))
        self.started.append(process)
        return process


class InProcess:
    """A Process in this loop. `die(reason)` is its death; `stopped` says that it was asked to stop."""

    def __init__(self, name: str, service: Any) -> None:
        self.name, self.service, self.stopped = name, service, False
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls: set[asyncio.Task[Any]] = set()
        self._listeners: list[Callable[[str, Any], None]] = []
        if hasattr(service, "connected"):
            service.connected(self._tell)

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As between processes."""
        if self._reason.done():
            raise ProcessDied(self.name, self._reason.result())
        call = asyncio.ensure_future(self._answer(method, through(list(arguments))))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait({call, self._reason}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
        if self._reason.done():
            raise ProcessDied(self.name, self._reason.result())
        if not call.done() or call.cancelled():
            raise TimeoutError(f"no answer of {self.name} in {timeout_s} s")
        kind, value = call.result()
        if kind == "error":
            raise error_of(value)
        return value

    def on_message(self, callback: Callable[[str, Any], None]) -> None:
        """Listen."""
        self._listeners.append(callback)

    async def stop(self, grace_s: float = 5.0) -> None:
        """The end."""
        if not self._reason.done():
            self.stopped = True
            self.die("it was stopped")

    async def died(self) -> str:
        """Its end, unless it was stopped."""
        await asyncio.wait({self._reason})
        if self.stopped:
            await asyncio.Event().wait()
        return self._reason.result()

    def die(self, reason: str) -> None:
        """End without being asked."""
        if not self._reason.done():
            self._reason.set_result(reason)
        for call in self._calls:
            call.cancel()

    async def _answer(self, method: str, arguments: list[Any]) -> Any:
        if method == "ping":
            return through(("result", None))
        try:
            return through(("result", await getattr(self.service, method)(*arguments)))
        except Exception as error:
            return through(("error", plain_error(error)))

    def _tell(self, kind: str, value: Any) -> None:
        for listener in self._listeners:
            listener(kind, through(value))


def through(value: Any) -> Any:
    """A value as it arrives in another process."""
    head, _, text, *blobs = encode(value, 1 << 28)
    assert HEAD.unpack(head)[1] == len(blobs)
    return decode(text, blobs)


async def nothing() -> object:
    """A service that has no method: `ping` is answered all the same."""
    return object()
