"""Asking a run to stop: SIGTERM and SIGINT set a flag that the step loop reads. Torch-free."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

# Environment variable with the process id of `intarsia train --processes`: a rank whose launcher is gone stops.
LAUNCHER = "INTARSIA_LAUNCHER"


class StopSignals:
    """While active, the first SIGTERM or SIGINT asks for a stop, and a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[int, Any] = {}
        self._launcher = int(os.environ.get(LAUNCHER, "0"))

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else.
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def asked(self) -> str | None:
        """Why the run should stop, or None."""
        if self.reason is None and self._launcher and os.getppid() != self._launcher:
            self.reason = "the launcher is gone"
        return self.reason
