"""Calls over a connection: the side that calls (`ConnectedProcess`) and the side that serves (`serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from intarsia.errors import DistributedError, IntarsiaError, PluginError
from intarsia.plugins import import_reference, verify_child

from intarsia_rl.contracts import ProcessDied
from intarsia_rl.processes.codec import CodecError, MessageTooLarge
from intarsia_rl.processes.failures import RemoteError, error_of, plain_error
from intarsia_rl.processes.wire import CLOSED, Connection, ConnectionLost

LINGER_S = 2.0
"""How long a process may take to end after its connection did, before it is killed."""

READ_S = 60.0
"""How long what a process said before its end may be on its way here: longer only where somebody else holds its connection."""

# ---------------------------------------------------------------- the calling side


class ConnectedProcess:
    """A Process at the other end of a connection, for launchers to make.

    `ended` is awaited once and gives why the process ended, in words; `kill` ends it without asking, and does nothing to one that has ended. `pid` is its number where it is on this machine.
    """

    def __init__(self, name: str, connection: Connection, ended: Awaitable[str], kill: Callable[[], None], pid: int | None = None) -> None:
        self.name, self.pid = name, pid
        self._connection, self._kill = connection, kill
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._listeners: list[Callable[[str, Any], None]] = []
        self._unheard: list[tuple[str, Any]] = []
        self._stopping = False
        self._lost = ""
        self._over, self._drained = asyncio.Event(), asyncio.Event()
        self._reason: str | None = None
        self._tasks = {asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._follow(ended))}

    async def begin(self, service: str, arguments: Mapping[str, Any], timeout_s: float) -> None:
        """Have it make its service. What that raises there is raised here; DistributedError where it takes too long, or the process dies."""
        try:
            await self._ask(["start", 0, service, dict(arguments)], 0, timeout_s, "starting")
        except ProcessDied as error:
            raise DistributedError(f"{self.name} ended while it started: {error.reason}") from error
        except (IntarsiaError, RemoteError) as error:
            error.args = (f"{self.name} cannot start: {error}",)
            raise
        except TimeoutError as error:
            raise DistributedError(f"{self.name} did not start within {timeout_s:g} s (start_s of its launcher).") from error

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """See Process. TimeoutError after `timeout_s`; CodecError for arguments that cannot travel. A call that is cancelled, or out of time, is cancelled there."""
        number = next(self._numbers)
        return await self._ask(["call", number, method, list(arguments)], number, timeout_s, method)

    def on_message(self, callback: Callable[[str, Any], None]) -> None:
        """See Process. What came before anybody listened is told to the first who does."""
        self._listeners.append(callback)
        unheard, self._unheard = self._unheard, []
        for kind, value in unheard:
            callback(kind, value)

    async def stop(self, grace_s: float = 5.0) -> None:
        """See Process."""
        self._stopping = True
        if not self._over.is_set() and grace_s > 0:
            with contextlib.suppress(ConnectionLost, TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._connection.send(["stop"])
                    await self._over.wait()
        if not self._over.is_set():
            self._kill()
        await self._over.wait()
        self._connection.close()

    async def died(self) -> str:
        """See Process."""
        await self._over.wait()
        if self._stopping:
            await asyncio.Event().wait()  # it was stopped: nobody's business
        assert self._reason is not None
        return self._reason

    async def _ask(self, message: list[Any], number: int, timeout_s: float | None, what: str) -> Any:
        if self._reason is not None:
            raise ProcessDied(self.name, self._reason)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self._connection.send(message)
                except ConnectionLost:
                    await self._over.wait()
                result = await answer
                answered = True
                return result
        except TimeoutError:
            raise TimeoutError(f"no answer of {self.name} in {timeout_s:g} s") from None
        finally:
            del self._waiting[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, also where nobody waits for it any more
            elif not answered and self._reason is None:
                self._aside(self._cancel(number))

    async def _cancel(self, number: int) -> None:
        with contextlib.suppress(ConnectionLost):
            await self._connection.send(["cancel", number])

    def _aside(self, call: Any) -> None:
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self) -> None:
        """Hand out answers and messages until the connection ends; a process that outlives its connection is killed."""
        try:
            while True:
                self._take(await self._connection.receive())
        except ConnectionLost as error:
            self._lost = str(error)
        finally:
            self._drained.set()
        if self._lost == CLOSED:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._over.wait()
        if not self._over.is_set():
            self._kill()

    def _take(self, message: Any) -> None:
        match message:
            case ["result", number, value]:
                self._settle(number, value, None)
            case ["error", number, plain]:
                self._settle(number, None, error_of(plain))
            case ["message", kind, value]:
                for listener in self._listeners:
                    listener(kind, value)
                if not self._listeners:
                    self._unheard.append((kind, value))
            case _:
                raise ConnectionLost("it sent what is no message")

    def _settle(self, number: int, value: Any, error: Exception | None) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

    async def _follow(self, ended: Awaitable[str]) -> None:
        """Fail all calls when the process has ended, and all that it said before has been heard."""
        reason = await ended
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                await self._drained.wait()
        if self._lost not in ("", CLOSED):
            reason = f"{self._lost}; {reason}"
        self._reason = "it was stopped" if self._stopping else reason
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ProcessDied(self.name, self._reason))
        self._over.set()


# ---------------------------------------------------------------- the serving side


async def serve(connection: Connection) -> None:
    """Prove that this process holds the starter's plugins, make the service that the first message names, and answer calls until the other side asks to stop or is gone (ConnectionLost).

    A service may have `connected(send)`, which is given `send(kind, value)` for what it says unasked (in order with its answers), and `async close()`, which is awaited at the end.
    """
    match await connection.receive():
        case ["start", number, str(reference), dict(arguments)]:
            pass
        case _:
            raise ConnectionLost("the first message did not say what to serve")
    try:
        verify_child()
        service = await import_reference(reference)(**arguments)
    except BaseException as error:  # SystemExit as well
        await connection.send(["error", number, plain_error(error)])
        return
    if hasattr(service, "connected"):
        service.connected(lambda kind, value: connection.post(["message", kind, value]))
    await connection.send(["result", number, None])
    calls: dict[int, asyncio.Task[None]] = {}
    try:
        while True:
            match await connection.receive():
                case ["call", int(number), str(method), list(given)]:
                    task = asyncio.ensure_future(answer(connection, service, number, method, given))
                    calls[number] = task
                    task.add_done_callback(functools.partial(forget, calls, number))
                case ["cancel", int(number)]:
                    if number in calls:
                        calls[number].cancel()
                case ["stop"]:
                    break
                case _:
                    raise ConnectionLost("a message that is none")
    finally:
        for task in list(calls.values()):
            task.cancel()
        if calls:
            await asyncio.wait(list(calls.values()), timeout=LINGER_S)
        if hasattr(service, "close"):
            await service.close()


def forget(calls: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
    """A call is through."""
    calls.pop(number, None)


async def answer(connection: Connection, service: Any, number: int, method: str, arguments: list[Any]) -> None:
    """Call a method and send what it gives or raises."""
    try:
        reply = ["result", number, await run(service, method, arguments)]
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return  # by the caller, who does not wait any more
        reply = ["error", number, plain_error(error)]
    except BaseException as error:  # a plugin may raise anything, SystemExit as well; this process serves others, too
        reply = ["error", number, plain_error(error)]
    with contextlib.suppress(ConnectionLost, asyncio.CancelledError):
        try:
            await connection.send(reply)
        except CodecError as error:
            hint = " (message_bytes of the process launcher)" if isinstance(error, MessageTooLarge) else ""
            text = f"the answer to `{method}` cannot be sent: {error}{hint}"
            await connection.send(["error", number, plain_error(PluginError(text))])


async def run(service: Any, method: str, arguments: list[Any]) -> Any:
    """The result of a service's method. PluginError where it has none of that name."""
    if method == "ping":
        return None
    function = None if method.startswith("_") else getattr(service, method, None)
    if not inspect.iscoroutinefunction(function):
        raise PluginError(f"{type(service).__name__} has no async method {method!r} to be called from another process.")
    return await function(*arguments)
