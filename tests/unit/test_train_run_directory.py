"""The run directory's lock and files, the event log, and asking a run to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from intarsia.errors import UsageError
from intarsia.train.events import EventLog, append_event
from intarsia.train.run_directory import RunDirectory, default_directory
from intarsia.train.signals import LAUNCHER, StopSignals
from intarsia_console.events import read_events
from intarsia_console.train_command import newest_run

HOLD = """
import sys
from pathlib import Path
from intarsia.train.run_directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
directory.create(resume=False)
directory.write("recipe.json", {})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_in_use_is_refused_until_its_holder_is_killed(tmp_path) -> None:
    path = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match=f"in use by another run: process {holder.pid} on "):
        RunDirectory(path).create(resume=True)
    holder.kill()
    holder.wait()
    again = RunDirectory(path)
    again.create(resume=True)
    again.release()
    RunDirectory(path).create(resume=True)


def test_an_existing_run_and_a_missing_one_say_what_to_do(tmp_path) -> None:
    path = tmp_path / "run"
    with pytest.raises(UsageError, match="nothing to resume"):
        RunDirectory(path).create(resume=True)
    directory = RunDirectory(path)
    directory.create(resume=False)
    directory.write("recipe.json", {"a": 1})
    directory.release()
    assert json.loads((path / "recipe.json").read_text()) == {"a": 1}
    again = RunDirectory(path)  # a build that failed left a recipe, but no step and no checkpoint
    again.create(resume=False)
    again.release()
    EventLog(path).write("step", step=1)
    with pytest.raises(UsageError, match=f"--resume {path}"):
        RunDirectory(path).create(resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot use"):
        RunDirectory(tmp_path / "file").create(resume=False)


def test_default_directories_are_new_and_the_newest_run_is_found(tmp_path) -> None:
    first = default_directory("family/size", tmp_path)
    assert first.name.startswith("family-size-")
    first.mkdir()
    assert default_directory("family/size", tmp_path) != first
    with pytest.raises(UsageError, match="no run of 'family/size'"):
        newest_run("family/size", tmp_path)
    for age, name in ((20, "family-size-1"), (10, "family-size-2"), (0, "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text("{}")
        os.utime(tmp_path / name / "recipe.json", (1e9 - age, 1e9 - age))
    assert newest_run("family/size", tmp_path).name == "family-size-2"


def test_events_are_one_object_a_line_and_survive_a_cut_line(tmp_path) -> None:
    EventLog(tmp_path).write("step", step=1, loss=float("nan"), path=tmp_path, metrics={"a": float("inf"), "b": 2})
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"schema": 1, "event": "st')
    append_event(tmp_path, "generate", prompt="ä")
    events = list(read_events(tmp_path))
    assert [event["event"] for event in events] == ["step", "generate"]
    assert events[0]["loss"] is None and events[0]["metrics"] == {"a": None, "b": 2} and events[0]["path"] == str(tmp_path)
    assert all(event["schema"] == 1 and event["time_s"] > 0 and event["elapsed_s"] >= 0 for event in events)
    assert list(read_events(tmp_path / "missing")) == []


class Sink:
    def __init__(self, fails: bool) -> None:
        self.fails, self.seen, self.closed = fails, [], False

    def write(self, event) -> None:
        self.seen.append(event["event"])
        if self.fails:
            raise ValueError("no")

    def close(self) -> None:
        self.closed = True


def test_a_failing_sink_is_switched_off_and_reported_once(tmp_path, caplog) -> None:
    good, bad = Sink(False), Sink(True)
    log = EventLog(tmp_path, [("bad", bad), ("good", good)])
    log.write("a")
    log.write("b")
    log.close()
    assert (good.seen, bad.seen, good.closed, bad.closed) == (["a", "b"], ["a"], True, False)
    (said,) = (record.getMessage() for record in caplog.records if record.name == "intarsia.train")
    assert "bad failed and is switched off: ValueError: no" in said


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path, caplog) -> None:
    log, sink = EventLog(tmp_path / "missing"), Sink(False)
    log.add_sink("sink", sink)
    log.write("a")
    log.write("b")
    (said,) = (record.getMessage() for record in caplog.records if record.name == "intarsia.train")
    assert sink.seen == ["a", "b"] and "events.jsonl" in said


def test_signals_ask_once_and_interrupt_the_second_time() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.asked() is None
        signal.raise_signal(signal.SIGTERM)
        assert signals.asked() == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            signals.asked()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_whose_launcher_is_gone_stops(monkeypatch) -> None:
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    assert StopSignals().asked() is None
    monkeypatch.setenv(LAUNCHER, "999999999")
    assert StopSignals().asked() == "the launcher is gone"


def test_events_file_is_valid_json_line_by_line(tmp_path) -> None:
    log = EventLog(tmp_path)
    for number in range(3):
        log.write("warning", message=f"line\nbreak {number}")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["message"] for line in lines] == [f"line\nbreak {number}" for number in range(3)]
