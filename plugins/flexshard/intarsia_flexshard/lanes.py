"""The streams of a device: one computes, one gathers, one reduces, one copies to and from the host. On a CPU there is one order of things, and nothing to do here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Observer(Protocol):
    """Who is told of phases (`intarsia_flexshard.timeline`): those of the computing stream are entered and left, one inside the other; those beside it begin and end on the current stream."""

    def enter(self, phase: str, name: str) -> None:
        """The computing stream begins a phase of a bucket."""

    def leave(self, phase: str, name: str) -> None:
        """It has ended."""

    def clear(self) -> None:
        """Every phase of the computing stream has ended."""

    def begin(self, phase: str, name: str) -> None:
        """A phase begins on the current stream."""

    def end(self, phase: str, name: str) -> None:
        """All of it is on the current stream."""


class Lanes:
    """Streams of `device`, and switching between them: after `enter(stream)` work goes there, until `leave`. On a CPU `on_device` is False, events are None and every method does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.compute: Any = None
        self.gather: Any = None
        self.reduce: Any = None
        self.host: Any = None
        self.observer: Observer | None = None
        # Called for every bucket: no question and no level of calls more than it takes.
        self.enter: Callable[[Any], None] = torch.cuda.set_stream if self.on_device else _nothing
        if self.on_device:
            # High priority: what is waited for goes before what waits.
            self.gather, self.reduce = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
            self.host = torch.cuda.Stream(device)
            self.begin()

    def begin(self) -> None:
        """The current stream is the one that computes; the others follow it from here."""
        if self.on_device:
            self.compute = torch.cuda.current_stream()

    def follow_compute(self) -> None:
        """What is gathered from now on comes after what was computed so far."""
        if self.on_device:
            self.gather.wait_stream(self.compute)

    def fork(self) -> None:
        """What is gathered and reduced from now on comes after what was computed so far."""
        if self.on_device:
            self.gather.wait_stream(self.compute)
            self.reduce.wait_stream(self.compute)

    def join(self) -> None:
        """What is computed from now on comes after everything gathered and reduced so far."""
        if self.on_device:
            self.compute.wait_stream(self.gather)
            self.compute.wait_stream(self.reduce)

    def end_spans(self) -> None:
        """Every phase of the computing stream that is observed has ended."""
        if self.observer is not None:
            self.observer.clear()

    def event(self) -> Any:
        """A new event, None on a CPU."""
        return torch.cuda.Event() if self.on_device else None

    def leave(self) -> None:
        """Work goes to the stream that computes."""
        self.enter(self.compute)


def _nothing(stream: Any) -> None:
    """A CPU has no streams."""
