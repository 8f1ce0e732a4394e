"""The process launcher `local_processes`: processes on this machine."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intarsia.plugins import child_environment
from intarsia.train.signals import LAUNCHER

from intarsia_rl.processes.calls import ConnectedProcess
from intarsia_rl.processes.child import Child, status_text
from intarsia_rl.processes.config import LocalProcessesConfig
from intarsia_rl.processes.failures import cut
from intarsia_rl.processes.wire import Connection

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that say which rank a process is: those that a rank starts are none."""

LINES = 40
"""How many of a process's last lines are shown when it dies."""

MOST_LOG_BYTES = 64 << 20
"""Largest log file of one process; what comes later is left out."""

READ_S = 60.0
"""How long a dead process's last lines may be on their way here: longer only where something that it left behind never stops printing."""


class LocalProcesses:
    """Starts processes on this machine. Each ends when this one does, with what it has started itself (`Child`)."""

    def __init__(self, config: LocalProcessesConfig | None = None) -> None:
        self.config = config or LocalProcessesConfig()

    async def start(self, name: str, service: str, arguments: Mapping[str, Any], threads: int | None = None) -> ConnectedProcess:
        """See ProcessLauncher. What the service raises when it is made is raised here; DistributedError where the process dies or takes longer than `start_s`."""
        limit, folder, environment = self.config.message_bytes, self.config.log_folder, environment_of(threads)
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        output = Output(read, None if folder is None else Path(folder) / f"{name.replace('/', '-')}.log")
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "intarsia_rl.processes", name]
        command += ["--inherited", str(theirs.fileno()), "--limit", str(limit)]
        try:
            end = _End(output)
            child = Child(command, end, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL, stdout=write, stderr=write)
        except BaseException:
            for each in (ours, theirs):
                each.close()
            os.close(write)
            output.last()  # it ends as nobody can write any more
            raise
        theirs.close()
        os.close(write)
        process = ConnectedProcess(name, await Connection.over(ours, limit), end.reason, child.kill, child.process.pid)
        try:
            await process.begin(service, arguments, self.config.start_s)
        except BaseException:
            await process.stop(0.0)
            raise
        return process


def environment_of(threads: int | None) -> dict[str, str]:
    """The environment of a process: this one's, without what makes it a rank, with the same plugins asked for."""
    kept = {key: value for key, value in os.environ.items() if key not in OF_RANKS and not key.startswith("TORCHELASTIC_")}
    for key in (LAUNCHER, "INTARSIA_RENDEZVOUS"):
        kept.pop(key, None)
    if threads is not None:
        kept |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**kept, **child_environment(), "PYTHONUNBUFFERED": "1"}


class _End:
    """What a process's end comes to: the future `reason`, in words."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._loop = asyncio.get_running_loop()
        self.reason: asyncio.Future[str] = self._loop.create_future()

    def __call__(self, status: int) -> None:
        """It has ended. Called by another thread than the loop's."""
        reason = self._words(status)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks
            self._loop.call_soon_threadsafe(self._tell, reason)

    def _tell(self, reason: str) -> None:
        if not self.reason.done():
            self.reason.set_result(reason)

    def _words(self, status: int) -> str:
        reason = f"it {'ended with' if status >= 0 else 'was ended by'} {status_text(status)}"
        last = self._output.last()
        return f"{reason}; its last words:\n{last}" if status and last else reason


class Output:
    """What a process prints: the last lines are kept; all of it goes to a file where one is asked for."""

    def __init__(self, descriptor: int, path: Path | None) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=LINES)
        self._descriptor, self._path = descriptor, path
        # Closing one end of it asks the reader to say when nothing is left: whoever else still holds the process's output keeps it from ending.
        self._asked, self._ask = os.pipe()
        self._is_read = threading.Event()
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def last(self) -> str:
        """The last lines, once the process has ended: all that it wrote has been read. Called once."""
        os.close(self._ask)
        self._is_read.wait(READ_S)
        return "\n".join(f"  | {line}" for line in list(self._lines))

    def _read(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._is_read.set)
            for each in (self._descriptor, self._asked):
                stack.callback(os.close, each)
            log = None
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(open(self._path, "ab"))
            poll = select.poll()
            for each in (self._descriptor, self._asked):
                poll.register(each, select.POLLIN)
            begun, written = b"", 0
            while True:
                if self._descriptor in dict(poll.poll()):
                    if not (chunk := os.read(self._descriptor, 1 << 16)):
                        break
                else:  # asked, and there is nothing more: what it left behind may still print
                    poll.unregister(self._asked)
                    self._keep([begun] if begun else [])
                    begun = b""
                    self._is_read.set()
                    continue
                if log is not None and written < MOST_LOG_BYTES:
                    written += len(chunk)
                    log.write(chunk if written < MOST_LOG_BYTES else b"\n... the rest is left out\n")
                    log.flush()
                *lines, begun = (begun + chunk).split(b"\n")
                self._keep(lines)
                begun = begun[-4096:]
            self._keep([begun] if begun else [])

    def _keep(self, lines: list[bytes]) -> None:
        self._lines.extend(cut(line.decode(errors="replace"), 500) for line in lines[-LINES:])
