"""`intarsia train --processes N`: N ranks on this machine, without torchrun. Torch-free."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from intarsia.plugins import child_environment
from intarsia.train.signals import LAUNCHER

GRACE_S = 30.0
"""How long the others may go on after one rank has failed: they may be about to report the same error."""


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `intarsia ARGUMENTS` as `processes` ranks; returns the exit code of the first rank that failed, 0 if none did.

    Rank 0 has the terminal; what another rank wrote is shown only where it was the first to fail. SIGTERM and SIGINT are passed on once to each.
    """
    with tempfile.TemporaryDirectory(prefix="intarsia-") as folder, contextlib.ExitStack() as stack:
        logs = [stack.enter_context(open(Path(folder) / f"rank-{rank}", "w+b")) for rank in range(1, processes)]
        ranks = [_start(arguments, rank, processes, folder, None if rank == 0 else logs[rank - 1]) for rank in range(processes)]
        try:
            with _passing_on(ranks):
                failed = _wait(ranks)
            if failed is None:
                return 0
            if failed:
                _show(logs[failed - 1], failed)
            return _code(failed, ranks[failed].returncode)
        finally:
            for each in ranks:
                if each.poll() is None:
                    each.kill()
                each.wait()


def _start(arguments: Sequence[str], rank: int, processes: int, folder: str, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **child_environment(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "INTARSIA_RENDEZVOUS": f"file://{folder}/rendezvous",
        LAUNCHER: str(os.getpid()),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # A session of its own: Ctrl-C at the terminal reaches the launcher alone, which passes it on once.
    command = [sys.executable, "-m", "intarsia", *arguments]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


@contextlib.contextmanager
def _passing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(number: int, frame: Any) -> None:
        for each in ranks:
            if each.poll() is None:
                each.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Until all have ended; the first that failed, or None. After a failure the others get GRACE_S, then are killed."""
    first: int | None = None
    deadline = float("inf")
    while None in [each.poll() for each in ranks]:  # Every rank is asked: any() would stop at the first that lives.
        if first is None:
            first = next((rank for rank, each in enumerate(ranks) if each.returncode), None)
            deadline = time.monotonic() + GRACE_S if first is not None else deadline
        if time.monotonic() > deadline:
            for each in ranks:
                if each.poll() is None:
                    each.kill()
        time.sleep(0.05)
    failed = [rank for rank, each in enumerate(ranks) if each.returncode]
    # An error that all ranks agree on is rank 0's to tell, whoever ended first.
    if 0 in failed and first is not None and ranks[0].returncode == ranks[first].returncode > 0:
        return 0
    return first if first is not None else (failed[0] if failed else None)


def _show(log: IO[bytes], rank: int) -> None:
    log.seek(0)
    text = log.read().decode(errors="replace")
    sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()[-40:]))


def _code(rank: int, status: int) -> int:
    """A shell's exit code for a process's end: 128 + n after signal n, which is told, since the process could not."""
    if status < 0:
        hint = ": out of memory, or killed by hand" if -status == signal.SIGKILL else ""
        sys.stderr.write(f"intarsia: rank {rank} was ended by {signal.Signals(-status).name}{hint}.\n")
    return status if status >= 0 else 128 - status
