"""The trainer rank's side of transports that serve: threads that give readers the boxes that this rank publishes, of the versions that it keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from intarsia.contracts import Box
from intarsia.layout import slices
from torch import Tensor

from intarsia_rl.weights import wire
from intarsia_rl.weights.held import Described

# Longest time that a reader may take to say something before its connection is ended.
IDLE_S = 600.0


@dataclasses.dataclass
class Kept:
    """Memory for one version: by name the boxes and their values. `version` is None while it is free or being written; `readers` are being served from it."""

    values: dict[str, list[tuple[Box, Tensor]]]
    version: int | None = None
    readers: int = 0


class Server:
    """Serves versions. `versions`: how many are kept while nobody retires them."""

    def __init__(self, host: str, port: int, token: str, described: Mapping[str, Described], versions: int, pinned: bool) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._token, self._described, self._versions, self._pinned = token, described, versions, pinned
        self._kept: list[Kept] = []
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="weights-accept").start()

    # ------------------------------------------------------------ the trainer's thread

    def memory(self, boxes: Mapping[str, Sequence[Box]]) -> Kept:
        """Memory that nobody reads: free, else new; beyond `versions` the oldest version's, whose readers are told that it is gone."""
        with self._lock:
            free = [kept for kept in self._kept if kept.version is None and not kept.readers]
            if not free and len(self._kept) >= self._versions:
                idle = [kept for kept in self._kept if not kept.readers]
                free = sorted(idle, key=lambda kept: -1 if kept.version is None else kept.version)[:1]
            if free:
                free[0].version = None
                return free[0]
        kept = Kept({name: [(box, self._empty(name, box)) for box in found] for name, found in boxes.items()})
        with self._lock:
            self._kept.append(kept)
        return kept

    def _empty(self, name: str, box: Box) -> Tensor:
        return torch.empty(box.size, dtype=self._described[name].torch_dtype, pin_memory=self._pinned)

    def offer(self, kept: Kept, version: int) -> None:
        """Serve it from now on."""
        with self._lock:
            kept.version = version

    def retire(self, version: int) -> None:
        """Serve it no more; whoever is being served gets all of it. Memory beyond two versions is given back."""
        with self._lock:
            for kept in self._kept:
                if kept.version == version:
                    kept.version = None
            spare = [kept for kept in self._kept if kept.version is None and not kept.readers]
            for kept in spare[: max(0, len(self._kept) - 2)]:
                self._kept.remove(kept)

    def close(self) -> None:
        """End."""
        self._closed = True
        with contextlib.suppress(OSError):  # Wakes the thread that accepts.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            open_ones = list(self._connections)
            self._kept.clear()
        for connection in open_ones:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------ threads of its own

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="weights-serve").start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._connections.add(connection)
            try:
                connection.settimeout(IDLE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not wire.ask_for_proof(connection, self._token):
                    wire.send_json(connection, {"error": "the token is wrong: these are another run's weights"})
                    return
                wire.send_json(connection, {"process": os.getpid()})
                self._converse(connection)
            finally:
                self._connections.discard(connection)

    def _converse(self, connection: socket.socket) -> None:
        """Answer a reader until it leaves."""
        while True:
            self._answer(connection, wire.receive_json(connection), functools.partial(_send_bytes, connection))

    def _answer(
        self, connection: socket.socket, request: Mapping[str, Any], send: Callable[[Mapping[str, Any], Sequence[Tensor]], None]
    ) -> None:
        """Answer one request; `send(request, parts)` gives the bytes of boxes."""
        version = request["version"]
        with self._lock:
            kept = next((kept for kept in self._kept if kept.version == version), None)
            if kept is not None:
                kept.readers += 1
            here = sorted(one.version for one in self._kept if one.version is not None)
        if kept is None:
            wire.send_json(connection, {"error": f"version {version} is not kept (any more), only {here}: take a newer one"})
            return
        try:
            if "boxes" not in request:
                index = {name: [[box.start, box.size] for box, _ in found] for name, found in kept.values.items()}
                described = {name: [one.dtype, one.shape] for name, one in self._described.items()}
                wire.send_json(connection, {"index": index, "described": described})
                return
            parts = [self._part(kept, name, Box(tuple(start), tuple(size))) for name, start, size in request["boxes"]]
            missing = [row for row, part in zip(request["boxes"], parts, strict=True) if part is None]
            if missing:
                wire.send_json(connection, {"error": f"this rank does not hold {missing[0]}"})
                return
            found = [part for part in parts if part is not None]
            wire.send_json(connection, {"bytes": sum(part.nbytes for part in found)})
            send(request, found)
        finally:
            with self._lock:
                kept.readers -= 1

    @staticmethod
    def _part(kept: Kept, name: str, box: Box) -> Tensor | None:
        for held, values in kept.values.get(name, ()):
            if held.intersect(box) == box:
                return values[slices(box, held.start)]
        return None


def _send_bytes(connection: socket.socket, request: Mapping[str, Any], parts: Sequence[Tensor]) -> None:
    for part in parts:
        if part.numel():
            connection.sendall(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
