"""Weights over TCP: every trainer rank serves the boxes that it holds, from a copy of the published version; a reader asks each rank for what it needs.

Nothing but the published version ever leaves: a rank that does not have it any more says so, and a reader that loses a connection asks again for all that it had asked for. Who
connects proves that it knows the run's token, which is part of the location and never sent. Weights are not encrypted: use it in networks that you trust.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from intarsia.contracts import Box
from intarsia.errors import DistributedError, UsageError, did_you_mean
from intarsia.layout import region_numel, slices
from torch import Tensor

from intarsia_rl.contracts import WeightVersion
from intarsia_rl.weights import wire
from intarsia_rl.weights.config import SocketConfig
from intarsia_rl.weights.held import Held, Piece
from intarsia_rl.weights.server import Kept, Server

NAME = "socket"
# Bytes that are asked for at once: the next ones travel while these are copied.
BATCH_BYTES = 2**25


class Socket:
    """See `intarsia_rl.contracts.WeightTransport`. The entry's target."""

    reader: ClassVar[str] = "intarsia_rl.weights.socket:read"

    def __init__(self, config: SocketConfig, directory: str | os.PathLike[str]) -> None:
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
        self._published = WeightVersion(version, NAME, location, digests, held.dtypes(), held.shapes())
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
        host = self._config.host or own_address()
        local = int(os.environ.get("LOCAL_RANK", held.world.rank))
        port, problem = self._config.port + local if self._config.port else 0, ""
        try:
            bound = "" if self._config.host else host
            self._server = Server(bound, port, self._token, held.described, self._config.versions, held.mesh.device.type == "cuda")
        except OSError as error:
            problem = f"trainer rank {held.world.rank} cannot listen on {host}:{port}: {error.strerror or error}"
        place = [host, self._server.port if self._server is not None else 0, problem]
        self._servers = held.world.gather_json(place, what="addresses of weights")
        problems = [problem for _, _, problem in self._servers if problem]
        if problems:
            self.close()
            raise UsageError(f"weights=socket: {problems[0]}. Choose another weights.port (0 takes any that is free) or weights.host.")
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


# ---------------------------------------------------------------- the generator's side


def read(
    location: Mapping[str, Any], names: Sequence[str], boxes: Mapping[str, Sequence[Box]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of whole tensors, or of the `boxes` of those names that it has, one after the other and each of its box's shape, on the CPU.

    DistributedError where a rank cannot be reached in the attempts that the location allows, or does not keep the version any more.
    """
    sources = [_Source(host, port, location) for host, port in location["servers"]]
    with concurrent.futures.ThreadPoolExecutor(max(1, min(len(sources), 16)), "weights-read") as pool, contextlib.ExitStack() as ends:
        for source in sources:
            ends.callback(source.end)
        indices = list(pool.map(_Source.index, sources))
        plan = _Plan(indices)
        wanted = [(name, box) for name in names for box in plan.boxes(name, boxes or {})]
        batches = list(plan.batches(wanted))
        flying = _ask(pool, sources, plan, batches[0]) if batches else []
        for number, batch in enumerate(batches):
            arrived = [future.result() for future in flying]
            flying = _ask(pool, sources, plan, batches[number + 1]) if number + 1 < len(batches) else []
            yield from plan.assemble(batch, arrived)


class _Source:
    """A trainer rank, as a reader sees it."""

    def __init__(self, host: str, port: int, location: Mapping[str, Any]) -> None:
        self._place, self._version, self._token = (host, port), location["version"], location["token"]
        self._attempts, self._timeout_s = location["attempts"], location["timeout_s"]
        self._connection: socket.socket | None = None
        self._ended = False

    def end(self) -> None:
        """Nobody waits for answers any more: a thread that does is woken, and makes no new connection."""
        self._ended, connection = True, self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        """Leave."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def index(self) -> dict[str, Any]:
        """What the rank holds."""
        answer: dict[str, Any] = self._repeat({})[0]
        return answer

    def ask(self, rows: Sequence[tuple[str, Box]]) -> Tensor:
        """The bytes of these boxes, one after the other: 1-D uint8."""
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._repeat({"boxes": [[name, box.start, box.size] for name, box in rows]})[1] if rows else nothing

    def _repeat(self, request: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """One answer, whole, asked for anew where the connection fails."""
        for attempt in range(self._attempts):
            try:
                return self._once({"version": self._version, **request})
            except OSError as error:
                self.close()
                failure = error
                if self._ended:
                    break
                if attempt + 1 < self._attempts:
                    time.sleep(min(2.0, 0.1 * 2**attempt))
        raise DistributedError(
            f"Version {self._version} of the weights cannot be read from the trainer's rank at {self._place[0]}:{self._place[1]}: {failure} "
            f"({self._attempts} attempts). The rank is gone, or this machine cannot reach it: set weights.host to an address that it can."
        )

    def _once(self, request: Mapping[str, Any]) -> tuple[Any, Tensor]:
        if self._connection is None:
            self._connection = socket.create_connection(self._place, self._timeout_s)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.give_proof(self._connection, self._token)
            self._check(wire.receive_json(self._connection))
        wire.send_json(self._connection, request)
        answer = self._check(wire.receive_json(self._connection))
        data = torch.empty(answer.get("bytes", 0), dtype=torch.uint8)
        wire.receive_into(self._connection, data.numpy().data)
        return answer, data

    def _check(self, answer: Any) -> Any:
        if "error" in answer:
            raise DistributedError(
                f"The trainer's rank at {self._place[0]}:{self._place[1]} gives no weights of version {self._version}: {answer['error']}."
            )
        return answer


Batch = list[tuple[str, Box, list[tuple[int, Box]]]]
"""Wanted boxes of tensors, each with the parts that it comes in: (number of the source, box)."""


class _Plan:
    """Which rank has what, and what to ask whom for."""

    def __init__(self, indices: Sequence[Mapping[str, Any]]) -> None:
        self._holders: dict[str, list[tuple[int, Box]]] = {}
        self._described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for number, index in enumerate(indices):
            for name, found in index["index"].items():
                self._holders.setdefault(name, []).extend((number, Box(tuple(start), tuple(size))) for start, size in found)
            for name, (dtype, shape) in index["described"].items():
                self._described[name] = (getattr(torch, dtype), tuple(shape))

    def boxes(self, name: str, boxes: Mapping[str, Sequence[Box]]) -> Sequence[Box]:
        """What is wanted of a tensor."""
        if name not in self._described:
            raise UsageError(f"The published weights have no tensor {name!r}. {did_you_mean(name, self._described)}")
        return boxes[name] if name in boxes else [Box.whole(self._described[name][1])]

    def batches(self, wanted: Sequence[tuple[str, Box]]) -> Iterator[Batch]:
        """In order, with who has which part. DistributedError where a part is nowhere."""
        batch: Batch = []
        size = 0
        for name, box in wanted:
            parts = [(number, common) for number, held in self._holders.get(name, ()) if (common := held.intersect(box)) is not None]
            if region_numel(tuple(part for _, part in parts)) != box.numel:
                raise DistributedError(f"The trainer's ranks do not hold all of {name}.")
            batch.append((name, box, parts))
            size += box.numel * self._described[name][0].itemsize
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def assemble(self, batch: Batch, arrived: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, from what each source has sent."""
        offsets = [0] * len(arrived)
        for name, box, parts in batch:
            dtype = self._described[name][0]
            whole = None
            for number, part in parts:
                length = part.numel * dtype.itemsize
                raw = arrived[number][offsets[number] : offsets[number] + length]
                offsets[number] += length
                # Boxes of other dtypes before it may leave it where its dtype cannot begin.
                aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
                values = aligned.view(dtype).view(part.size)
                if part == box:
                    whole = values
                    break
                whole = torch.empty(box.size, dtype=dtype) if whole is None else whole
                whole[slices(part, box.start)] = values
            yield name, torch.empty(box.size, dtype=dtype) if whole is None else whole


def _ask(
    pool: concurrent.futures.ThreadPoolExecutor, sources: Sequence[_Source], plan: _Plan, batch: Batch
) -> list[concurrent.futures.Future[Tensor]]:
    """Ask every source for its parts of a batch, at once."""
    rows: list[list[tuple[str, Box]]] = [[] for _ in sources]
    for name, _, parts in batch:
        for number, part in parts:
            rows[number].append((name, part))
    return [pool.submit(source.ask, mine) for source, mine in zip(sources, rows, strict=True)]
