"""The generator entry `local`: asyncio in front, and one thread that computes, so that the loop stays responsive."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal

from intarsia.contracts import Tokenizer
from intarsia.errors import UsageError
from intarsia_rl.contracts import Generated, GeneratorFacts, GeneratorStats, Request, WeightVersion
from intarsia_rl.media import decoder_of

from intarsia_generation.engine.engine import Engine
from intarsia_generation.engine.request import Job
from intarsia_generation.engine.sight import Sight, look
from intarsia_generation.settings import wrong_choices

logger = logging.getLogger("intarsia.generation")

Command = Callable[[], None]


@dataclasses.dataclass(eq=False)
class _Drain:
    """Something to do as soon as no request runs."""

    kind: Literal["update", "pause"]
    action: Command
    end: Callable[[Any], None]


class LocalGenerator:
    """A `Generator` over an Engine. Stability: provisional.

    `tokenizer` makes the one that finds stop texts, when the first request has some. `processor` makes patches of what requests show (None: they show nothing). Requests that come
    before there are weights wait for them.
    """

    def __init__(
        self, engine: Engine, facts: GeneratorFacts, tokenizer: Callable[[], Tokenizer] | None = None, processor: Any = None
    ) -> None:
        self.facts = facts
        self._decoder = decoder_of(processor)
        self._loading: dict[str, bool] = {}
        self._engine, self._make_tokenizer = engine, tokenizer
        self._tokenizer: Tokenizer | None = None
        self._ids: set[str] = set()
        self._arrivals = itertools.count()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._drains: list[_Drain] = []
        self._paused = self._closed = False
        self._thread = threading.Thread(target=self._work, name="generator", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the contract

    async def generate(self, request: Request, on_tokens: Callable[[Sequence[int]], None] | None = None) -> Generated:
        """See `intarsia_rl.contracts.Generator`."""
        self._check(request)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generated] = loop.create_future()

        def tell(tokens: Sequence[int]) -> None:
            if on_tokens is not None:
                _in_loop(loop, on_tokens, tokens)

        tokenizer, arrival = self._stop_tokenizer() if request.sampling.stop else None, next(self._arrivals)
        self._ids.add(request.id)
        try:
            sight = await self._look(request) if request.media else None
            job = Job(request, arrival, tokenizer, lambda result: _in_loop(loop, _settle, future, result), tell, sight)
            if self._loading.pop(request.id, False) or (sight is not None and self._closed):
                return job.result("abort", None)
            self._commands.put(lambda: self._engine.add(job))
            try:
                return await future
            except asyncio.CancelledError:
                self._commands.put(lambda: self._engine.drop(job))
                raise
        finally:
            self._ids.discard(request.id)
            self._loading.pop(request.id, None)

    async def abort(self, requests: Sequence[str] | None = None) -> None:
        """See the contract."""
        wanted = None if requests is None else frozenset(requests)
        for waits in self._loading:
            self._loading[waits] |= wanted is None or waits in wanted

        def end() -> None:
            for job in self._engine.jobs:
                if wanted is None or job.request.id in wanted:
                    job.tell()
                    self._engine.end(job)

        await self._there(end)

    async def pause(self, keep: bool = True) -> None:
        """See the contract."""
        await self._there(lambda: setattr(self, "_paused", True), None if keep else "pause")

    async def resume(self) -> None:
        """See the contract. A pause that still waits for requests to finish is given up."""

        def go_on() -> None:
            self._paused = False
            for drain in [each for each in self._drains if each.kind == "pause"]:
                self._drains.remove(drain)
                drain.end(None)

        await self._there(go_on)

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """See the contract. `continue`: caches of requests that run are computed anew under the new weights before they go on. `drain` while paused waits for `resume`. A failed update leaves
        no weights in force: requests wait for the next one."""
        if in_flight not in ("continue", "drain"):
            raise UsageError(f"in_flight is {in_flight!r}; it must be continue or drain.")
        await self._there(lambda: self._engine.update(weights), "update" if in_flight == "drain" else None)

    async def stats(self) -> GeneratorStats:
        """See the contract. Counts may be a step old."""
        return self._engine.stats(self._paused)

    async def close(self) -> None:
        """End: requests are aborted. May be called twice."""
        if not self._closed:
            self._closed = True
            self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------ in the loop

    def _check(self, request: Request) -> None:
        """UsageError for what can never be served."""
        if self._closed:
            raise UsageError(f"Request {request.id!r}: the generator is closed.")
        check(request, self.facts, self._ids)

    async def _look(self, request: Request) -> Sight:
        """Load what a request shows, beside the loop; an abort that comes meanwhile is noted in `_loading`. See `look` for what cannot be used."""
        assert self._decoder is not None, "without a processor `check` refuses what shows something"
        self._loading[request.id] = False
        return await asyncio.to_thread(look, request, self._decoder)

    def _stop_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            if self._make_tokenizer is None:
                raise UsageError("Stop texts need a tokenizer, and this generator was given none. Use stop_ids.")
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    async def _there(self, action: Command, drain: Literal["update", "pause"] | None = None) -> None:
        """Run `action` on the thread, between two steps; with `drain` as soon as no request runs, none being begun before."""
        if self._closed:
            raise UsageError("The generator is closed.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        waits = _Drain(drain or "update", action, lambda result: _in_loop(loop, _settle, future, result))
        self._commands.put((lambda: self._do(waits)) if drain is None else (lambda: self._drains.append(waits)))
        try:
            await future
        except asyncio.CancelledError:
            self._commands.put(lambda: self._drains.remove(waits) if waits in self._drains else None)
            raise

    # ------------------------------------------------------------ on the thread

    def _work(self) -> None:
        """Serve until it is closed. A fault of the engine's own closes it, and is what everybody who waits is told."""
        ended: BaseException | None = None
        try:
            self._serve()
            self._obey(wait=False)
        except Exception as error:
            logger.exception("the generator has met a bug and is closed")
            self._closed = True
            ended = RuntimeError(f"The generator has met a bug and is closed: {type(error).__name__}: {error}")
        for job in self._engine.jobs:
            self._engine.end(job, ended)
        for drain in self._drains:
            drain.end(ended or UsageError("The generator was closed."))
        self._engine.close()

    def _serve(self) -> None:
        """Commands, then a step, and again; asleep where there is nothing to compute."""
        self._engine.attach()
        did_something = False
        while not self._closed:
            self._obey(wait=not did_something)
            if self._closed:
                break
            if self._drains and not self._paused and not self._engine.scheduler.begun:
                for drain in self._drains:
                    self._do(drain)
                self._drains = []
                did_something = True
                continue
            did_something = not self._paused and self._engine.step(admit=not self._drains)

    def _obey(self, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            try:
                command = self._commands.get(block=wait, timeout=self._engine.beat_s)
            except queue.Empty:
                if wait:
                    self._engine.beat()
                raise
            while True:
                command()
                command = self._commands.get(block=False)

    def _do(self, waits: _Drain) -> None:
        try:
            waits.action()
        except Exception as error:
            waits.end(error)
        else:
            waits.end(None)


def check(request: Request, facts: GeneratorFacts, ids: Container[str]) -> None:
    """UsageError, with every reason, for what a generator of these facts can never serve. `ids` are those of requests that have not ended."""
    sampling, prompt, forced = request.sampling, len(request.tokens), len(request.forced)
    total = prompt + sampling.max_tokens
    bad = [token for token in (*request.tokens, *request.forced) if not 0 <= token < facts.vocab_size]
    wrong = {
        "another request of this id has not ended yet: give each an id of its own": request.id in ids,
        "the prompt is empty: give at least one token": not request.tokens,
        f"it has images or video, and the generator {facts.name!r} serves text alone": bool(request.media)
        and "media" not in facts.capabilities,
        "it asks for the experts that routers choose, and this model has none": request.routes and "routes" not in facts.capabilities,
        f"token {next(iter(bad), None)} is not in the model's vocabulary of {facts.vocab_size}": bool(bad),
        f"it forces {forced} tokens, and sampling.max_tokens is {sampling.max_tokens}": forced > sampling.max_tokens,
        f"{prompt} prompt tokens and max_tokens {sampling.max_tokens} are {total} together, and a request here has at most {facts.max_tokens}: shorten one of them, "
        "or raise generator.max_tokens, model.max_positions or what the caches hold, whichever it is": total > facts.max_tokens,
        f"max_tokens is {sampling.max_tokens}; it must be at least 1": sampling.max_tokens < 1,
        **wrong_choices(sampling),
    }
    if found := [text for text, is_wrong in wrong.items() if is_wrong]:
        raise UsageError(f"Request {request.id!r} cannot be served: {'; '.join(found)}.")


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    """In the loop: give a waiting call its result or its error."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    # A loop that was closed waits for nothing any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
