"""Weights over TCP: every trainer rank serves the boxes that it holds, from a copy of the published version; a reader asks each rank for what it needs.

Nothing but the published version ever leaves: a rank that does not have it any more says so, and a reader that loses a connection asks again for all that it had asked for. Who
connects proves that it knows the run's token, which is part of the location and never sent. Weights are not encrypted: use it in networks that you trust.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from intarsia.contracts import Box
from torch import Tensor

from intarsia_rl.weights.config import SocketConfig
from intarsia_rl.weights.held import Held
from intarsia_rl.weights.reading import Source, gather
from intarsia_rl.weights.server import Server
from intarsia_rl.weights.serving import Serving


class Socket(Serving):
    """See `intarsia_rl.contracts.WeightTransport`. The entry's target."""

    name: ClassVar[str] = "socket"
    reader: ClassVar[str] = "intarsia_rl.weights.socket:read"
    advice: ClassVar[str] = "Choose another weights.port (0 takes any that is free) or weights.host."
    _config: SocketConfig

    def _open(self, host: str, port: int, held: Held) -> Server:
        return Server(host, port, self._token, held.described, self._config.versions, held.mesh.device.type == "cuda")

    def _port(self, local_rank: int) -> int:
        return self._config.port + local_rank if self._config.port else 0


def read(
    location: Mapping[str, Any], names: Sequence[str], boxes: Mapping[str, Sequence[Box]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of whole tensors, or of the `boxes` of those names that it has, one after the other and each of its box's shape, on the CPU.

    DistributedError where a rank cannot be reached in the attempts that the location allows, or does not keep the version any more.
    """
    sources = [Source(host, port, location) for host, port in location["servers"]]
    yield from gather(sources, names, boxes)
    for source in sources:
        source.close()
