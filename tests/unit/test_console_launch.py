"""`--processes N`: which rank's end is the run's, and that nobody waits for ranks that wait for a dead one."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import IO

import pytest
from intarsia_console import launch


def start(monkeypatch: pytest.MonkeyPatch, *programs: str, grace_s: float = 600.0) -> tuple[int, float]:
    """Exit code and seconds of a launch whose ranks run these Python programs."""

    def start_one(arguments: object, rank: int, processes: int, folder: str, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", programs[rank]], stdout=log, stderr=log)

    monkeypatch.setattr(launch, "_start", start_one)
    monkeypatch.setattr(launch, "GRACE_S", grace_s)
    begin = time.monotonic()
    return launch.launch([], len(programs)), time.monotonic() - begin


SLEEP = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    "fails", ["import sys; sys.exit('the first error')", "import os, sys; print('the first error', flush=True); os.kill(os.getpid(), 9)"]
)
def test_a_rank_that_fails_ends_the_others_and_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: str
) -> None:
    code, seconds = start(monkeypatch, SLEEP, fails, SLEEP, grace_s=0.5)
    assert code == (137 if "kill" in fails else 1) and seconds < 500
    text = capfd.readouterr().err
    assert "[rank 1] the first error" in text
    assert ("rank 1 was ended by SIGKILL: out of memory" in text) == ("kill" in fails)


def test_what_all_ranks_agree_on_is_told_by_rank_0(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    late = "import time; time.sleep(0.2); print('told'); raise SystemExit(4)"
    code, _ = start(monkeypatch, late, "print('told'); raise SystemExit(4)")
    assert code == 4 and "[rank" not in capfd.readouterr().err


def test_no_failure_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, "", "import time; time.sleep(0.3)")[0] == 0
