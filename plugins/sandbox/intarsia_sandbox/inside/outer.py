"""The process between the platform and a command. It is asked on standard input, which stays open as long as the answer is wanted, and answers on a descriptor of its own.

A request is one line with a length, then that many bytes of JSON (contents of files in base64). The answer is one line of JSON: how the command ended, or what the kernel refused.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

from intarsia_sandbox.inside import command, files, init, kernel, usage

NOBODY = 65534
WAIT_S = 30.0
"""Longest wait for the namespaces."""


class Answer(Exception):
    """What is to be answered; ends the work."""

    def __init__(self, **value: Any):
        super().__init__(str(value))
        self.value = value


def main() -> None:
    """Do what is asked, answer, end."""
    asked = _asked()
    kernel.prctl("subreaper", kernel.PR_SET_CHILD_SUBREAPER, 1)
    answer = int(asked["answer"])
    os.set_inheritable(answer, False)
    try:
        run = unconfined if asked["unconfined"] else confined
        value = run(asked)
    except Answer as ready:
        value = ready.value
    except Exception as error:
        value = {"failed": f"{type(error).__name__}: {error}"}
    os.write(answer, json.dumps(value).encode() + b"\n")


def _asked() -> dict[str, Any]:
    length = bytearray()
    while not length.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)
        length += byte
    rest, parts = int(length), []
    while rest:
        part = os.read(0, min(rest, 1 << 20))
        if not part:
            sys.exit(1)
        parts.append(part)
        rest -= len(part)
    asked = json.loads(b"".join(parts))
    asked["files"] = {name: base64.b64decode(content) for name, content in asked["files"].items()}
    asked["stdin"] = base64.b64decode(asked["stdin"])
    return asked


# ---------------------------------------------------------------- in namespaces


def confined(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the command in namespaces of its own. What is not given is answered as `refused`."""
    reading, report = os.pipe()
    go_reading, go = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reading)
        os.close(go)
        os.close(int(asked["answer"]))
        init.enter(report, go_reading, asked)
    for descriptor in (report, go_reading, 1, 2):  # The command's output has its end when the command has.
        os.close(descriptor)
    lines = _Lines(reading)
    _expect(lines.next(), "unshared")
    os.write(go, init.TWO_USERS if _map_users(middle) else init.GO)
    number = _expect(lines.next(), "init")
    os.waitpid(middle, 0)
    try:
        os.write(go, init.GO)
        _expect(lines.next(), "ready")
        os.write(go, init.GO)
        has_proc = _expect(lines.next(), "proc")
        value = _wait(lines, number, asked["limits"], watched=has_proc)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        # The kernel lets the first process of a pid namespace end when all others have.
        os.waitpid(number, 0)
    return {"proc": has_proc, **value}


class _Lines:
    """Values that come through a pipe, one on each line."""

    def __init__(self, reading: int):
        self.reading, self._rest = reading, b""

    def next(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The next one; empty at the end, or where none comes in time."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not select.select([self.reading], [], [], max(0.0, end - time.monotonic()))[0]:
                return {}
            part = os.read(self.reading, 65536)
            if not part:
                return {}
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


def _expect(value: dict[str, Any], name: str) -> Any:
    if name not in value:
        raise Answer(**(value or {"failed": f"the sandbox's own process ended before it was {name}"}))
    return value[name]


def _map_users(middle: int) -> bool:
    """Give the namespace its users: where root asks, root's builds it and `nobody` runs the command; else the one who asks is the command's user. Whether there are two."""
    own = os.geteuid(), os.getegid()
    if own[0] == 0:
        with contextlib.suppress(OSError):
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{middle}/{name}", "w") as file:
                    file.write(f"0 0 1\n{files.USER} {NOBODY} 1\n")
            return True
        with open("/proc/self/uid_map") as file:
            if file.read().split()[:3] == [
                "0",
                "0",
                "4294967295",
            ]:  # The kernel's first user namespace, where no limit of processes holds for user 0.
                raise Answer(refused=f"another user for the command (root may not map user {NOBODY} here)")
    with open(f"/proc/{middle}/setgroups", "w") as file:
        file.write("deny")
    for name, mine in (("uid_map", own[0]), ("gid_map", own[1])):
        with open(f"/proc/{middle}/{name}", "w") as file:
            file.write(f"{files.USER} {mine} 1\n")
    return False


def _wait(lines: _Lines, number: int, limits: dict[str, Any], watched: bool) -> dict[str, Any]:
    """Until the command has ended, has passed a limit, or is not wanted any more."""
    watch = command.Watch(number, limits)
    end = time.monotonic() + limits["seconds"] + 1.0  # The first process ends it in time; this is for when it cannot.
    while True:
        ready = select.select([0, lines.reading], [], [], 0.1 if watched else watch.pause)[0]
        if lines.reading in ready:
            return lines.next(1.0) or {"failed": "the sandbox's first process was killed"}
        if 0 in ready:
            raise Answer(cancelled=True)
        passed = ("seconds" if time.monotonic() >= end else None) if watched else watch.passed(0.0)
        if passed:
            return {"ended": passed, "status": int(signal.SIGKILL)}


# ---------------------------------------------------------------- without namespaces


def unconfined(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the command with limits alone, in a folder of its own that is removed afterwards, and end all that it has started."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        home, temporary = os.path.join(folder, "work"), os.path.join(folder, "tmp")
        os.mkdir(home, 0o700)
        os.mkdir(temporary, 0o700)
        files.write_files(home, asked["files"], None)
        stdin = files.open_input(temporary, asked["stdin"])
        environment = {**asked["environment"], "HOME": home, "TMPDIR": temporary}
        try:
            number = command.start(asked["command"], environment, home, stdin, asked["limits"], None, confined=False)
        except OSError as error:
            return {"unstarted": error.strerror}
        os.close(1)
        os.close(2)
        try:
            return _wait_unconfined(number, asked["limits"])
        finally:
            _end_all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_unconfined(number: int, limits: dict[str, Any]) -> dict[str, Any]:
    watch = command.Watch(os.getpid(), limits)
    while True:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            return command.ended(status, command.children_cpu_seconds(), limits)
        passed = watch.passed(command.children_cpu_seconds())
        if passed:
            return {"ended": passed, "status": int(signal.SIGKILL)}
        if select.select([0], [], [], watch.pause)[0]:
            raise Answer(cancelled=True)


def _end_all() -> None:
    """End every descendant: those whose parents have ended are this process's own children."""
    while True:
        for number in usage.measure(os.getpid()).processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


if __name__ == "__main__":
    main()
