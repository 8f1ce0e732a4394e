"""A clock that stands still until it is told to go on: for tests of what waits, times out or measures, without waiting."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading


class ManualClock:
    """Stands in for the module `time` (`time`, `monotonic`, `perf_counter`, `sleep`) wherever code takes a clock or a test patches one in.

    `sleep` moves the clock on by itself and notes how long; `sleep_async` waits until `advance` has gone that far. Seconds.
    """

    def __init__(self, start_s: float = 1_000_000_000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self.sleeps_s: list[float] = []

    def time(self) -> float:
        """Now."""
        with self._lock:
            return self._now_s

    monotonic = time
    perf_counter = time

    def sleep(self, seconds_s: float) -> None:
        """Go on at once, that much later."""
        with self._lock:
            self.sleeps_s.append(seconds_s)
            self._now_s += max(0.0, seconds_s)

    async def sleep_async(self, seconds_s: float) -> None:
        """Wait until the clock was advanced that far."""
        self.sleeps_s.append(seconds_s)
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self.time() + seconds_s, next(self._numbers), future))
        await future

    def advance(self, seconds_s: float) -> None:
        """Move on, and wake in order who waited until then. Call it from the loop's thread where something waits."""
        if seconds_s < 0:
            raise ValueError(f"a clock does not go back ({seconds_s} s)")
        with self._lock:
            self._now_s += seconds_s
        while self._waiting and self._waiting[0][0] <= self._now_s:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
