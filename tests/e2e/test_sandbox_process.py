"""The sandbox `process` where the kernel gives less, where it is cancelled or killed, and what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError
from intarsia_sandbox import process
from intarsia_sandbox.config import ProcessSandboxConfig
from intarsia_sandbox.contracts import Completed, SandboxLimits
from intarsia_sandbox.inside import filter as system_calls
from intarsia_sandbox.inside import usage
from intarsia_sandbox.process import ProcessSandbox, build

PYTHON = [sys.executable, "-I", "-S", "-c"]
LIMITS = SandboxLimits(seconds=400.0, cpu_seconds=60.0, memory_bytes=256 << 20)
REFUSED = {"refused": "namespaces (unshare: Operation not permitted)", "errno": 1}

# A user namespace in which no further one may be made: what a hardened kernel or a container does.
IN_A_USER_NAMESPACE = """
import ctypes, json, os, sys
user, group = os.getuid(), os.getgid()
if ctypes.CDLL(None).unshare(0x10000000) != 0:
    print("none"); sys.exit()
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    with open(f"/proc/self/{name}", "w") as file: file.write(text)
with open("/proc/sys/user/max_user_namespaces", "w") as file: file.write(sys.argv[1])
import asyncio
from intarsia.errors import UsageError
from intarsia_sandbox.config import ProcessSandboxConfig
from intarsia_sandbox.contracts import SandboxLimits
from intarsia_sandbox.process import build
box = build(ProcessSandboxConfig(unconfined=sys.argv[2] == "unconfined"))
code = sys.argv[4] or "import os; status = open('/proc/self/status').read() if os.path.exists('/proc/self') else ''; print(os.getpid(), os.path.exists(%r), 'CapEff:\\\\t0000000000000000' in status or not status)" % sys.argv[3]
try:
    words = box.confinement()
    done = asyncio.run(box.run([sys.executable, "-I", "-S", "-c", code], limits=SandboxLimits()))
    print(json.dumps([dict(words), done.ended, done.status, done.output, done.errors]))
except UsageError as error:
    print(json.dumps(str(error)))
"""


def in_a_user_namespace(namespaces: int, how: str, code: str = ""):
    """What a sandbox says where so many user namespaces may be made."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_USER_NAMESPACE, str(namespaces), how, __file__, code],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if done.stdout == "none\n":
        pytest.skip("this kernel gives not even the first user namespace")
    return json.loads(done.stdout)


@pytest.fixture
def confined() -> None:
    """For tests that need namespaces."""
    if "refused" in process.probe(process.readable(())):
        pytest.skip("this kernel gives no namespaces")


def run(code: str, *, sandbox: ProcessSandbox | None = None, **settings):
    box = sandbox or build(ProcessSandboxConfig())
    return asyncio.run(box.run([*PYTHON, code], limits=dataclasses.replace(LIMITS, **settings)))


def test_a_kernel_without_namespaces_is_refused_and_told_how_to_get_them():
    said = in_a_user_namespace(0, "confined")
    assert said.startswith("process sandbox: this kernel does not give namespaces (unshare: ")
    assert all(words in said for words in ("user.max_user_namespaces", "--security-opt", "unconfined=true", "unconfined"))


def test_refusal_is_before_anything_runs(monkeypatch):
    monkeypatch.setattr(process, "probe", lambda paths: REFUSED)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", lambda *arguments, **named: pytest.fail("something was started"))
    box = build(ProcessSandboxConfig())
    with pytest.raises(UsageError, match="does not give namespaces"):
        box.confinement()
    with pytest.raises(UsageError, match="does not give namespaces"):
        run("print(1)", sandbox=box)


def test_a_user_that_is_not_root_is_confined_as_well(confined):
    """In a user namespace of one user nobody else can be mapped, as for any user without rights."""
    said = in_a_user_namespace(10, "confined")
    words, *done = said
    assert words["files"].startswith("a root of its own") and done == ["exit", 0, "2 False True\n", ""], said


def test_where_there_is_one_user_the_watching_process_cannot_be_bound(confined):
    """It is the command's own user's then, who may otherwise take its files, its CPU or its turn away, interrupt it, or have it chosen where memory runs out."""
    code = """
import os, resource, time
for name, call in {
    "limits": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "priority of the user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "priority of the group": lambda: os.setpriority(os.PRIO_PGRP, 1, 19),
    "policy": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    "processors": lambda: os.sched_setaffinity(1, os.sched_getaffinity(0)),
    "choice where memory runs out": lambda: os.open("/proc/1/oom_score_adj", os.O_WRONLY),
}.items():
    try:
        print("ESCAPED", name, call())
    except OSError as error:
        assert isinstance(error, PermissionError) or error.errno == 30, error
for number in range(1, 65):
    os.kill(1, number)
time.sleep(0.1)
os.sched_setaffinity(0, os.sched_getaffinity(0)), resource.prlimit(0, resource.RLIMIT_NOFILE, (100, 100)), os.setpriority(os.PRIO_PROCESS, 0, 19)
print("HELD")
"""
    said = in_a_user_namespace(10, "confined", code)
    assert said[1:] == ["exit", 0, "HELD\n", ""], said


def test_unconfined_runs_where_it_is_asked_for_and_says_so():
    said = in_a_user_namespace(0, "unconfined")
    words, ended, status, output, errors = said
    assert words["unconfined"].startswith("namespaces (unshare") and "network" not in words
    assert (ended, status, errors) == ("exit", 0, "") and output.split()[1] == "True", said


@pytest.fixture
def unconfined(monkeypatch) -> ProcessSandbox:
    monkeypatch.setattr(process, "probe", lambda paths: REFUSED)
    return build(ProcessSandboxConfig(unconfined=True))


@pytest.mark.parametrize(
    ("code", "settings", "ended"),
    [
        ("import time; time.sleep(3600)", {"seconds": 1.0}, "seconds"),
        ("while True: pass", {"seconds": 600.0, "cpu_seconds": 1.0}, "cpu_seconds"),
        (
            "import os, time\nfor _ in range(4):\n  if os.fork() == 0: x = bytearray(os.urandom(1 << 20) * 100); time.sleep(3600)\ntime.sleep(3600)",
            {},
            "memory",
        ),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", {}, "output"),
    ],
)
def test_unconfined_commands_have_limits(unconfined, code, settings, ended):
    assert run(code, sandbox=unconfined, **settings).ended == ended


def test_unconfined_commands_leave_nothing(unconfined):
    """Not even a process that has left its group and its session, nor the folder."""
    code = "import os, time\nprint(os.getcwd(), flush=True)\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: print(os.getpid(), flush=True); open('told', 'w'); time.sleep(3600)\n  os._exit(0)\nwhile not os.path.exists('told'): time.sleep(0.01)"
    done = run(code, sandbox=unconfined)
    folder, left = done.output.split()
    assert not Path(folder).exists() and not Path(f"/proc/{left}").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_dies_with_the_process_that_asked_for_it(how, confined):
    marker = f"orphan-{os.getpid()}-{how}"
    code = (
        "import asyncio, sys\nfrom intarsia_sandbox.config import ProcessSandboxConfig\nfrom intarsia_sandbox.contracts import SandboxLimits\nfrom intarsia_sandbox.process import build\n"
        f"asyncio.run(build(ProcessSandboxConfig()).run([sys.executable, '-c', 'import time; time.sleep(3600)', {marker!r}], limits=SandboxLimits(seconds=3000.0)))"
    )
    asker = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: inside(marker))
    asker.send_signal(how)
    asker.wait(600)
    until(lambda: not inside(marker))


def test_a_command_dies_with_the_process_between(confined):
    """Also where the process between the platform and the command is killed, which nobody inside can do."""
    marker = f"between-{os.getpid()}"

    async def kill() -> None:
        running = asyncio.ensure_future(
            build(ProcessSandboxConfig()).run(
                [*PYTHON, "import time; time.sleep(3600)", marker], limits=dataclasses.replace(LIMITS, seconds=3000.0)
            )
        )
        while not inside(marker):
            await asyncio.sleep(0.02)
        children = [
            int(entry.name) for entry in Path("/proc").glob("[0-9]*") if parent_of(entry) == os.getpid() and b"outer" in command_of(entry)
        ]
        for number in children:
            os.kill(number, signal.SIGKILL)
        with pytest.raises(EnvironmentFailure, match="its process was killed") as caught:
            await asyncio.wait_for(running, 600)
        assert caught.value.boundary == "sandbox" and caught.value.retry

    asyncio.run(kill())
    until(lambda: not inside(marker))


def test_a_cancelled_command_is_gone_when_run_returns(confined):
    marker = f"cancelled-{os.getpid()}"

    async def cancel() -> None:
        running = asyncio.ensure_future(
            build(ProcessSandboxConfig()).run(
                [*PYTHON, "import time; time.sleep(3600)", marker], limits=dataclasses.replace(LIMITS, seconds=3000.0)
            )
        )
        while not inside(marker):
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not inside(marker)

    asyncio.run(cancel())


def until(what, seconds: float = 600.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


def command_of(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def inside(marker: str) -> list[int]:
    """Processes whose command ends in the marker: the command itself, not who asked for it."""
    found = [entry for entry in Path("/proc").glob("[0-9]*") if command_of(entry).rstrip(b"\0").endswith(marker.encode())]
    return [int(entry.name) for entry in found]


# In a process of its own, in which nobody else opens and closes.
HELD_DESCRIPTORS = """
import asyncio, os, sys
from intarsia_sandbox.config import ProcessSandboxConfig
from intarsia_sandbox.contracts import SandboxLimits
from intarsia_sandbox.process import build
box, counts = build(ProcessSandboxConfig(unconfined=True)), []
for _ in range(3):
    asyncio.run(box.run([sys.executable, "-I", "-S", "-c", "print(1)"], limits=SandboxLimits(seconds=400.0, cpu_seconds=60.0)))
    counts.append(len(os.listdir("/proc/self/fd")))
print(*counts)
"""


def test_descriptors_are_given_back():
    done = subprocess.run([sys.executable, "-c", HELD_DESCRIPTORS], capture_output=True, text=True, timeout=600, check=True)
    first, second, third = map(int, done.stdout.split())
    assert first == second == third


def test_a_large_input_that_nobody_reads_and_files_that_do_not_fit(confined):
    box = build(ProcessSandboxConfig())
    done = asyncio.run(box.run([*PYTHON, "print(1)"], stdin="x" * (4 << 20), limits=LIMITS))
    assert done.output == "1\n"
    with pytest.raises(EnvironmentFailure, match="do not fit"):
        asyncio.run(box.run([*PYTHON, "print(1)"], {"big": b"x" * (4 << 20)}, limits=dataclasses.replace(LIMITS, file_bytes=1 << 20)))


def test_further_paths_can_be_read_and_not_written(tmp_path, confined):
    (tmp_path / "data").write_text("shown")
    tmp_path.chmod(0o755)  # Where root asks, the command runs as nobody.
    box = build(ProcessSandboxConfig(paths=(str(tmp_path),)))
    code = f"print(open({str(tmp_path / 'data')!r}).read())\ntry: open({str(tmp_path / 'data')!r}, 'w')\nexcept OSError as error: print(error.errno)"
    assert run(code, sandbox=box).output == "shown\n30\n"


def test_commands_wait_for_their_turn_and_their_clock_with_them():
    box = build(ProcessSandboxConfig(unconfined=True, at_once=1))

    async def several() -> list[Completed]:
        code = "import time; begin = time.monotonic(); time.sleep(0.4); print(begin)"
        return await asyncio.gather(*(box.run([*PYTHON, code], limits=LIMITS) for _ in range(3)))

    start = time.monotonic()
    found = asyncio.run(several())
    begun = sorted(float(done.output) for done in found)
    assert all(later - earlier >= 0.4 for earlier, later in itertools.pairwise(begun))
    assert sum(done.seconds_s for done in found) <= time.monotonic() - start, "the time in which one waits is not its own"
    with pytest.raises(UsageError, match="at_once"):
        build(ProcessSandboxConfig(at_once=0))


@pytest.mark.parametrize("paths", [("relative",), ("/",), ("/no/such/folder",), ("/usr/..",)])
def test_paths_that_would_open_everything_are_refused(paths):
    with pytest.raises(UsageError, match="paths names"):
        build(ProcessSandboxConfig(paths=paths))


@pytest.mark.parametrize(
    ("command", "files", "settings", "words"),
    [
        (["a\0b"], {}, {}, "without NUL"),
        ([""], {}, {}, "without NUL"),
        (PYTHON, {"a/../b": ""}, {}, "no name of a file"),
        (PYTHON, {"a//b": ""}, {}, "no name of a file"),
        (PYTHON, {"x" * 300: ""}, {}, "no name of a file"),
        (PYTHON, {}, {"memory_bytes": 1000}, "no program starts"),
        (PYTHON, {}, {"seconds": float("inf")}, "finite"),
        (PYTHON, {}, {"processes": 0}, "above 0"),
        (["./no-such-program"], {}, {}, "cannot be executed"),
    ],
)
def test_what_makes_no_sense_is_refused(command, files, settings, words):
    with pytest.raises(UsageError, match=words):
        asyncio.run(build(ProcessSandboxConfig(unconfined=True)).run(command, files, limits=dataclasses.replace(LIMITS, **settings)))


def test_what_confines_is_said(confined):
    words = build(ProcessSandboxConfig()).confinement()
    assert set(words) == {"network", "files", "processes", "users", "system calls", "resources"}


def test_no_more_waits_in_a_socket_than_is_counted():
    """The kernel takes a message in whole as long as there is any room."""
    for small in range(20):
        with contextlib.ExitStack() as stack:
            one, _ = (stack.enter_context(each) for each in socket.socketpair())
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(small):
                    one.send(b"x")
                while True:
                    one.send(bytes(65536))
            (waiting,) = struct.unpack("i", fcntl.ioctl(one, termios.TIOCOUTQ, bytes(4)))
            assert waiting <= usage.SOCKET_BYTES


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filters_jump_to_lines_that_are_there(machine):
    """Every path through the program ends in a return."""
    program = system_calls.program(machine)
    lines = [struct.unpack("HBBI", program[place : place + 8]) for place in range(0, len(program), 8)]
    assert len(lines) < 4096 and lines[-1][0] == system_calls.RETURN

    def decide(
        number: int,
        first: int = 0,
        second: int = 0,
        third: int = 0,
        fourth: int = 0,
        architecture: int = system_calls.ARCHITECTURES[machine],
    ) -> int:
        place, value = 0, 0
        while True:
            code, yes, no, k = lines[place]
            if code == system_calls.RETURN:
                return k
            if code == system_calls.LOAD:
                value = {0: number, 4: architecture, 16: first, 24: second, 32: third, 40: fourth}[k]
                place += 1
            elif code == system_calls.AND:
                value &= k
                place += 1
            else:
                met = {system_calls.EQUAL: value == k, system_calls.AT_LEAST: value >= k, system_calls.ANY_BIT: bool(value & k)}[code]
                place += 1 + (yes if met else no)

    column = list(system_calls.ARCHITECTURES).index(machine)
    for name, numbers in system_calls.DENIED.items():
        if numbers[column] is not None:
            assert decide(numbers[column]) == system_calls.FAIL | 1, name
    clone, pair, option, ioctl, mmap = (
        each[column]
        for each in (system_calls.CLONE, system_calls.SOCKETPAIR, system_calls.SETSOCKOPT, system_calls.IOCTL, system_calls.MMAP)
    )
    allowed = [decide(clone, 17), decide(pair, 1, 0x80801), decide(option, 3, 1, 8), decide(ioctl, 0, 0x5401)]
    allowed += [decide(mmap, 0, 4096, 3, 0x22), decide(mmap, 0, 4096, 3, 0x1)]
    denied = [decide(clone, 0x10000011), decide(ioctl, 0, 0x5412), decide(ioctl, 0, 0x541C), decide(option, 3, 1, 7)]
    denied += [decide(pair, 1, 2), decide(pair, 1, 0x80802), decide(pair, 1, 5), decide(pair, 30, 1)]
    denied += [decide(mmap, 0, 4096, 3, 0x21), decide(mmap, 0, 4096, 3, 0x4023)]
    for each in system_calls.OF_FIRST.values():
        allowed, denied = [*allowed, decide(each[column], 0), decide(each[column], 2)], [*denied, decide(each[column], 1)]
    priority = system_calls.SETPRIORITY[column]
    allowed, denied = [*allowed, decide(priority, 0, 0)], [*denied, decide(priority, 0, 1), decide(priority, 1, 1), decide(priority, 2, 0)]
    assert set(allowed) == {system_calls.ALLOW}
    assert set(denied) == {system_calls.FAIL | 1}
    assert decide(435) == decide(1000) == system_calls.FAIL | 38
    assert decide(0, architecture=0x40000003) == system_calls.KILL
    closed = {numbers[column] for numbers in system_calls.DENIED.values()} | {435, pair}
    assert all(decide(number) == system_calls.ALLOW for number in range(470) if number not in closed)


def test_a_probe_that_fails_is_a_failure_of_the_sandbox(monkeypatch):
    monkeypatch.setattr(process, "_command", lambda: [sys.executable, "-c", "raise SystemExit('broken')"])
    process.probe.cache_clear()
    try:
        with pytest.raises(EnvironmentFailure, match=r"does not start in the sandbox: no answer broken|cannot be tried out"):
            build(ProcessSandboxConfig()).confinement()
    finally:
        process.probe.cache_clear()
