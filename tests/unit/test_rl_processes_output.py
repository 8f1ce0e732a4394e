"""What a dead process printed last is all there, however late it is read and whoever still holds its output."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from intarsia_rl.processes import local
from intarsia_rl.processes.local import Output


def test_what_is_left_behind_delays_nothing_and_is_still_logged(tmp_path: Path) -> None:
    read, write = os.pipe()
    output = Output(read, tmp_path / "logs" / "tools.log")
    os.write(write, b"".join(b"line %d\n" % number for number in range(1000)) + b"no end")
    last = output.last().splitlines()
    assert last == [f"  | line {number}" for number in range(961, 1000)] + ["  | no end"]
    os.write(write, b"; of a child that lives on\n")
    os.close(write)
    output._thread.join()
    assert (tmp_path / "logs" / "tools.log").read_text().endswith("line 999\nno end; of a child that lives on\n")


def test_a_reader_that_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go, found = threading.Event(), threading.Event(), list[str]()

    def slowly(text: str, most: int) -> str:
        reading.set()
        go.wait(600)
        return text

    monkeypatch.setattr(local, "cut", slowly)
    read, write = os.pipe()
    output = Output(read, None)
    os.write(write, b"the reason\n")
    os.close(write)
    assert reading.wait(600)
    asks = threading.Thread(target=lambda: found.append(output.last()))
    asks.start()
    asks.join(1.5)
    assert not found, "it gave up"
    go.set()
    asks.join()
    assert found == ["  | the reason"]


def test_a_log_that_cannot_be_written_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    (tmp_path / "file").write_text("")
    read, write = os.pipe()
    output = Output(read, tmp_path / "file" / "tools.log")
    assert output.last() == ""
    output._thread.join()
    os.close(write)
    (error,) = failed
    assert isinstance(error.exc_value, OSError)
