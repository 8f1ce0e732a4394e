"""What trainer ranks and readers of the transport `socket` say to each other: a proof of knowing the token, then JSON and raw bytes, each with its length."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")
# Longest message in JSON: anything longer is not from us.
MOST_JSON = 2**28
_NONCE, _PROOF = 32, hashlib.sha256().digest_size


class Closed(ConnectionError):
    """The other side has ended the connection."""


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. Closed where the connection ends before that."""
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            raise Closed("the connection ended half-way")
        buffer = buffer[count:]


def receive_exactly(connection: socket.socket, count: int) -> bytearray:
    """So many bytes."""
    data = bytearray(count)
    receive_into(connection, memoryview(data))
    return data


def send_json(connection: socket.socket, value: Any) -> None:
    """Send a JSON value."""
    text = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive_json(connection: socket.socket) -> Any:
    """Receive a JSON value. Closed where what comes is none."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > MOST_JSON:
        raise Closed(f"a message of {length} bytes is not from a transport of weights")
    try:
        return json.loads(receive_exactly(connection, length))
    except ValueError as error:
        raise Closed(f"a message is no JSON: {error}") from error


def ask_for_proof(connection: socket.socket, token: str) -> bool:
    """The server's side: whether the other one knows the token, which does not travel."""
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(nonce)
    given = receive_exactly(connection, _PROOF)
    return hmac.compare_digest(bytes(given), _proof(token, nonce))


def give_proof(connection: socket.socket, token: str) -> None:
    """The reader's side."""
    connection.sendall(_proof(token, bytes(receive_exactly(connection, _NONCE))))


def _proof(token: str, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), nonce, hashlib.sha256).digest()
