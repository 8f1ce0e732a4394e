"""`events.jsonl`: everything that happened in a run, one JSON object a line. Torch-free.

The schema is documented in docs/reference/run-directory.md; SCHEMA goes up when a field changes its meaning.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.contracts import MetricSink
from intarsia.hooks import undisturbed

SCHEMA = 1
FILE = "events.jsonl"

logger = logging.getLogger("intarsia.train")


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite become null, unknown objects their text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


class EventLog:
    """Appends events to a run directory and hands them to sinks. Each line is flushed at once, so that a killed process loses none.

    Usable from several threads. A sink that raises is switched off and reported once. A log that cannot be written (a full disk) is reported once,
    and the run goes on: it is the checkpoint that must not be lost.
    """

    def __init__(self, directory: Path, sinks: Sequence[tuple[str, MetricSink]] = ()):
        self._path = directory / FILE
        self._sinks = list(sinks)
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._broken = False

    def add_sink(self, name: str, sink: MetricSink) -> None:
        """Hand further events to `sink` as well."""
        self._sinks.append((name, sink))

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one event; returns it."""
        record = {"schema": SCHEMA, "event": event, "time_s": time.time(), "elapsed_s": time.monotonic() - self._start}
        record |= {name: plain(value) for name, value in fields.items()}
        with self._lock:
            if not self._broken:
                try:
                    _append(self._path, record)
                except OSError as error:
                    self._broken = True
                    logger.error("Cannot write %s: %s. The run goes on without it.", self._path, error.strerror or error)
            for name, sink in list(self._sinks):
                self._guard(name, sink, functools.partial(sink.write, record))
        return record

    def _guard(self, name: str, sink: MetricSink, action: Callable[[], None]) -> None:
        _, error, _ = undisturbed(action)  # a sink that seeds or draws must not change the run's numbers
        if error is not None:
            self._sinks.remove((name, sink))
            logger.error("Metric sink %s failed and is switched off: %s: %s", name, type(error).__name__, error)

    def close(self) -> None:
        """Close the sinks."""
        for name, sink in list(self._sinks):
            self._guard(name, sink, sink.close)
        self._sinks.clear()


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line in one write. A line that a killed process left unfinished is ended first."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())


def append_event(directory: Path, event: str, **fields: Any) -> None:
    """Add one event to a run directory from outside the run (generation, evaluation of a finished run)."""
    EventLog(directory).write(event, **fields)
