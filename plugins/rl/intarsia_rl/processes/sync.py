"""A process for callers without an event loop: rank 0 of a trainer and its controller."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Mapping
from typing import Any

from intarsia_rl.contracts import Process, ProcessLauncher


class BlockingProcess:
    """A started process whose calls block. Made by `start`. An event loop runs in a thread of its own until `stop`. Stability: provisional."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="processes", daemon=True)
        self._thread.start()
        self._process: Process
        self._death: concurrent.futures.Future[str]

    @classmethod
    def start(
        cls, launcher: ProcessLauncher, name: str, service: str, arguments: Mapping[str, Any], threads: int | None = None
    ) -> BlockingProcess:
        """See ProcessLauncher.start; what it raises is raised here."""
        made = cls()
        try:
            made._process = made._wait(launcher.start(name, service, arguments, threads))
        except BaseException:
            made._end()
            raise
        made._death = asyncio.run_coroutine_threadsafe(made._process.died(), made._loop)
        return made

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """See Process.call. KeyboardInterrupt cancels the call there, as TimeoutError does."""
        return self._wait(self._process.call(method, *arguments, timeout_s=timeout_s))

    def on_message(self, callback: Callable[[str, Any], None]) -> None:
        """See Process.on_message; the callback runs in the thread of the loop."""
        self._loop.call_soon_threadsafe(self._process.on_message, callback)

    @property
    def dead(self) -> str | None:
        """Why it has ended without `stop`; None where it has not."""
        return self._death.result() if self._death.done() and not self._death.cancelled() else None

    def stop(self, grace_s: float = 5.0) -> None:
        """End it: asked, then killed. May be called twice."""
        if self._loop.is_closed():
            return
        try:
            self._wait(self._process.stop(grace_s))
        finally:
            self._end()

    def _wait(self, call: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end(self) -> None:
        """End the loop and its thread."""

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
