"""How processes that others start end, and what is said of it."""

from __future__ import annotations

import signal
import sys

import pytest
from intarsia_rl.processes.child import Child, status_text


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL, out of memory or killed by hand"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_ends_are_told_in_words(end: str, words: str) -> None:
    """Whatever the signal: who waits for a process would wait for ever if nothing could be said."""
    told: list[str] = []
    child = Child([sys.executable, "-c", f"import os, signal, sys; {end}"], lambda status: told.append(status_text(status)))
    child.join()
    assert told == [words]
