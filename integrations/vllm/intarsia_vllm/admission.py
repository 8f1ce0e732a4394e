"""Requests before and while vLLM has them. vLLM is given no more than it runs at once, so that what it has is what runs, and that can be drained. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from intarsia_rl.contracts import Finish, Generated, Request, Routes

OnTokens = Callable[[Sequence[int]], None]


@dataclasses.dataclass(eq=False)
class Live:
    """A request that is being served, and what it has so far."""

    request: Request
    on_tokens: OnTokens | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    finish: Finish | None = None
    began: float = dataclasses.field(default_factory=time.perf_counter)
    first_token_s: float = 0.0
    admitted: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def take(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Further tokens are decided."""
        if tokens:
            self.first_token_s = self.first_token_s or time.perf_counter() - self.began
            self.tokens += tokens
            self.log_probs += log_probs
            if self.on_tokens is not None:
                self.on_tokens(tuple(tokens))

    def result(self, routes: Routes | None) -> Generated:
        """The completion."""
        return Generated(
            request=self.request.id,
            tokens=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            versions=tuple(self.versions),
            finish=self.finish or "abort",
            routes=routes,
            cached_tokens=self.cached,
            first_token_s=self.first_token_s,
            seconds_s=time.perf_counter() - self.began,
        )


class Admission:
    """Who waits and who runs: the lowest priority number first, then the earliest. At most `most` run; none is begun while anybody holds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.all: dict[str, Live] = {}
        self.running: set[str] = set()
        self.busy_s = 0.0
        self._since = 0.0
        self._waiting: list[tuple[int, int, Live]] = []
        self._numbers = itertools.count()
        self._holds: set[str] = set()
        self._moved = asyncio.Event()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self.all) - len(self.running)

    @contextlib.asynccontextmanager
    async def place(self, live: Live) -> AsyncIterator[None]:
        """Wait for the request's turn; it runs inside. Not admitted inside: it was aborted before it began."""
        name = live.request.id
        self.all[name] = live
        heapq.heappush(self._waiting, (live.request.priority, next(self._numbers), live))
        self._admit()
        try:
            await live.admitted.wait()
            yield
        finally:
            del self.all[name]
            if name in self.running:
                self.running.discard(name)
                if not self.running:
                    self.busy_s += time.perf_counter() - self._since
            self.moved()
            self._admit()

    def is_running(self, live: Live) -> bool:
        """Whether the request has its place."""
        return live.request.id in self.running

    def hold(self, why: str) -> None:
        """Begin none until `release` of the same reason."""
        self._holds.add(why)

    def release(self, why: str) -> None:
        """This reason is no more."""
        self._holds.discard(why)
        self._admit()

    def moved(self) -> None:
        """Something that others wait for may have changed."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until this is so."""
        while not done():
            await self._moved.wait()

    def busy(self) -> float:
        """Seconds with something to run."""
        return self.busy_s + (time.perf_counter() - self._since if self.running else 0.0)

    def _admit(self) -> None:
        while self._waiting and not self._holds and len(self.running) < self.most:
            live = heapq.heappop(self._waiting)[2]
            name = live.request.id
            if self.all.get(name) is not live or live.admitted.is_set():
                continue  # it was aborted, or nobody waits for it any more
            if not self.running:
                self._since = time.perf_counter()
            self.running.add(name)
            live.admitted.set()

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self.all.values()))
