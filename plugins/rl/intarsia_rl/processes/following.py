"""Who runs: a process that dies or stands still cannot say which of its calls did it, unless it has said before whose turn it was."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="")
"""In whose name a task runs, and every task that it starts."""

Tell = Callable[[str], None]


def follow(tell: Tell) -> None:
    """From now on have `tell(name)` called whenever a task of this loop that is made in a context with `WHO` goes on, and `tell("")` when it waits again."""

    def make(loop: asyncio.AbstractEventLoop, call: Any, **values: Any) -> asyncio.Task[Any]:
        name = WHO.get()
        return asyncio.Task(_followed(call, name, tell) if name else call, loop=loop, **values)

    asyncio.get_running_loop().set_task_factory(make)


async def _followed(call: Coroutine[Any, Any, Any], name: str, tell: Tell) -> Any:
    return await _Followed(call, name, tell)


class _Followed:
    """A coroutine that tells of every stretch that it runs."""

    def __init__(self, call: Coroutine[Any, Any, Any], name: str, tell: Tell) -> None:
        self._call, self._name, self._tell = call, name, tell

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self._call.send
        value: Any = None
        while True:
            self._tell(self._name)
            try:
                waits_for = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self._tell("")
            try:
                value, resume = (yield waits_for), self._call.send
            except GeneratorExit:
                self._call.close()
                raise
            except BaseException as error:
                value, resume = error, self._call.throw
