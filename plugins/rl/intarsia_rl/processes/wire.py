"""Connections between processes: messages over a stream, with a limit of their size; and how the two ends find and trust each other.

A process on this machine inherits its end of a socket pair, to which nobody else can connect. One elsewhere dials the address that its starter listens at; both prove that
they hold the same token, which itself is never sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any

from intarsia_rl.processes.codec import HEAD, CodecError, MessageTooLarge, decode, encode

HELLO = b"intarsia-rl 1\n"
NONCE = 32
PROOF = 32
HANDSHAKE_S = 60.0
MOST_BLOBS = 1 << 20


CLOSED = "the connection was closed"


class ConnectionLost(Exception):
    """The other end is gone (its message is then CLOSED), or sent what is no message."""


class Connection:
    """A stream of messages. `limit` is the largest one's size in bytes, both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        self.limit = limit
        self._reader, self._writer = reader, writer
        self._draining = asyncio.Lock()

    @classmethod
    async def over(cls, end: socket.socket, limit: int) -> Connection:
        """A connection over one end of a socket pair, or a connected socket."""
        end.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer, limit)

    async def send(self, value: Any) -> None:
        """Send a value; returns when the system has taken most of it. CodecError (MessageTooLarge) where it cannot travel, and nothing was sent; ConnectionLost."""
        self.post(value)
        try:
            async with self._draining:
                await self._writer.drain()
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def post(self, value: Any) -> None:
        """Send a value without waiting. CodecError as `send`; where the other end is gone it is lost."""
        # All parts at once: another coroutine's message comes before or after.
        self._writer.writelines(encode(value, self.limit))

    async def receive(self) -> Any:
        """The next value. ConnectionLost at the end, and for what is no message or too large a one (the stream is then useless)."""
        try:
            text_bytes, count = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            if text_bytes > self.limit or count > MOST_BLOBS:
                raise MessageTooLarge(f"a message of {text_bytes:,} bytes and {count:,} parts came, and {self.limit:,} bytes are the limit")
            sizes = struct.unpack(f"<{count}Q", await self._reader.readexactly(8 * count))
            if text_bytes + sum(sizes) > self.limit:
                raise MessageTooLarge(f"a message of {text_bytes + sum(sizes):,} bytes came, and {self.limit:,} are the limit")
            text = await self._reader.readexactly(text_bytes)
            return decode(text, [await self._reader.readexactly(size) for size in sizes])
        except asyncio.IncompleteReadError as error:
            raise ConnectionLost(CLOSED) from error
        except (OSError, CodecError) as error:
            raise ConnectionLost(str(error)) from error

    def close(self) -> None:
        """Close it; may be called twice."""
        self._writer.close()


# ---------------------------------------------------------------- between machines


def new_token() -> bytes:
    """A secret for one connection."""
    return os.urandom(32)


class Listener:
    """Waits for one connection of somebody who holds the token; all others are turned away. Made by `open`; `address` is (host, port)."""

    address: tuple[str, int]

    def __init__(self, token: bytes, limit: int) -> None:
        self._token, self._limit = token, limit
        self._server: asyncio.Server
        self._found: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, token: bytes, limit: int, host: str = "127.0.0.1") -> Listener:
        """Listen at a free port of `host`."""
        listener = cls(token, limit)
        listener._server = await asyncio.start_server(listener._meet, host, 0)
        listener.address = listener._server.sockets[0].getsockname()[:2]
        return listener

    async def connection(self) -> Connection:
        """The connection, once it is there; nobody can connect afterwards."""
        try:
            return await self._found
        finally:
            self.close()

    def close(self) -> None:
        """Listen no more."""
        self._server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                ours = os.urandom(NONCE)
                writer.write(HELLO + ours)
                answer = await reader.readexactly(NONCE + PROOF)
                theirs, proof = answer[:NONCE], answer[NONCE:]
                if self._found.done() or not same(proof, prove(self._token, b"dials", ours, theirs)):
                    raise ConnectionLost("a wrong token")
                writer.write(prove(self._token, b"listens", ours, theirs))
                await writer.drain()
        except (ConnectionLost, OSError, asyncio.IncompleteReadError):
            writer.close()
            return
        if self._found.done():
            writer.close()
        else:
            self._found.set_result(Connection(reader, writer, self._limit))


async def dial(host: str, port: int, token: bytes, limit: int) -> Connection:
    """Connect to a `Listener`. ConnectionLost where there is none, or one that does not hold the token."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                hello = await reader.readexactly(len(HELLO) + NONCE)
                theirs, ours = hello[len(HELLO) :], os.urandom(NONCE)
                if not hello.startswith(HELLO):
                    raise ConnectionLost(f"{host}:{port} is no process of ours")
                writer.write(ours + prove(token, b"dials", theirs, ours))
                if not same(await reader.readexactly(PROOF), prove(token, b"listens", theirs, ours)):
                    raise ConnectionLost(f"{host}:{port} does not hold the token")
            except BaseException:
                writer.close()
                raise
            return Connection(reader, writer, limit)
    except asyncio.IncompleteReadError as error:
        raise ConnectionLost(f"{host}:{port} turned the connection away: a wrong token, or it has its connection already") from error
    except OSError as error:
        raise ConnectionLost(f"{host}:{port}: {error}") from error


def prove(token: bytes, role: bytes, listener: bytes, dialler: bytes) -> bytes:
    """What only a holder of the token can say, for this role and these two random numbers."""
    import hmac

    return hmac.digest(token, role + listener + dialler, "sha256")


def same(one: bytes, other: bytes) -> bool:
    """Whether they are equal, in a time that does not depend on where they differ."""
    import hmac

    return hmac.compare_digest(one, other)
