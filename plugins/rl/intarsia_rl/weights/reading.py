"""The generator's side of transports whose trainer ranks serve what they hold: which rank has what, what to ask whom for, and the next batch under way while one is copied."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from intarsia.contracts import Box
from intarsia.errors import DistributedError, UsageError, did_you_mean
from intarsia.layout import region_numel, slices
from torch import Tensor

from intarsia_rl.weights import wire

# Bytes that are asked for at once: the next ones travel while these are copied.
BATCH_BYTES = 2**25

Rows = Sequence[tuple[str, Box]]
"""Boxes of tensors that are asked of one rank."""


def gather(
    sources: Sequence[Source], names: Sequence[str], boxes: Mapping[str, Sequence[Box]] | None = None, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of whole tensors, or of the `boxes` of those names that it has, one after the other and each of its box's shape; those that are put together of several parts on
    `device` (None: the CPU), others where their source receives.

    Where this does not come to its end, for any reason, the sources are ended. DistributedError where a rank cannot be reached in the attempts that the location allows, or does not keep
    the version any more.
    """
    device = device or torch.device("cpu")
    with concurrent.futures.ThreadPoolExecutor(max(1, min(len(sources), 16)), "weights-read") as pool:
        try:
            plan = Plan(list(pool.map(lambda source: source.index(), sources)), device)
            wanted = [(name, box) for name in names for box in plan.boxes(name, boxes or {})]
            batches = list(plan.batches(wanted))
            flying = _ask(pool, sources, plan, batches[0]) if batches else []
            for number, batch in enumerate(batches):
                arrived = [future.result() for future in flying]
                flying = _ask(pool, sources, plan, batches[number + 1]) if number + 1 < len(batches) else []
                yield from plan.assemble(batch, arrived)
                if device.type == "cuda":  # Whoever takes them may still be copying, and the memory is given back now.
                    torch.cuda.current_stream(device).synchronize()
        except BaseException:
            for source in sources:
                source.end()
            raise


class Source:
    """A trainer rank, as a reader sees it. `version` is the one that is asked for."""

    def __init__(self, host: str, port: int, location: Mapping[str, Any]) -> None:
        self.place, self.version, self.token = (host, port), location["version"], location["token"]
        self.attempts, self.timeout_s = location["attempts"], location["timeout_s"]
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

    def ask(self, rows: Rows) -> Tensor:
        """The bytes of these boxes, one after the other: 1-D uint8."""
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._repeat({"boxes": [[name, box.start, box.size] for name, box in rows]}, rows)[1] if rows else nothing

    def _repeat(self, request: Mapping[str, Any], rows: Rows = ()) -> tuple[Any, Tensor]:
        """One answer, whole, asked for anew where the connection fails."""
        for attempt in range(self.attempts):
            try:
                return self._once({"version": self.version, **request}, rows)
            except OSError as error:
                self.close()
                failure = error
                if self._ended:
                    break
                if attempt + 1 < self.attempts:
                    time.sleep(min(2.0, 0.1 * 2**attempt))
        raise DistributedError(self._lost(failure))

    def _lost(self, failure: OSError) -> str:
        """What is said when all attempts have failed."""
        return (
            f"Version {self.version} of the weights cannot be read from the trainer's rank at {self.place[0]}:{self.place[1]}: {failure} "
            f"({self.attempts} attempts). The rank is gone, or this machine cannot reach it: set weights.host to an address that it can."
        )

    def _once(self, request: Mapping[str, Any], rows: Rows) -> tuple[Any, Tensor]:
        if self._connection is None:
            if self._ended:
                raise ConnectionError("nobody waits for it any more")
            self._connection = self._connected()
        wire.send_json(self._connection, request)
        answer = self._check(wire.receive_json(self._connection))
        return answer, self._receive(self._connection, answer.get("bytes", 0), rows)

    def _connected(self) -> socket.socket:
        """A connection that is the run's."""
        connection = socket.create_connection(self.place, self.timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.give_proof(connection, self.token)
            self._check(wire.receive_json(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _receive(self, connection: socket.socket, count: int, rows: Rows) -> Tensor:
        """The bytes that an answer announces, of these boxes: 1-D uint8. OSError where they do not come."""
        data = torch.empty(count, dtype=torch.uint8)
        wire.receive_into(connection, data.numpy().data)
        return data

    def _check(self, answer: Any) -> Any:
        if "error" in answer:
            raise DistributedError(
                f"The trainer's rank at {self.place[0]}:{self.place[1]} gives no weights of version {self.version}: {answer['error']}."
            )
        return answer


Batch = list[tuple[str, Box, list[tuple[int, Box]]]]
"""Wanted boxes of tensors, each with the parts that it comes in: (number of the source, box)."""


class Plan:
    """Which rank has what, and what to ask whom for."""

    def __init__(self, indices: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        self._device = device
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
                whole = torch.empty(box.size, dtype=dtype, device=self._device) if whole is None else whole
                whole[slices(part, box.start)] = values
            yield name, torch.empty(box.size, dtype=dtype, device=self._device) if whole is None else whole


def _ask(
    pool: concurrent.futures.ThreadPoolExecutor, sources: Sequence[Source], plan: Plan, batch: Batch
) -> list[concurrent.futures.Future[Tensor]]:
    """Ask every source for its parts of a batch, at once."""
    rows: list[list[tuple[str, Box]]] = [[] for _ in sources]
    for name, _, parts in batch:
        for number, part in parts:
            rows[number].append((name, part))
    return [pool.submit(source.ask, mine) for source, mine in zip(sources, rows, strict=True)]
