"""`python -m intarsia_rl.processes NAME ...`: a process that serves calls. Launchers start it; nobody types it.

`--inherited FD --lifeline FD`: started on this machine, with its end of a socket pair and of a pipe. `--connect HOST:PORT`: started anywhere; the token is the first line of its standard input, in hex.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys

from intarsia_rl.processes import lifeline


def main() -> int:
    """Connect, prove that the plugins are the starter's, serve."""
    parser = argparse.ArgumentParser(prog="python -m intarsia_rl.processes")
    parser.add_argument("name")
    parser.add_argument("--inherited", type=int)
    parser.add_argument("--lifeline", type=int)
    parser.add_argument("--connect")
    parser.add_argument("--limit", type=int, required=True)
    arguments = parser.parse_args()
    os.environ["INTARSIA_PROCESS"] = arguments.name  # what it is called in what others say of it
    if arguments.lifeline is not None:
        lifeline.hold(arguments.lifeline)
    token = b"" if arguments.connect is None else bytes.fromhex(sys.stdin.readline().strip())
    code = asyncio.run(_serve(arguments, token))
    if code and arguments.lifeline is not None:
        lifeline.linger(arguments.lifeline)
    return code


async def _serve(arguments: argparse.Namespace, token: bytes) -> int:
    from intarsia_rl.processes.calls import serve
    from intarsia_rl.processes.wire import Connection, ConnectionLost, dial

    if arguments.connect is not None:
        host, _, port = arguments.connect.rpartition(":")
        connection = await dial(host, int(port), token, arguments.limit)
    else:
        connection = await Connection.over(socket.socket(fileno=arguments.inherited), arguments.limit)
    try:
        await serve(connection)
    except ConnectionLost as error:
        print(f"{arguments.name}: the process that started this one is gone ({error})", file=sys.stderr)
        return 1
    finally:
        connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
