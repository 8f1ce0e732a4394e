"""A process that ends with this one, as its starter has it. The process itself calls `lifeline.hold`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any


class Child:
    """A process of `command`, to which `--lifeline FD` is added. It leads a group of its own (Ctrl-C at the terminal is the starter's), which ends when this process does, or when the process does.

    `on_end(status)` is called once, on a thread of its own, when all of them have ended. Further settings are those of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], on_end: Callable[[int], None], *, pass_fds: Sequence[int] = (), **settings: Any) -> None:
        line, self._hold = os.pipe()
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [*command, "--lifeline", str(line)], pass_fds=(*pass_fds, line), start_new_session=True, **settings
            )
        except BaseException:
            os.close(self._hold)
            raise
        finally:
            os.close(line)
        self._on_end, self._guard = on_end, threading.Lock()
        self._thread = threading.Thread(target=self._wait, name=f"wait-{self.process.pid}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End it and its group."""
        with self._guard:  # between its end and its burial the number is still its own
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most so long."""
        self._thread.join(timeout_s)

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()  # what it has started and left behind
        with self._guard:
            status = self.process.wait()
            os.close(self._hold)
        self._on_end(status)


def status_text(status: int) -> str:
    """How a process has ended, in words."""
    if status >= 0:
        return f"exit code {status}"
    hint = ", out of memory or killed by hand" if -status == signal.SIGKILL else ""
    # Signals of real time have numbers alone, but for the first and the last.
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    return f"{name}{hint}"
