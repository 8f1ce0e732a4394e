"""Inside the namespaces: a process that makes them, and the first one in them, which builds the file system, runs the command, and takes everything with it when it ends."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from intarsia_sandbox.inside import command, files, kernel

GO, TWO_USERS = b".", b"2"


def tell(report: int, value: dict[str, Any]) -> None:
    """A line for the outer process."""
    os.write(report, json.dumps(value).encode() + b"\n")


def enter(report: int, go: int, asked: dict[str, Any]) -> None:
    """Make the namespaces, and the first process in them; never returns. Reports `unshared`, waits for its users to be mapped, then reports `init` with the process's number."""
    try:
        kernel.unshare(kernel.NAMESPACES)
        tell(report, {"unshared": True})
        users = os.read(go, 1)
        if users not in (GO, TWO_USERS):
            os._exit(1)
        number = os.fork()
        if number == 0:
            first(report, go, asked, users == TWO_USERS)
        tell(report, {"init": number})
        os._exit(0)
    except OSError as error:
        tell(report, {"refused": f"namespaces ({error})"})
        os._exit(1)


def first(report: int, go: int, asked: dict[str, Any], two_users: bool) -> None:
    """Process 1. It dies with the outer process, and all others with it."""
    try:
        # The outer process is the parent once the one between has ended, which the first word says; the second says that it still lives.
        if os.read(go, 1) != GO:
            os._exit(1)
        kernel.prctl("pdeathsig", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        tell(report, {"ready": True})
        if os.read(go, 1) != GO:
            os._exit(1)
        kernel.prctl("dumpable", kernel.PR_SET_DUMPABLE, 0)
        # The kernel spares process 1 what others in its namespace send, but for signals that it has a handler for, as Python has for this one.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        try:
            has_proc = files.build(asked["paths"], asked["links"], asked["limits"]["file_bytes"])
            kernel.set_host_name(b"sandbox")
        except (OSError, StopIteration) as error:
            tell(report, {"refused": f"a file system of its own ({error})"})
            os._exit(1)
        tell(report, {"proc": has_proc})
        _run(report, asked, files.USER if two_users else None, has_proc)
    except BaseException as error:
        tell(report, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


def _run(report: int, asked: dict[str, Any], user: int | None, has_proc: bool) -> None:
    """Run the command as `user` (None: as who this is) to its end, or to a limit."""
    try:
        files.write_files(files.HOME, asked["files"], files.USER)
        stdin = files.open_input(files.TEMPORARY, asked["stdin"])
    except OSError as error:
        tell(report, {"failed": f"the command's files do not fit: {error}"})
        return
    environment = {**asked["environment"], "HOME": files.HOME, "TMPDIR": files.TEMPORARY}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        number = command.start(asked["command"], environment, files.HOME, stdin, asked["limits"], user, confined=True)
    except OSError as error:
        tell(report, {"unstarted": error.strerror})
        return
    for descriptor in (0, 1, 2, stdin):
        os.close(descriptor)
    watch = command.Watch(1, asked["limits"]) if has_proc else None
    while True:
        # Without a /proc the outer process watches.
        signal.sigtimedwait({signal.SIGCHLD}, watch.pause if watch else 3600.0)
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if ended == number:
                tell(report, command.ended(status, command.children_cpu_seconds(), asked["limits"]))
                return
            if ended == 0:
                break
        passed = watch.passed(command.children_cpu_seconds()) if watch else None
        if passed:
            tell(report, {"ended": passed, "status": int(signal.SIGKILL)})
            return
