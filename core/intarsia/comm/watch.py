"""Seeing from the host that a collective on a device does not finish, and saying whom it waits for."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from intarsia.comm.group import ProcessGroupCommunicator
    from intarsia.errors import DistributedError

logger = logging.getLogger("intarsia.comm")

# Later than our own limit: the process group's watchdog ends the process without saying who is missing.
MARGIN_S = 60.0


class Watcher:
    """Asks after the ends of device calls in the order in which they began, from a thread of its own; one for the world and all its parts.

    The first that is not over within its group's `timeout_s` is told as any failed call is: in the log, and by `error`, which every later call raises. The groups are aborted, so that
    the host's wait for the device ends. Where the driver does not let a thread ask while another captures a graph, the process group's own watchdog is all there is.
    """

    def __init__(self) -> None:
        self.error: DistributedError | None = None
        self.groups: list[ProcessGroupCommunicator] = []
        self._calls: collections.deque[tuple[Any, ProcessGroupCommunicator, dict[str, Any], float]] = collections.deque()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, comm: ProcessGroupCommunicator, event: Any, record: dict[str, Any]) -> None:
        """Watch for `event`, the end of `record` in `comm`. The event may be recorded again before it is over: that is waited for then."""
        if self._stopped.is_set():
            return
        self._calls.append((event, comm, dict(record), time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="intarsia-watcher", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and forget all calls."""
        self._stopped.set()
        self._calls.clear()

    def look(self) -> bool:
        """Forget what is over; whether everything is in time."""
        while self._calls:
            event, comm, record, began = self._calls[0]
            if not event.query():
                late = time.monotonic() - began > comm.timeout_s
                if late:
                    self._report(comm, record)
                return not late
            self._calls.popleft()
        return True

    def _run(self) -> None:
        # A failing device is the host's to report.
        with contextlib.suppress(RuntimeError, IndexError):
            if _may_ask():
                while not self._stopped.wait(min([1.0, *(group.timeout_s / 10 for group in self.groups)])) and self.look():
                    pass
        self.stop()

    def _report(self, comm: ProcessGroupCommunicator, record: dict[str, Any]) -> None:
        self.error = comm._failed(record, RuntimeError("the device has not finished it"))
        logger.error("%s", self.error)
        for group in self.groups:
            backend = group.device_backend()
            if backend is not None:
                with contextlib.suppress(RuntimeError):
                    backend.abort()


def _may_ask() -> bool:
    """Let this thread ask after events while another captures a graph, whatever its mode of capture."""
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")
        relaxed = ctypes.c_int(2)
        return bool(runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed)) == 0)
    except (OSError, AttributeError):
        return False
