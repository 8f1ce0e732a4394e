"""One rank of a mesh whose other ranks do not exist, and a log of what it would have said to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.comm.base import FakeCommunicator, Work
from intarsia.mesh import AXES, full_sizes
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Message:
    """One call: the collective, the mesh axes that its group spans, the group's size, and the bytes that this rank receives in it."""

    call: str
    axes: str
    ranks: int
    received: int
    what: str


class Log:
    """What has been called, in order. `is_inside`: a call is under way, and what it computes is no work of the device.
    `is_alone`: within so many pieces of code that no compiled region fuses."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.is_inside = False
        self.is_alone = 0
        self.listener: Any = None

    def add(self, message: Message) -> None:
        """Note a call."""
        self.messages.append(message)
        if self.listener is not None:
            self.listener(message)


class PlannedCommunicator(FakeCommunicator):
    """A group that writes its calls down."""

    def __init__(self, rank: int, size: int, log: Log, name: str, names: Mapping[str, str]) -> None:
        super().__init__(rank, size, "meta", name)
        self._log, self._names = log, names

    def split(self, groups: Sequence[Sequence[int]], name: str) -> Communicator:
        """See `Communicator.split`."""
        mine = next(list(group) for group in groups if self.rank in group)
        return PlannedCommunicator(mine.index(self.rank), len(mine), self._log, name, self._names)

    def gather_json(self, value: Any, what: str = "") -> list[Any]:
        """Nobody has anything else to say."""
        return [value] * self.size

    def broadcast_json(self, value: Any, root: int = 0, what: str = "") -> Any:
        """See `Communicator.broadcast_json`."""
        return value

    def agree(self, value: Any, what: str) -> None:
        """Nobody disagrees."""

    @contextlib.contextmanager
    def _call(self, call: str, what: str, tensor: Tensor, sizes: Sequence[int], moved: int, **details: Any) -> Iterator[None]:
        before, self._log.is_inside = self._log.is_inside, True
        try:
            yield
        finally:
            self._log.is_inside = before
        if self.size > 1:
            self._log.add(Message(call, self._names.get(self.name, self.name), self.size, moved, what))

    def _pass(self, call: str, tensor: Tensor, peer: int, what: str) -> Work:
        if call == "receive" and self.size > 1:
            self._log.add(Message(call, self._names.get(self.name, self.name), self.size, tensor.nbytes, what))
        return super()._pass(call, tensor, peer, what)


def world(rank: int, sizes: Mapping[str, int]) -> tuple[PlannedCommunicator, Log]:
    """All ranks of a mesh of checked `sizes`, seen from `rank`."""
    full = full_sizes(sizes)
    spans = {axes: "+".join(axis for axis in axes if full[axis] > 1) for axes in (AXES, AXES[1:])}
    # Dispatchers have a group of their own over the ranks of `ep`.
    size = torch.Size([full[axis] for axis in AXES]).numel()
    log = Log()
    return PlannedCommunicator(rank, size, log, "world", {"world": spans[AXES], "stage": spans[AXES[1:]], "dispatch": "ep"}), log
