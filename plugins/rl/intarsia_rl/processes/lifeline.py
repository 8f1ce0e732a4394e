"""A process ends with the one that started it, however that ends, and takes along all that it has started itself.

The starter holds the writing end of a pipe, and nobody else does: the system closes it when the starter is gone. The process asks the system to kill its whole group at that moment (Linux: the
signal of an asynchronous read, which needs no thread of ours to run, so a process that hangs in C code ends, too). A thread does the same where the system cannot.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading


def hold(line: int) -> None:
    """End this process's group as soon as nobody holds the other end of the pipe `line`. The process must lead its group."""
    if sys.platform == "linux":
        fcntl.fcntl(line, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    # The end that came before this was asked for sends no signal.
    linger(line, 0.0)
    threading.Thread(target=_wait, args=(line,), name="lifeline", daemon=True).start()


def linger(line: int, seconds: float = 2.0) -> None:
    """End this process's group if the starter ends within some seconds. A starter that ends closes its connection a moment before its pipe: a process that left in between would leave behind what
    it has started."""
    poll = select.poll()
    poll.register(line, select.POLLIN | select.POLLHUP)
    if poll.poll(1000 * seconds):
        end_group()


def _wait(line: int) -> None:
    while os.read(line, 1):
        pass
    end_group()


def end_group() -> None:
    """Kill this process and all of its group."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
