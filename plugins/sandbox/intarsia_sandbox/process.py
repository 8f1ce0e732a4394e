"""The sandbox `process`: a command in Linux namespaces of its own, with limits and a filter of system calls. Torch-free.

For each command an interpreter without site packages is started (`intarsia_sandbox.inside.outer`); it makes the namespaces, the file system and the command, and outlives them. This
side writes to it, reads what the command prints, and closes its standard input when the answer is no longer wanted: it then ends all that there is. It does so as well when this process dies.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import json
import os
import platform
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError

from intarsia_sandbox.config import ProcessSandboxConfig
from intarsia_sandbox.contracts import Completed, SandboxLimits
from intarsia_sandbox.inside import filter as system_calls

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}
OVERDUE_S = 60.0
"""Seconds past a command's own limit after which the sandbox is taken to be broken."""
FLOOD = 16
"""A command that prints this many times what is kept of it is ended."""
LEAST_MEMORY = 16 << 20
START = "import sys; sys.path.append(sys.argv[1]); from intarsia_sandbox.inside.outer import main; main()"
HOW_TO = (
    "Namespaces of an unprivileged user are switched on by `sysctl -w user.max_user_namespaces=15000`, where the kernel has them by `kernel.unprivileged_userns_clone=1` "
    "and `kernel.apparmor_restrict_unprivileged_userns=0`; a container must be started with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined` (Docker, Podman) or a pod "
    "with `hostUsers: false`. Only for code that you trust: `unconfined=true` on the sandbox runs it with limits alone."
)


class ProcessSandbox:
    """A Sandbox (`intarsia_sandbox.contracts`). Commands may run side by side."""

    def __init__(self, config: ProcessSandboxConfig):
        self._config = config
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        if config.at_once is not None and config.at_once < 1:
            raise UsageError(f"process sandbox: at_once is {config.at_once}; it must be at least 1, or none for one for each CPU.")
        for path in config.paths:
            if not os.path.isabs(path) or not os.path.exists(path) or os.path.normpath(path) == "/":
                raise UsageError(f"process sandbox: paths names {path!r}; it must be an absolute path that exists, and not the root.")

    def confinement(self) -> Mapping[str, str]:
        """What confines a command, by what it is confined from. UsageError where it would not be and that is not asked for."""
        given = probe(self._paths())
        limits = "limits of CPU time, wall time, memory, output and size of files"
        filtered = (
            "a filter of system calls (seccomp)"
            if system_calls.program(platform.machine())
            else f"nothing: no filter for {platform.machine()}"
        )
        if self._is_confined(given):
            return {
                "network": "a network namespace without devices",
                "files": "a root of its own: what Python needs, for reading, and a folder in memory",
                "processes": "a pid namespace" + ("" if given["proc"] else "; no /proc"),
                "users": "a user namespace, no capability, no new privileges",
                "system calls": filtered,
                "resources": limits + ", number of processes",
            }
        return {"system calls": filtered, "users": "no new privileges", "resources": limits, "unconfined": given["refused"]}

    async def run(
        self, command: Sequence[str], files: Mapping[str, str | bytes] | None = None, stdin: str = "", limits: SandboxLimits | None = None
    ) -> Completed:
        """Run a command to its end, or to a limit."""
        bounds = limits or SandboxLimits()
        _check(command, files or {}, bounds)
        given = await asyncio.to_thread(probe, self._paths())
        confined = self._is_confined(given)
        asked = _request(command, files or {}, stdin, bounds, self._paths(), unconfined=not confined)
        # A clock that others' commands use up would make results depend on what else is running.
        turns = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._config.at_once or len(os.sched_getaffinity(0))))
        async with turns:
            begin = time.monotonic()
            running = await _Running.start(asked)
            try:
                answer, output, errors, flooded = await running.finish(bounds)
            finally:
                await running.end()
        return _completed(command, answer, output, errors, flooded, time.monotonic() - begin, bounds)

    def _is_confined(self, given: Mapping[str, Any]) -> bool:
        """Whether the kernel gives what confines. UsageError where it does not and the config insists."""
        refused = given.get("refused")
        if refused and not self._config.unconfined:
            raise UsageError(f"process sandbox: this kernel does not give {refused}, and a command would run unconfined. {HOW_TO}")
        return not refused

    def _paths(self) -> tuple[str, ...]:
        return readable(self._config.paths)


def build(config: ProcessSandboxConfig) -> ProcessSandbox:
    """The sandbox."""
    return ProcessSandbox(config)


@functools.lru_cache(maxsize=8)
def readable(more: tuple[str, ...]) -> tuple[str, ...]:
    """What a command may read: programs and libraries of the system, this Python, and what the config names. Nothing below another one."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    wanted = [*SYSTEM, *python, *(os.path.realpath(path) for path in python), *map(os.path.normpath, more)]
    there = sorted({path for path in wanted if os.path.lexists(path) and path != "/"})
    return tuple(path for path in there if not any(path.startswith(other + "/") for other in there if not os.path.islink(other)))


@functools.lru_cache(maxsize=8)
def probe(paths: tuple[str, ...]) -> Mapping[str, Any]:
    """What the kernel gives, tried once: `proc` (whether a /proc of one's own), or `refused` (what it does not give, in words). EnvironmentFailure where even that cannot be found out."""
    limits = SandboxLimits(seconds=30.0, cpu_seconds=30.0)
    asked = _request([sys.executable, "-I", "-S", "-c", ""], {}, "", limits, paths, unconfined=False)
    if sys.platform != "linux":
        return {"refused": f"namespaces (this is {sys.platform}, and they are Linux's)"}
    reading, writing = os.pipe()
    try:
        asked["answer"] = writing
        with subprocess.Popen(
            _command(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=(writing,), env=ENVIRONMENT
        ) as process:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(_frame(asked))
            process.stdin.flush()
            errors = process.stderr.read(4096)
            process.wait(OVERDUE_S)
        os.set_blocking(reading, False)
        answer = _answer(reading)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFailure("sandbox", f"the sandbox cannot be tried out: {error}") from error
    finally:
        os.close(reading)
        os.close(writing)
    if "refused" in answer or (answer.get("ended") == "exit" and answer.get("status") == 0):
        return answer
    raise EnvironmentFailure(
        "sandbox", f"Python does not start in the sandbox: {answer or 'no answer'} {errors.decode(errors='replace').strip()[-500:]}"
    )


def _command() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", START, str(Path(__file__).resolve().parent.parent)]


def _request(
    command: Sequence[str], files: Mapping[str, str | bytes], stdin: str, limits: SandboxLimits, paths: Sequence[str], unconfined: bool
) -> dict[str, Any]:
    """What the outer process is asked."""
    links = {path: os.readlink(path) for path in paths if os.path.islink(path)}
    return {
        "command": list(command),
        "environment": ENVIRONMENT,
        "files": {
            name: base64.b64encode(content.encode() if isinstance(content, str) else content).decode() for name, content in files.items()
        },
        "stdin": base64.b64encode(stdin.encode("utf-8", "surrogatepass")).decode(),
        "limits": dataclasses.asdict(limits),
        "paths": [path for path in paths if path not in links],
        "links": links,
        "unconfined": unconfined,
    }


def _frame(asked: Mapping[str, Any]) -> bytes:
    content = json.dumps(asked).encode()
    return b"%d\n%b" % (len(content), content)


def _answer(reading: int) -> dict[str, Any]:
    """What the outer process has answered; empty where it has not."""
    try:
        found: dict[str, Any] = json.loads(os.read(reading, 1 << 16) or b"{}")
    except BlockingIOError:
        return {}
    return found


def _check(command: Sequence[str], files: Mapping[str, str | bytes], limits: SandboxLimits) -> None:
    """Refuse what cannot be asked of a sandbox."""
    if not command or not all(isinstance(part, str) and "\0" not in part for part in command) or not command[0]:
        raise UsageError(f"process sandbox: a command is a list of texts without NUL that begins with a program, not {list(command)!r}.")
    for name in files:
        parts = name.split("/")
        if not name or "\0" in name or any(part in ("", ".", "..") or len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
            raise UsageError(
                f"process sandbox: {name!r} is no name of a file in the command's folder: names are relative, without `.` and `..`."
            )
    wrong = [field for field, value in dataclasses.asdict(limits).items() if not 0 < value < float("inf")]
    if wrong:
        raise UsageError(f"process sandbox: limits.{wrong[0]} is {getattr(limits, wrong[0])}; it must be above 0 and finite.")
    if limits.memory_bytes < LEAST_MEMORY:
        raise UsageError(
            f"process sandbox: limits.memory_bytes is {limits.memory_bytes}, with which no program starts; the least is {LEAST_MEMORY}."
        )


class _Collected:
    """What a stream gave: the first bytes of it, and how many there were."""

    def __init__(self, most: int):
        self._most, self.total = most, 0
        self._kept = bytearray()

    def take(self, data: bytes) -> None:
        """Some more."""
        self.total += len(data)
        self._kept += data[: max(0, self._most - len(self._kept))]

    @property
    def cut(self) -> bool:
        """Whether something was left out."""
        return self.total > self._most

    @property
    def text(self) -> str:
        """What was kept."""
        return self._kept.decode("utf-8", "replace")


class _Running:
    """A started outer process."""

    def __init__(self, process: asyncio.subprocess.Process, reading: int, asked: dict[str, Any]):
        self._process, self._reading, self._asked = process, reading, asked
        self._flood = asyncio.Event()

    @staticmethod
    async def start(asked: dict[str, Any]) -> _Running:
        """Start it."""
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(writing,), env=ENVIRONMENT
            )
        except BaseException as error:
            os.close(reading)
            if isinstance(error, OSError):
                raise EnvironmentFailure("sandbox", f"no process could be started: {error}", retry=True) from error
            raise
        finally:
            os.close(writing)
        os.set_blocking(reading, False)
        return _Running(process, reading, {**asked, "answer": writing})

    async def finish(self, limits: SandboxLimits) -> tuple[dict[str, Any], _Collected, _Collected, bool]:
        """Answer, output, errors, and whether it was ended for printing too much. EnvironmentFailure where no answer comes."""
        output, errors = _Collected(limits.output_bytes), _Collected(limits.output_bytes)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        try:
            async with asyncio.timeout(limits.seconds + OVERDUE_S):
                self._process.stdin.write(_frame(self._asked))
                await asyncio.gather(
                    self._drain(),
                    self._read(self._process.stdout, output, FLOOD * limits.output_bytes),
                    self._read(self._process.stderr, errors, FLOOD * limits.output_bytes),
                    self._process.wait(),
                )
        except TimeoutError:
            raise EnvironmentFailure(
                "sandbox", f"the sandbox did not end a command within {OVERDUE_S:g} s of its limit", retry=True
            ) from None
        return _answer(self._reading), output, errors, self._flood.is_set()

    async def _drain(self) -> None:
        assert self._process.stdin
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            return  # It has ended, and its answer says why.

    async def _read(self, stream: asyncio.StreamReader, into: _Collected, most: int) -> None:
        while data := await stream.read(1 << 16):
            into.take(data)
            if into.total > most and not self._flood.is_set():
                self._flood.set()
                self._let_go()

    def _let_go(self) -> None:
        """The answer is not wanted any more."""
        assert self._process.stdin
        self._process.stdin.close()

    async def end(self) -> None:
        """Nothing is left when this returns, also where the caller is cancelled meanwhile."""
        task = asyncio.ensure_future(self._end())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task], timeout=OVERDUE_S)
            raise

    async def _end(self) -> None:
        self._let_go()
        try:
            async with asyncio.timeout(OVERDUE_S):
                await asyncio.gather(
                    self._process.wait(), *(self._discard(stream) for stream in (self._process.stdout, self._process.stderr))
                )
        except TimeoutError:
            self._process.kill()  # The namespaces' first process dies with it, and all others with that.
            await self._process.wait()
        finally:
            os.close(self._reading)

    async def _discard(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and await stream.read(1 << 16):
            pass


def _completed(
    command: Sequence[str],
    answer: dict[str, Any],
    output: _Collected,
    errors: _Collected,
    flooded: bool,
    seconds_s: float,
    limits: SandboxLimits,
) -> Completed:
    """The answer in the contract's words."""
    if flooded:
        return Completed("output", 9, output.text, errors.text, True, seconds_s)
    if "unstarted" in answer:
        raise UsageError(f"process sandbox: {command[0]!r} cannot be executed in the sandbox: {answer['unstarted']}.")
    if "ended" not in answer:
        reason = answer.get("failed") or answer.get("refused") or f"no answer ({errors.text.strip()[-500:] or 'its process was killed'})"
        raise EnvironmentFailure("sandbox", f"{reason}", retry=True)
    return Completed(answer["ended"], answer["status"], output.text, errors.text, output.cut or errors.cut, seconds_s)
