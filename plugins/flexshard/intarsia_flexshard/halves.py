"""The low halves of split masters, which only the optimizer reads, wait in the host's memory between updates (`offload=low`).

They leave after a bucket's update, are gone from the device by the time when activations are at their most (as the last bucket's forward begins), and come back under
the second half of the backward pass, or as a bucket is left that is updated within it. Copies follow, and are waited for by, the stream that is current.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from intarsia_flexshard.lanes import Lanes


class WaitingHalves:
    """The flat `low` of one bucket and its copy on the host. `low` keeps its identity: its storage is emptied and filled again."""

    def __init__(self, low: Tensor, lanes: Lanes) -> None:
        self._low, self._lanes = low, lanes
        self._host = torch.empty(low.shape, dtype=low.dtype, pin_memory=lanes.on_device)
        self._moved = lanes.event()
        self.place: Literal["here", "leaving", "gone", "coming"] = "here"

    def leave(self) -> None:
        """The update is over: begin to copy to the host."""
        self.arrive()
        self._copy(self._host, self._low)
        self.place = "leaving"

    def drop(self) -> None:
        """Give the device's memory back, if a copy is on the host."""
        if self.place == "leaving":
            self._wait()
            self._low.untyped_storage().resize_(0)
            self.place = "gone"

    def come(self) -> None:
        """Begin to copy back."""
        if self.place == "gone":
            self._low.untyped_storage().resize_(self._low.numel() * self._low.element_size())
            self._copy(self._low, self._host)
            self.place = "coming"

    def arrive(self) -> None:
        """Whatever is computed from now on finds the halves on the device."""
        self.come()
        if self.place == "coming":
            self._wait()
        self.place = "here"

    def _copy(self, target: Tensor, source: Tensor) -> None:
        lanes = self._lanes
        before = torch.cuda.current_stream() if lanes.on_device else None
        if before is not None:
            lanes.host.wait_stream(before)
        lanes.enter(lanes.host)
        target.copy_(source, non_blocking=True)
        if lanes.on_device:
            self._moved.record(lanes.host)
        lanes.enter(before)

    def _wait(self) -> None:
        if self._lanes.on_device:
            torch.cuda.current_stream().wait_event(self._moved)
