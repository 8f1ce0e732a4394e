"""Weights over process groups of PyTorch: NCCL from device to device where both sides are on CUDA, gloo elsewhere.

A reader asks each trainer rank which boxes it has, works out what to ask whom for, and asks, as with `socket`: over a TCP connection, which proves that it knows the run's token. What was asked
for comes by point-to-point sends of a process group that these two processes have for themselves (`Pair`). A reader keeps its groups from version to version. Where one of
the two ends, or a transfer stands still, that group ends; the reader asks again, in a new group under a new epoch, and a process that was started again does the same.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from intarsia.contracts import Box
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_rl.weights import wire
from intarsia_rl.weights.config import CollectiveConfig
from intarsia_rl.weights.held import Described, Held
from intarsia_rl.weights.pair import READER, TRAINER, Pair, facts_of, is_over, obstacle, receive_into, send_parts
from intarsia_rl.weights.reading import Rows, Source, gather
from intarsia_rl.weights.server import Server
from intarsia_rl.weights.serving import Serving

log = logging.getLogger("intarsia.rl")

BACKENDS = ("auto", "gloo", "nccl")
PROCESS = "INTARSIA_PROCESS"


class Collective(Serving):
    """See `intarsia_rl.contracts.WeightTransport`. The entry's target."""

    name: ClassVar[str] = "collective"
    reader: ClassVar[str] = "intarsia_rl.weights.collective:read"
    advice: ClassVar[str] = "Choose another weights.host."
    _config: CollectiveConfig

    def __init__(self, config: CollectiveConfig, directory: str | os.PathLike[str]) -> None:
        super().__init__(config, directory)
        if config.backend not in BACKENDS:
            raise UsageError(f"weights.backend is {config.backend!r}; it must be one of {', '.join(BACKENDS)}.")
        if config.piece_bytes < 1:
            raise UsageError(f"weights.piece_bytes is {config.piece_bytes}; it must be positive.")

    def _open(self, host: str, port: int, held: Held) -> Server:
        return GroupServer(host, port, self._token, held, self._config)


# ---------------------------------------------------------------- the trainer's side


class GroupServer(Server):
    """Serves versions over a group with each reader. They are kept on the trainer's device, but on the host where the backend is gloo in any case.

    UsageError where NCCL is wanted and this rank cannot have it.
    """

    def __init__(self, host: str, port: int, token: str, held: Held, config: CollectiveConfig) -> None:
        self._rank, self._config, device = held.world.rank, config, held.mesh.device
        self._facts = facts_of(device)
        # Whether a reader could be reached: one like this rank, but on another device.
        problem = obstacle(self._facts, {**self._facts, "unit": "another"})
        if config.backend == "nccl" and problem:
            raise UsageError(
                f"weights.backend=nccl cannot be on trainer rank {self._rank}: {problem}. Choose weights.backend=auto, or gloo."
            )
        self._device = device if device.type == "cuda" and config.backend != "gloo" else torch.device("cpu")
        self._store = store_at("127.0.0.1", 0, config.timeout_s)
        super().__init__(host, port, token, held.described, config.versions, device.type == "cuda" and self._device.type == "cpu")

    def _empty(self, name: str, box: Box) -> Tensor:
        if self._device.type == "cpu":
            return super()._empty(name, box)
        one: Described = self._described[name]
        return torch.empty(box.size, dtype=one.torch_dtype, device=self._device)

    def _converse(self, connection: socket.socket) -> None:
        hello = wire.receive_json(connection)
        problem = obstacle(self._facts, hello["device"])
        if self._config.backend == "nccl" and problem:
            wire.send_json(connection, {"refused": f"trainer rank {self._rank} cannot reach {hello['reader']}: {problem}"})
            return
        backend = "gloo" if problem or self._config.backend == "gloo" else "nccl"
        wire.send_json(connection, {"backend": backend, "store": self._store.port, "piece": self._config.piece_bytes})

        def pair() -> Pair:
            address = connection.getsockname()[0]
            log.debug("Rank %d gives weights to %s by %s, in a group of their own.", self._rank, hello["reader"], backend)
            # A store's client waits for one key at a time: one that all shared would have them wait for a reader that does not come.
            store = store_at("127.0.0.1", self._store.port, self._config.timeout_s)
            return Pair(backend, store, hello["epoch"], TRAINER, address, self._device, connection, self._config.timeout_s)

        way = _Way(pair, hello["reader"], self._rank, (self._config.piece_bytes, self._device))
        try:
            while True:
                self._answer(connection, wire.receive_json(connection), way.send)
        finally:
            way.end()


class _Way:
    """From this rank to one reader; the group is made when there is something to send. `buffer`: bytes and device of what is sent at once."""

    def __init__(self, make: Callable[[], Pair], reader: str, rank: int, buffer: tuple[int, torch.device]) -> None:
        self._make, self._reader, self._rank, self._buffer = make, reader, rank, buffer
        self._pair: Pair | None = None
        self._buffers: list[Tensor] = []

    def send(self, request: Mapping[str, Any], parts: Sequence[Tensor]) -> None:
        """The bytes of what was asked for. OSError, and a line in the log, where the reader does not take them."""
        sizes = [(row[0], part.nbytes) for row, part in zip(request["boxes"], parts, strict=True)]
        if not sum(size for _, size in sizes):
            return
        try:
            if self._pair is None:
                self._pair = self._make()
                self._buffers = [torch.empty(self._buffer[0], dtype=torch.uint8, device=self._buffer[1]) for _ in range(2)]
            send_parts(self._pair, parts, self._buffers)
        except OSError as error:
            log.warning(
                "Version %d of the weights did not get whole from trainer rank %d to %s: %s in %s. Their group is ended; the version is kept for whoever asks again.",
                request["version"], self._rank, self._reader, error, tensor_at(self._pair.moved if self._pair else 0, sizes),
            )  # fmt: skip
            raise

    def end(self) -> None:
        """End the group."""
        if self._pair is not None:
            self._pair.end()


def store_at(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store at which the two sides of a group meet; with port 0 a new one, on any port that is free. ConnectionError where it does not answer."""
    wait = datetime.timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(host, port, None, is_master=not port, wait_for_workers=False, timeout=wait)
    except RuntimeError as error:
        raise ConnectionError(f"the store at {host}:{port} does not answer: {error}") from error


def tensor_at(count: int, parts: Sequence[tuple[str, int]]) -> str:
    """The name of the tensor whose bytes come after the first `count`; parts are names and bytes."""
    for name, size in parts:
        if count < size:
            return name
        count -= size
    return parts[-1][0]


# ---------------------------------------------------------------- the generator's side


def read(
    location: Mapping[str, Any],
    names: Sequence[str],
    boxes: Mapping[str, Sequence[Box]] | None = None,
    device: torch.device | None = None,
) -> Generator[tuple[str, Tensor], None, None]:
    """(name, values) of whole tensors, or of the `boxes` of those names that it has, one after the other and each of its box's shape: on `device`; those that came whole by gloo are on the CPU.

    DistributedError where a rank cannot be reached in the attempts that the location allows, or does not keep the version any more; UsageError where NCCL is wanted and cannot be.
    """
    device = device or torch.device("cpu")
    sources = _taken(location, device)
    try:
        yield from gather(sources, names, boxes, device)
    except BaseException:
        for source in sources:
            source.close()
        raise
    _keep(location, device, sources)


class GroupSource(Source):
    """A trainer rank, with the group that this process has with it."""

    def __init__(self, rank: int, host: str, port: int, location: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(host, port, location)
        self._rank, self._device = rank, device
        self._pair: Pair | None = None
        self._agreed: dict[str, Any] = {}
        self._itemsizes: dict[str, int] = {}

    def renew(self, version: int) -> None:
        """Ask for another version from now on. A connection that has ended meanwhile is made anew when it is needed."""
        self.version = version
        if self._connection is not None and is_over(self._connection):
            self.close()

    @property
    def is_closed(self) -> bool:
        """Whether it has no connection."""
        return self._connection is None

    def close(self) -> None:
        """See Source. Not while it is being asked."""
        super().close()
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.end()

    def index(self) -> dict[str, Any]:
        """See Source."""
        found = super().index()
        self._itemsizes = {name: getattr(torch, dtype).itemsize for name, (dtype, _) in found["described"].items()}
        return found

    def _connected(self) -> socket.socket:
        connection = super()._connected()
        try:
            hello = {"epoch": secrets.token_hex(16), "reader": own_name(), "device": facts_of(self._device)}
            wire.send_json(connection, hello)
            self._agreed = {**hello, **self._check(wire.receive_json(connection))}
            if "refused" in self._agreed:
                raise UsageError(
                    f"weights.backend=nccl: {self._agreed['refused']}. Choose weights.backend=auto, which takes gloo there, or devices of their own for trainer and generators."
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _receive(self, connection: socket.socket, count: int, rows: Rows) -> Tensor:
        if not count:
            return super()._receive(connection, 0, rows)
        try:
            pair = self._pair = self._pair or self._joined(connection)
            with pair.stream():
                data = torch.empty(count, dtype=torch.uint8, device=pair.device)
            receive_into(pair, data, self._agreed["piece"])
        except OSError as error:
            name = tensor_at(self._pair.moved if self._pair else 0, [(name, box.numel * self._itemsizes[name]) for name, box in rows])
            raise ConnectionError(f"{error}, in {name}") from error
        return data

    def _joined(self, connection: socket.socket) -> Pair:
        """The group with the rank."""
        agreed, store = self._agreed, store_at(self.place[0], self._agreed["store"], self.timeout_s)
        address = connection.getsockname()[0]
        return Pair(agreed["backend"], store, agreed["epoch"], READER, address, self._device, connection, self.timeout_s)

    def _lost(self, failure: OSError) -> str:
        return (
            f"Version {self.version} of the weights did not get to {own_name()} from trainer rank {self._rank} at {self.place[0]}:{self.place[1]}: {failure} ({self.attempts} attempts, "
            f"in each of which nothing may come for {self.timeout_s:g} s). The rank is gone or stands still, or this machine cannot reach it: set weights.host to an address that it can."
        )


# What this process has open, by run and device: readers of one run come and go one after the other, and keep their groups from version to version.
_kept: dict[tuple[str, torch.device], list[GroupSource]] = {}
_lock = threading.Lock()


def _taken(location: Mapping[str, Any], device: torch.device) -> list[GroupSource]:
    """This process's sources of a run, for the only use."""
    with _lock:
        kept = _kept.pop((location["token"], device), None)
        for key, others in list(_kept.items()):  # of runs that have ended
            for source in others:
                source.renew(source.version)
            if all(source.is_closed for source in others):
                del _kept[key]
    if kept is None:
        return [GroupSource(rank, host, port, location, device) for rank, (host, port) in enumerate(location["servers"])]
    for source in kept:
        source.renew(location["version"])
    return kept


def _keep(location: Mapping[str, Any], device: torch.device, sources: list[GroupSource]) -> None:
    """For the next version."""
    with _lock:
        spare = _kept.get((location["token"], device), [])
        _kept[location["token"], device] = sources
    for source in spare:
        source.close()


@atexit.register
def leave() -> None:
    """End all groups that this process keeps as a reader."""
    with _lock:
        kept = [source for sources in _kept.values() for source in sources]
        _kept.clear()
    for source in kept:
        source.close()


def own_name() -> str:
    """What this process is called where something is said of it."""
    return f"{os.environ.get(PROCESS, 'a reader')} (process {os.getpid()} on {os.uname().nodename})"
