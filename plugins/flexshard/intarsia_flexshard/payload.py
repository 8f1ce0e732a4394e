"""What a bucket sends, and how whole parameters come out of what arrives.

A payload knows the wire: how many elements of which dtype each rank hands out (`counts`, `dtype`), this rank's part (`wire`), and how much memory what arrives
takes (`whole_bytes`). The runtime owns streams, buffers and collectives and calls, in this order:

    bind(buffer)    once, and again when the bucket gets other memory: make the model's parameters views of it
    encode()        before the first gather after the masters have changed
    send()          before each gather: returns `wire`, filled
    (the gather of `wire` into `arrival`)
    decode()        when it has arrived, before anybody reads
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from intarsia.contracts import Optimizer
from intarsia.layout import slices
from torch import Tensor, nn

from intarsia_flexshard.plan import Geometry


class Payload(Protocol):
    """See the module's text. Stability: provisional."""

    counts: tuple[int, ...]
    dtype: torch.dtype
    whole_bytes: int
    staged_bytes: int
    arrival: Tensor
    reads: list[Tensor]
    """What products read of each parameter: itself, or its float8."""

    def bind(self, buffer: Tensor, staging: Tensor) -> None:
        """Use `buffer` (1-D uint8, `whole_bytes`) for the whole parameters; `staging` (`staged_bytes`) is free between a gather's begin and `decode`."""

    def encode(self) -> None:
        """The masters have changed."""

    def encode_values(self) -> None:
        """The masters have changed, and the optimizer has written what `wire_views` gave."""

    def wire_views(self) -> Any:
        """What an optimizer needs to write the wire while it updates the masters (see `intarsia_optimizers.wires`); None: there is nothing for it to write."""

    def send(self) -> Tensor:
        """This rank's part of the gather, 1-D, `counts[rank]` elements of `dtype`."""

    def decode(self) -> None:
        """Bring what has arrived to where the parameters are."""

    def poison(self) -> None:
        """Make every use of the whole parameters read NaN until they are gathered again."""


def step_quantising(
    optimizer: Optimizer, factor: Any, names: Sequence[str], payloads: Sequence[Payload], sums: Any = None
) -> list[Payload]:
    """One update of `names`, with gradients that the optimizer adds itself if there are `sums`. Returns the payloads whose wires the optimizer has written."""
    wires = [(payload, views) for payload in payloads if (views := payload.wire_views()) is not None]
    step = getattr(optimizer, "step_quantising", None)
    if step is None or not (wires or sums):
        optimizer.step(factor, names)
        return []
    given = [views for _, views in wires]
    written = step(factor, names, given, sums) if sums else step(factor, names, given)
    return [payload for payload, views in wires if any(views is each for each in written)]


class PlainPayload:
    """The masters' values in the compute dtype.

    Contiguous members are views of what the gather has written; the others are copied out of it. `master` is this rank's shard; where it has the compute dtype it
    is sent as it is, else it is cast into `cast` (1-D, the shard's size, on the device of the gather) first.
    """

    def __init__(
        self, geometry: Geometry, master: Tensor, cast: Tensor | None, parameters: Sequence[nn.Parameter], dtype: torch.dtype
    ) -> None:
        self.counts, self.dtype = geometry.counts, dtype
        self._geometry, self._master, self._cast, self._parameters = geometry, master, cast, list(parameters)
        self.reads: list[Tensor] = list(parameters)
        # Where nothing is contiguous nothing needs to stay of what arrives.
        self._keeps_arrival = any(start is not None for start in geometry.starts)
        arrival = geometry.total if self._keeps_arrival else 0
        self.whole_bytes = (arrival + geometry.copied) * dtype.itemsize
        self.staged_bytes = 0 if self._keeps_arrival else geometry.total * dtype.itemsize
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def bind(self, buffer: Tensor, staging: Tensor) -> None:
        """See `Payload.bind`."""
        geometry = self._geometry
        values = buffer[: self.whole_bytes].view(self.dtype)
        self.arrival = values[: geometry.total] if self._keeps_arrival else staging[: self.staged_bytes].view(self.dtype)
        copies = values[geometry.total if self._keeps_arrival else 0 :]
        self._sources, self._targets = [], []
        for member, parameter in enumerate(self._parameters):
            shape, start, copy = geometry.shapes[member], geometry.starts[member], geometry.copies[member]
            if start is not None:
                parameter.data = self.arrival[start : start + math.prod(shape)].view(shape)
                continue
            assert copy is not None
            whole = copies[copy : copy + math.prod(shape)].view(shape)
            parameter.data = whole
            for piece in geometry.pieces(member):
                self._sources.append(self.arrival[piece.offset : piece.offset + piece.box.numel].view(piece.box.size))
                self._targets.append(whole[slices(piece.box)])

    def encode(self) -> None:
        """Nothing: the masters are cast when they are sent."""

    encode_values = encode

    def wire_views(self) -> None:
        """Nothing: see `encode`."""

    def send(self) -> Tensor:
        """See `Payload.send`."""
        if self._cast is None:
            return self._master
        return self._cast.copy_(self._master, non_blocking=True)

    def decode(self) -> None:
        """See `Payload.decode`."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)

    def poison(self) -> None:
        """See `Payload.poison`."""
        for parameter in self._parameters:
            parameter.data.fill_(math.nan)
