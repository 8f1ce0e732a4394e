"""The command itself: started, limited, watched, reaped. Used by the first process of the namespaces, and without namespaces by the outer process."""

from __future__ import annotations

import ctypes  # noqa: F401  Loaded before limits of memory are in force.
import errno
import os
import resource
import signal
import time
from collections.abc import Mapping
from typing import Any

from intarsia_sandbox.inside import filter as system_calls
from intarsia_sandbox.inside import kernel, usage

FIRST_LOOK, LONGEST_LOOK = 0.002, 0.02
"""Seconds between two looks at what the command uses: short at first, since most commands are."""
GRACE_CPU_SECONDS = 1


def start(
    command: list[str], environment: dict[str, str], folder: str, stdin: int, limits: dict[str, Any], user: int | None, confined: bool
) -> int:
    """Fork and execute; the process's number. OSError where the program cannot be executed, with the reason of the kernel."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        try:
            os.close(reading)
            os.dup2(stdin, 0)
            writing = _move(writing, 3)
            os.closerange(4, _most_files())
            os.setpgid(0, 0)
            os.chdir(folder)
            os.umask(0o077)
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            for each in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(each, signal.SIG_DFL)
            if confined:
                kernel.drop_capabilities(user)
            _limit(limits)
            kernel.no_new_privileges()
            program = system_calls.program(os.uname().machine)
            if program is not None:
                kernel.install_filter(program)
            os.execvpe(command[0], command, environment)
        except BaseException as error:
            os.write(writing, str(error.errno if isinstance(error, OSError) else 0).encode())
        finally:
            os._exit(127)
    os.close(writing)
    said = os.read(reading, 64)
    os.close(reading)
    if said:
        os.waitpid(number, 0)
        code = int(said) or errno.EINVAL
        raise OSError(code, os.strerror(code))
    return number


def _move(descriptor: int, to: int) -> int:
    """The same file as another descriptor, closed when a program is executed."""
    if descriptor != to:
        os.dup2(descriptor, to, inheritable=False)
    return to


def _most_files() -> int:
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 20)


def _limit(limits: dict[str, Any]) -> None:
    """Bounds of each process. What processes use together is looked at by `watch`."""
    cpu = max(1, int(-(-limits["cpu_seconds"] // 1)))
    bounds = {
        "CPU": (cpu, cpu + GRACE_CPU_SECONDS),
        "AS": (limits["memory_bytes"],) * 2,
        "FSIZE": (limits["file_bytes"],) * 2,
        "NPROC": (limits["processes"],) * 2,
        "NOFILE": (256, 256),
        "CORE": (0, 0),
        "MEMLOCK": (0, 0),
        "MSGQUEUE": (0, 0),
        "RTPRIO": (0, 0),
        "NICE": (0, 0),
    }
    for name, bound in bounds.items():
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            resource.setrlimit(number, bound if hard == resource.RLIM_INFINITY else (min(bound[0], hard), min(bound[1], hard)))


class Watch:
    """Looks at what the descendants of `init` use, and says which limit they have passed."""

    def __init__(self, init: int, limits: dict[str, Any], proc: str = "/proc"):
        self._init, self._limits, self._proc = init, limits, proc
        self._end = time.monotonic() + limits["seconds"]
        self._own: Mapping[tuple[int, int], float] = {}
        self._gone = 0.0
        self.pause = FIRST_LOOK

    def passed(self, reaped_cpu_seconds: float) -> str | None:
        """The limit; None while all are kept."""
        self.pause = min(self.pause * 1.5, LONGEST_LOOK)
        if time.monotonic() >= self._end:
            return "seconds"
        used = usage.measure(self._init, self._proc)
        self._gone += sum(seconds for process, seconds in self._own.items() if process not in used.own_cpu_seconds)
        self._own = used.own_cpu_seconds
        # The kernel forgets what children used that end while their parent ignores them: of these counts what was seen.
        if max(used.cpu_seconds + reaped_cpu_seconds, sum(self._own.values()) + self._gone) >= self._limits["cpu_seconds"]:
            return "cpu_seconds"
        most = self._limits["memory_bytes"]
        if used.memory_bytes > most and usage.proportional(used, self._proc) > most:
            return "memory"
        return None


def ended(status: int, cpu_seconds: float, limits: dict[str, Any]) -> dict[str, Any]:
    """How a process ended, from its wait status."""
    if os.WIFEXITED(status):
        return {"ended": "exit", "status": os.WEXITSTATUS(status)}
    number = os.WTERMSIG(status)
    by_limit = number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_seconds >= limits["cpu_seconds"])
    return {"ended": "cpu_seconds" if by_limit else "signal", "status": number}


def children_cpu_seconds() -> float:
    """CPU time of the children that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
