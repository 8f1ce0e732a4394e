"""Weights over TCP: connections that break, peers that do not know the token, versions that are gone."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.errors import DistributedError, UsageError
from intarsia_rl.weights import reading as sources
from intarsia_rl.weights import serving
from intarsia_rl.weights.config import SocketConfig
from intarsia_rl.weights.serving import own_address
from intarsia_rl.weights.socket import Socket, read
from intarsia_testing.communicator import run_ranks
from intarsia_testing.weight_transport import SHAPES, Trainer, published


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Socket]:
    made = Socket(SocketConfig(attempts=2, timeout_s=300.0), tmp_path)
    yield made
    made.close()


def publish(transport: Socket, trainer: Trainer, step: int) -> Any:
    trainer.train(step)
    version = transport.publish(step, trainer.parts)
    assert version is not None
    return version.location


def check(location: Mapping[str, Any], step: int) -> None:
    found = dict(read(location, list(SHAPES)))
    assert all(torch.equal(found[name], published(step)[name]) for name in SHAPES)


class Proxy:
    """Passes connections on; the n-th one breaks after `limits[n]` bytes of answers."""

    def __init__(self, target: tuple[str, int], limits: list[int | None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.place = ["127.0.0.1", self.listener.getsockname()[1]]
        self.connections = 0
        self._target, self._limits = target, limits
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            limit = self._limits[min(self.connections, len(self._limits) - 1)]
            self.connections += 1
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pass, args=(client, server, None), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, limit), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, limit: int | None) -> None:
        try:
            while data := source.recv(4096):
                if limit is not None and len(data) >= limit:
                    target.sendall(data[:limit])
                    break
                limit = None if limit is None else limit - len(data)
                target.sendall(data)
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("limit", [0, 10, 40, 100, 500, 650, 700])
def test_a_connection_that_breaks_is_made_again(transport: Socket, limit: int) -> None:
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    proxy = Proxy(tuple(location["servers"][0]), [limit, None])
    check({**location, "servers": [proxy.place]}, 0)
    assert proxy.connections == 2


def test_a_rank_that_always_breaks_is_an_error_and_no_mix(transport: Socket) -> None:
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    proxy = Proxy(tuple(location["servers"][0]), [700, 150])
    with pytest.raises(
        DistributedError,
        match=r"Version 0 of the weights cannot be read from the trainer's rank at 127\.0\.0\.1:\d+: the connection ended half-way \(2 attempts\)",
    ):
        check({**location, "servers": [proxy.place]}, 0)


def test_a_rank_that_is_gone(transport: Socket) -> None:
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    transport.close()
    with pytest.raises(DistributedError, match=r"Connection refused.*set weights\.host"):
        check(location, 0)


def test_a_source_that_has_ended_makes_no_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end while a thread waits to try again."""
    source = sources.Source("127.0.0.1", 1, {"version": 1, "token": "t", "attempts": 5, "timeout_s": 1.0})
    tried: list[object] = []

    def refuse(*arguments: object) -> None:
        tried.append(arguments)
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(sources, "socket", SimpleNamespace(create_connection=refuse, SHUT_RDWR=socket.SHUT_RDWR))
    monkeypatch.setattr(sources, "time", SimpleNamespace(sleep=lambda seconds: source.end()))
    with pytest.raises(DistributedError, match="nobody waits"):
        source.index()
    assert len(tried) == 1


def test_who_does_not_know_the_token_gets_nothing(transport: Socket) -> None:
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    with pytest.raises(DistributedError, match="the token is wrong"):
        check({**location, "token": "0" * 64}, 0)
    check(location, 0)


def test_nonsense_harms_nobody(transport: Socket) -> None:
    location = publish(transport, Trainer(SelfCommunicator()), 0)
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(200)):
        with socket.create_connection(tuple(location["servers"][0]), 300.0) as client:
            client.sendall(nonsense)
    check(location, 0)


def test_a_version_that_is_being_read_is_read_to_its_end(transport: Socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one answer; between two the reader is told that the version is gone."""
    monkeypatch.setattr(sources, "BATCH_BYTES", 1)
    trainer = Trainer(SelfCommunicator())
    location = publish(transport, trainer, 0)
    reading = read(location, list(SHAPES))
    found = dict([next(reading)])
    publish(transport, trainer, 1)
    found |= dict([next(reading)])
    transport.retire(0)
    with pytest.raises(
        DistributedError, match=r"gives no weights of version 0: version 0 is not kept \(any more\), only \[1\]: take a newer one"
    ):
        found |= dict(reading)
    assert found and all(torch.equal(tensor, published(0)[name]) for name, tensor in found.items())


def test_memory_is_used_again(transport: Socket) -> None:
    trainer = Trainer(SelfCommunicator())
    for step in range(8):
        check(publish(transport, trainer, step), step)
        transport.retire(step - 1)
    assert transport._server is not None and len(transport._server._kept) == 2


def test_versions_that_nobody_retires(transport: Socket) -> None:
    trainer = Trainer(SelfCommunicator())
    locations = [publish(transport, trainer, step) for step in range(6)]
    for step in (0, 1):
        with pytest.raises(DistributedError, match=r"only \[2, 3, 4, 5\]"):
            check(locations[step], step)
    for step in (2, 3, 4, 5):
        check(locations[step], step)


def test_small_batches_and_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 40)

    def rank(world: Communicator) -> None:
        transport = Socket(SocketConfig(), tmp_path)
        version = transport.publish(0, Trainer(world).parts)
        if version is not None:
            assert len(version.location["servers"]) == 3
            check(version.location, 0)
        world.barrier("read")
        transport.close()

    run_ranks(3, rank)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        transport = Socket(SocketConfig(port=port), tmp_path)
        with pytest.raises(UsageError, match=rf"trainer rank 0 cannot listen on 127\.0\.0\.1:{port}: .*Choose another weights\.port"):
            transport.publish(0, Trainer(SelfCommunicator()).parts)


def test_one_rank_that_cannot_listen_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has an address that is not this machine's."""
    places = iter(["127.0.0.1", "192.0.2.1"])
    monkeypatch.setattr(serving, "own_address", lambda: next(places))

    def rank(world: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            Socket(SocketConfig(), tmp_path).publish(0, Trainer(world).parts)
        return str(caught.value)

    assert all("cannot listen on 192.0.2.1" in message for message in run_ranks(2, rank))


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (SocketConfig(versions=1), SocketConfig(attempts=0), SocketConfig(timeout_s=0.0)):
        with pytest.raises(UsageError, match="weights"):
            Socket(wrong, tmp_path)
    for master, address in (("localhost", "127.0.0.1"), ("no.such.machine.invalid", "127.0.0.1"), ("127.0.0.2", "127.0.0.1")):
        monkeypatch.setenv("MASTER_ADDR", master)
        monkeypatch.setenv("MASTER_PORT", "29500")
        assert own_address().startswith(address[:4])
