"""Connections: framing, limits, who may connect; and that nothing of the controller's side imports torch."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys

import pytest
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import NumericsError, PluginError, UsageError
from intarsia_rl.contracts import ProcessDied
from intarsia_rl.processes.calls import ConnectedProcess
from intarsia_rl.processes.codec import HEAD, MessageTooLarge
from intarsia_rl.processes.failures import RemoteError, error_of, plain_error
from intarsia_rl.processes.wire import HELLO, NONCE, PROOF, Connection, ConnectionLost, Listener, dial, new_token

LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """How long a stranger is borne is no matter here."""
    monkeypatch.setattr("intarsia_rl.processes.wire.HANDSHAKE_S", 600.0)


async def pair(limit: int = LIMIT) -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair()
    return await Connection.over(ours, limit), await Connection.over(theirs, limit)


def test_messages_arrive_whole_and_in_order():
    async def main():
        one, other = await pair(64 << 20)
        values = [("number", number, b"x" * (number * 50_000)) for number in range(40)]

        async def send():
            await asyncio.gather(*(one.send(value) for value in values))
            one.close()

        sending = asyncio.ensure_future(send())
        assert [await other.receive() for _ in values] == values
        await sending
        with pytest.raises(ConnectionLost, match="closed"):
            await other.receive()
        other.close()

    asyncio.run(main())


def test_large_messages_are_refused_on_both_sides_and_the_connection_lives():
    async def main():
        one, other = await pair()
        with pytest.raises(MessageTooLarge):
            await one.send(b"x" * (LIMIT + 1))
        await one.send("small")
        assert await other.receive() == "small"
        one.limit = 1 << 30
        one.post(b"x" * (2 * LIMIT))
        with pytest.raises(ConnectionLost, match=r"2,097,\d+ bytes came, and 1,048,576 are the limit"):
            await other.receive()

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(1 << 31, 0),
        HEAD.pack(2, 1 << 30),
        HEAD.pack(2, 1) + struct.pack("<Q", 1 << 62) + b"{}",
        HEAD.pack(2, 0) + b"{]",
        HEAD.pack(4, 0) + b"null"[:2],
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95pickle",
    ],
)
def test_garbage_ends_the_connection(data):
    async def main():
        ours, theirs = socket.socketpair()
        connection = await Connection.over(ours, LIMIT)
        theirs.sendall(data)
        theirs.close()
        with pytest.raises(ConnectionLost):
            await connection.receive()
        connection.close()

    asyncio.run(main())


def test_a_process_that_sends_garbage_is_killed_with_the_reason():
    async def main():
        ours, theirs = socket.socketpair()
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        process = ConnectedProcess(
            "p", await Connection.over(ours, LIMIT), ended, lambda: ended.done() or ended.set_result("it was ended by SIGKILL")
        )
        theirs.sendall(HEAD.pack(2, 0) + b"{]")
        assert "no message" in await asyncio.wait_for(process.died(), 5)
        theirs.close()
        await process.stop()

    asyncio.run(main())


# ---------------------------------------------------------------- tokens


def test_who_holds_the_token_is_connected():
    async def main():
        token = new_token()
        listener = await Listener.open(token, LIMIT)
        theirs, ours = await asyncio.gather(dial(*listener.address, token, LIMIT), listener.connection())
        await theirs.send({"hello": 1})
        assert await ours.receive() == {"hello": 1}
        with pytest.raises(ConnectionLost):
            await dial(*listener.address, token, LIMIT)
        theirs.close()
        ours.close()

    asyncio.run(main())


def test_who_does_not_hold_the_token_is_turned_away():
    async def main():
        token = new_token()
        listener = await Listener.open(token, LIMIT)
        waiting = asyncio.ensure_future(listener.connection())
        with pytest.raises(ConnectionLost, match="a wrong token"):
            await dial(*listener.address, new_token(), LIMIT)
        reader, writer = await asyncio.open_connection(*listener.address)
        hello = await reader.readexactly(len(HELLO) + NONCE)
        assert token not in hello
        writer.write(b"x" * (NONCE + PROOF))
        assert await reader.read() == b""
        writer.close()
        # The listener's own words, sent back to it, prove nothing.
        reader, writer = await asyncio.open_connection(*listener.address)
        nonce = (await reader.readexactly(len(HELLO) + NONCE))[len(HELLO) :]
        writer.write(nonce + nonce[:PROOF])
        assert await reader.read() == b""
        writer.close()
        assert not waiting.done()
        theirs = await dial(*listener.address, token, LIMIT)
        (await waiting).close()
        theirs.close()

    asyncio.run(main())


def test_a_listener_that_does_not_hold_the_token_is_left():
    async def main():
        async def impostor(reader, writer):
            writer.write(HELLO + b"n" * NONCE)
            await reader.readexactly(NONCE + PROOF)
            writer.write(b"p" * PROOF)
            await writer.drain()

        async def stranger(reader, writer):
            writer.write(b"SSH-2.0-something that is long enough to be read as a hello\r\n")
            await writer.drain()

        for who, words in ((impostor, "does not hold the token"), (stranger, "no process of ours")):
            server = await asyncio.start_server(who, "127.0.0.1", 0)
            with pytest.raises(ConnectionLost, match=words):
                await dial(*server.sockets[0].getsockname(), new_token(), LIMIT)
            server.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # and does not listen; held, so that nobody else does meanwhile
            port = free.getsockname()[1]
            with pytest.raises(ConnectionLost, match=f"127.0.0.1:{port}"):
                await dial("127.0.0.1", port, new_token(), LIMIT)

    asyncio.run(main())


def test_a_process_that_was_started_elsewhere_dials_in(monkeypatch):
    """What a launcher for other machines does: the token goes over standard input, the connection comes back."""
    monkeypatch.setattr("intarsia_rl.processes.calls.LINGER_S", 600.0)  # it ends by itself, however long that takes

    async def main():
        token = new_token()
        listener = await Listener.open(token, LIMIT)
        host, port = listener.address
        command = [sys.executable, "-m", "intarsia_rl.processes", "far", "--connect", f"{host}:{port}", "--limit", str(LIMIT)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert child.stdin is not None and child.stderr is not None
        child.stdin.write(token.hex().encode() + b"\n")
        child.stdin.close()
        ended = asyncio.get_running_loop().run_in_executor(None, lambda: f"it ended with exit code {child.wait()}")
        process = ConnectedProcess("far", await asyncio.wait_for(listener.connection(), 600), ended, child.kill)
        await process.begin("intarsia_testing.rl_doubles:nothing", {}, 600.0)
        assert await process.call("ping") is None
        process._connection.close()  # the network fails, or the starter's machine
        assert "exit code 1" in await asyncio.wait_for(process.died(), 600)
        assert b"far: the process that started this one is gone" in child.stderr.read()
        child.stderr.close()

    asyncio.run(main())


def test_what_was_answered_before_the_end_is_no_loss():
    """Though the end is known before the answer is read."""

    async def main():
        ours, theirs = await pair()
        ended = asyncio.get_running_loop().create_future()
        process = ConnectedProcess("tools", ours, ended, lambda: None)
        calls = [asyncio.ensure_future(process.call(word)) for word in ("fails", "waits")]
        numbers = [(await theirs.receive())[1] for _ in calls]
        await theirs.send(["error", numbers[0], plain_error(UsageError("there is no such thing"))])
        theirs.close()
        ended.set_result("it ended with exit code 0")
        with pytest.raises(UsageError, match="there is no such thing"):
            await calls[0]
        with pytest.raises(ProcessDied, match="tools is gone: it ended with exit code 0"):
            await calls[1]
        assert await process.died() == "it ended with exit code 0"

    asyncio.run(main())


# ---------------------------------------------------------------- exceptions


class Own(UsageError):
    """A plugin's subclass, with arguments of its own."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (NumericsError("nan"), NumericsError, "nan"),
        (Own(1, 2), UsageError, "1 and 2"),
        (EnvironmentFailure("tool", "broken", retry=True), EnvironmentFailure, "tool: broken"),
        (KeyError("k"), RemoteError, "KeyError: 'k'"),
        (RemoteError("KeyError: 'k'", "KeyError", "there"), RemoteError, "KeyError: 'k'"),
        (Silent(), RemoteError, "Silent: (its message cannot be shown: RuntimeError)"),
        (ValueError("x" * 10_000_000), RemoteError, "ValueError: " + "x" * 20_000 + " ... (9,980,000 characters more)"),
        (ValueError(), RemoteError, "ValueError"),
    ],
)
def test_exceptions_keep_their_class_or_their_words(error, kind, words):
    plain = json.loads(json.dumps(plain_error(error)))
    made = error_of(plain)
    assert type(made) is kind
    assert str(made)[: len(words)] == words[: len(str(made))] and len(str(made)) < 30_000
    if isinstance(error, EnvironmentFailure):
        assert (made.boundary, made.retry) == ("tool", True)


def test_an_exception_of_a_class_that_nobody_knows_is_only_words():
    made = error_of({"class": "os.system", "text": "t", "trace": ""})
    assert type(made) is RemoteError and str(made) == "t"
    assert PluginError is type(error_of({"class": "PluginError", "text": "t"}))


# ---------------------------------------------------------------- light


def test_the_controllers_side_imports_no_torch():
    modules = [
        "intarsia_rl.contracts",
        "intarsia_rl.config",
        "intarsia_rl.processes.pools",
        "intarsia_rl.processes.local",
        "intarsia_rl.processes.sync",
        "intarsia_rl.processes.generator_service",
        "intarsia_rl.processes.environment_service",
        "intarsia_rl.processes.__main__",
        "intarsia_rl.controller.service",
        "intarsia_testing.rl_doubles",
    ]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    heavy = [each for each in ("torch", "numpy", "transformers") if each in sys.modules]
    assert not heavy, (name, heavy)
from intarsia.plugins import current
from intarsia_rl.processes.config import LeastLoadedConfig, LocalProcessesConfig
from intarsia_rl.processes.plain import config_of, plain_config
for config in (LeastLoadedConfig(), LocalProcessesConfig(message_bytes=1 << 20)):
    assert config_of(plain_config(config, current()), current()) == config
    current().build(config)
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
