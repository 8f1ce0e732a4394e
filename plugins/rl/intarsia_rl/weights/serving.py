"""The trainer's side of transports whose ranks serve what they hold: each keeps a copy of its own boxes of the published versions, and threads of its own give readers of it."""

from __future__ import annotations

import abc
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from intarsia.errors import UsageError
from torch import Tensor

from intarsia_rl.contracts import WeightVersion
from intarsia_rl.weights.config import ServedConfig
from intarsia_rl.weights.held import Held, Piece
from intarsia_rl.weights.server import Kept, Server


class Serving(abc.ABC):
    """See `intarsia_rl.contracts.WeightTransport`. `name` is the entry's, `advice` what helps where a rank cannot listen; `_open` makes this rank's server."""

    name: ClassVar[str]
    advice: ClassVar[str]
    reader: ClassVar[str]

    def __init__(self, config: ServedConfig, directory: str | os.PathLike[str]) -> None:
        if config.versions < 2:
            raise UsageError(f"weights.versions is {config.versions}; it must be at least 2: one is read while the next is written.")
        if config.attempts < 1 or config.timeout_s <= 0:
            raise UsageError(f"weights.attempts is {config.attempts} and weights.timeout_s {config.timeout_s}; both must be positive.")
        self._config, self._directory = config, Path(directory)
        self._held: Held | None = None
        self._server: Server | None = None
        self._published: WeightVersion | None = None
        self._retired: list[int] = []
        self._servers: list[list[Any]] = []
        self._token = ""

    def publish(self, version: int, parts: Mapping[str, Any]) -> WeightVersion | None:
        """Copy this rank's boxes aside and serve them. See `WeightTransport.publish`."""
        held = self._held = self._held or Held(parts)
        server = self._server or self._start(held)
        answer = held.world.broadcast_json(self._decide(version) if held.world.rank == 0 else {}, what="version of weights")
        if "problem" in answer:
            raise UsageError(answer["problem"])
        for each in answer["retired"]:
            server.retire(each)
        if answer["same"]:
            return self._published
        kept = server.memory(held.boxes())
        sums = held.copy_into(lambda piece: _target(kept, piece))
        # Before the others know that all have copied: a reader may ask as soon as rank 0 does.
        server.offer(kept, version)
        digests = held.digests(sums)
        if held.world.rank:
            return None
        location = {
            "version": version,
            "servers": self._servers,
            "token": self._token,
            "attempts": self._config.attempts,
            "timeout_s": self._config.timeout_s,
        }
        self._published = WeightVersion(version, self.name, location, digests, held.dtypes(), held.shapes())
        return self._published

    def retire(self, version: int) -> None:
        """Serve the version no more. What matters is the call on rank 0; the others hear of it as the next version is published."""
        if self._held is None or self._held.world.rank:
            return
        self._retired.append(version)
        if self._server is not None:
            self._server.retire(version)
        if self._published is not None and self._published.version == version:
            self._published = None

    def close(self) -> None:
        """Serve nothing any more."""
        if self._server is not None:
            self._server.close()
        self._server, self._published, self._servers = None, None, []

    @abc.abstractmethod
    def _open(self, host: str, port: int, held: Held) -> Server:
        """Begin to listen on this rank; `host` is "" for all of its addresses. OSError where that is not possible; UsageError where the settings do not fit this rank."""

    def _port(self, local_rank: int) -> int:
        """Where a rank listens; 0: on any port that is free."""
        return 0

    def _decide(self, version: int) -> dict[str, Any]:
        """On rank 0."""
        newest = None if self._published is None else self._published.version
        if newest is not None and version < newest:
            return {"problem": f"Version {version} of the weights cannot be published after version {newest}."}
        retired, self._retired = self._retired, []
        return {"same": version == newest, "retired": retired}

    def _start(self, held: Held) -> Server:
        """Begin to listen on every rank, and tell where. UsageError, on every rank, where one cannot."""
        self._token = held.world.broadcast_json(secrets.token_hex(32) if held.world.rank == 0 else None, what="token")
        host, problem = self._config.host or own_address(), ""
        port = self._port(int(os.environ.get("LOCAL_RANK", held.world.rank)))
        try:
            self._server = self._open("" if self._config.host else host, port, held)
        except OSError as error:
            problem = f"trainer rank {held.world.rank} cannot listen on {host}:{port}: {error.strerror or error}. {self.advice}"
        except UsageError as error:
            problem = str(error)
        place = [host, self._server.port if self._server is not None else 0, problem]
        self._servers = held.world.gather_json(place, what="addresses of weights")
        problems = [problem for _, _, problem in self._servers if problem]
        if problems:
            self.close()
            raise UsageError(f"weights={self.name}: {problems[0]}")
        self._servers = [[host, port] for host, port, _ in self._servers]
        assert self._server is not None
        return self._server


def _target(kept: Kept, piece: Piece) -> Tensor:
    return next(values for box, values in kept.values[piece.name] if box == piece.box)


def own_address() -> str:
    """The address of the interface by which MASTER_ADDR is reached; 127.0.0.1 where it is this machine or not known."""
    master = os.environ.get("MASTER_ADDR", "")
    if master in ("", "localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, int(os.environ.get("MASTER_PORT", "1")), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # Chooses a route and sends nothing.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
