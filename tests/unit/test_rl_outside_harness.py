"""The contract of environments carries harnesses of others, which ask an OpenAI-compatible endpoint for completions, resend all of their history as text, and rewrite it as they like: what is trained on are still the
very ids that were generated. The harness here is a client of HTTP and knows nothing of this platform."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from intarsia.contracts import Limits, Observation, StepResult, Task, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia_rl.contracts import Sample, Sampling
from intarsia_rl.controller.groups import Player
from intarsia_rl.controller.rollout import Rules, Try
from intarsia_testing.rollout_doubles import InProcessWorkers, MergingRenderer, MergingTokenizer, Said, ScriptedGenerators

Ask = Callable[[list[dict[str, str]]], Awaitable[str]]
Harness = Callable[[Ask], Awaitable[float]]


class HarnessEpisode:
    """One run of the harness: each completion that it asks for is an observation, each action the answer to it."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._asked: asyncio.Queue[tuple[list[dict[str, str]], asyncio.Future[str]]] = asyncio.Queue()
        self._history: list[Turn] = []
        self._answer: asyncio.Future[str]

    async def reset(self) -> Observation:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._running = asyncio.ensure_future(self._harness(client(self._server.sockets[0].getsockname()[1])))
        result = await self._next()
        assert result.observation is not None
        return result.observation

    async def step(self, action: Turn) -> StepResult:
        self._history.append(action)
        self._answer.set_result(str(action.content))
        return await self._next()

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._server.close()

    async def _next(self) -> StepResult:
        """Wait for the harness to ask, or to end."""
        asks = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({asks, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not asks.done():
            asks.cancel()
            try:
                return StepResult(None, reward=await self._running, ended=True)
            except Exception as error:
                raise EnvironmentFailure("tool", f"the harness raised {error}") from error
        messages, self._answer = asks.result()
        said = [Turn(message["role"], message["content"]) for message in messages]  # type: ignore[arg-type]
        known = len(self._history)
        if [(turn.role, turn.content) for turn in said[:known]] == [(turn.role, turn.content) for turn in self._history]:
            new, rewrites = said[known:], False
        else:  # it has rewritten its history: what it kept of the policy's turns keeps its ids
            own = {turn.content: turn for turn in self._history if turn.tokens is not None}
            new, rewrites = [own.get(turn.content, turn) if turn.role == "assistant" else turn for turn in said], True
            self._history = []
        self._history += new
        return StepResult(Observation(tuple(new), rewrites=rewrites))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/chat/completions ")
        size = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._asked.put((json.loads(await reader.readexactly(size))["messages"], answer))
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": await answer}}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()


def client(port: int) -> Ask:
    """What the harness knows: an address."""

    async def ask(messages: list[dict[str, str]]) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        found = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
        return str(found["choices"][0]["message"]["content"])

    return ask


class Outside:
    """An environment of one task, which a harness plays."""

    def __init__(self, harness: Harness) -> None:
        self.limits, self._harness = Limits(), harness

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("t", {})]

    def episode(self, task: Task, seed: int) -> HarnessEpisode:
        return HarnessEpisode(self._harness)

    def rubrics(self) -> Sequence[Any]:
        return ()


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def play(harness: Harness, *says: str) -> tuple[Sample, ScriptedGenerators]:
    """A try in which the policy says these texts, letter by letter: not the ids that the tokenizer would make of `ll`."""
    queue = list(says)
    generators = ScriptedGenerators(lambda request: Said([*queue.pop(0).encode(), 514]))
    generators.version = 0
    workers = InProcessWorkers(Outside(harness))
    rules = Rules(0, Sampling(1, stop_ids=(514,)), 200, timeout_s=60.0)
    player = Player(rules, workers.environment_facts(), generators, workers, MergingRenderer())
    [sample] = asyncio.run(player.tries(Task("t", {}), [Try("0/0", 0, 0, (0,))]))
    return sample, generators


def test_a_harness_that_resends_its_history_as_text_goes_on_in_one_segment() -> None:
    async def harness(ask: Ask) -> float:
        history = [message("user", "one")]
        for following in ("two", "three"):
            history += [message("assistant", await ask(history)), message("user", following)]
        return float(await ask(history) == "well")

    sample, generators = play(harness, "hello", "all", "well")
    assert sample.failure is None and sample.reward == 1.0
    [segment] = sample.segments
    assert MergingTokenizer().encode("hello") != list(b"hello"), "tokenised again it would be other ids"
    trained = [token for token, is_trained in zip(segment.tokens, segment.trained, strict=True) if is_trained]
    assert trained == [token for made in generators.log for token in made.tokens] == [*b"hello", 514, *b"all", 514, *b"well", 514]
    for request in generators.requests[1:]:
        assert request.tokens == segment.tokens[: len(request.tokens)]


def test_a_harness_that_rewrites_its_history_begins_a_segment_and_keeps_ids() -> None:
    async def harness(ask: Ask) -> float:
        first = [message("user", "a long story"), message("assistant", await ask([message("user", "a long story")]))]
        await ask([*first, message("user", "more")])
        await ask([message("user", "in short"), first[1], message("user", "so?")])
        return 0.5

    sample, generators = play(harness, "hello", "ok", "yes")
    assert sample.failure is None and sample.reward == 0.5 and len(sample.segments) == 2
    first, second = ([t for t, own in zip(each.tokens, each.trained, strict=True) if own] for each in sample.segments)
    assert first == [*b"hello", 514, *b"ok", 514] and second == [*b"yes", 514], "each is trained on once, where it was generated"
    kept = bytes(token for token in sample.segments[1].tokens if token < 256)
    assert b"hello" in kept, "the turn that it kept has the ids that were generated"
    assert len(generators.log) == 3


def test_a_harness_that_breaks_is_a_failure_and_no_reward() -> None:
    async def harness(ask: Ask) -> float:
        await ask([message("user", "one")])
        raise OSError("its disk is full")

    sample, _ = play(harness, "hello")
    assert sample.failure is not None and (sample.failure.boundary, sample.failure.message) == (
        "tool",
        "the harness raised its disk is full",
    )
    assert sample.reward == 0.0
