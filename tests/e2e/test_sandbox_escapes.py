"""Attempts to get out of the sandbox `process`, or to take more than is given. `docs/how-to/sandbox.md` lists them by name.

An attempt is a program that prints ESCAPED when it got somewhere and HELD when it did not. Those that harm nobody are run outside of the sandbox as well, and must escape there:
an attempt that never succeeds would prove nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from intarsia.errors import UsageError
from intarsia_sandbox.config import ProcessSandboxConfig
from intarsia_sandbox.contracts import Completed, SandboxLimits
from intarsia_sandbox.process import ProcessSandbox, build
from intarsia_testing.sandbox import processes_with

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "sandbox.md"
LIMITS = SandboxLimits(seconds=400.0, cpu_seconds=60.0, memory_bytes=256 << 20, file_bytes=8 << 20, processes=12, output_bytes=20_000)

PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys, time
FACTS = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)

def escaped(what):
    print("ESCAPED", what, flush=True)
    os._exit(0)

def attempt(call, *arguments):
    "What a call gives; None where it is refused."
    try:
        return call(*arguments)
    except OSError:
        return None

def system_call(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *(ctypes.c_long(x) if isinstance(x, int) else x for x in arguments))
"""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """`outside`: the program is harmless and must print ESCAPED without a sandbox. `x86`: it knows only that machine's numbers of system calls."""

    code: str
    outside: bool = False
    x86: bool = False


ATTEMPTS = {
    "network-loopback": Attempt('socket.create_connection(("127.0.0.1", FACTS["port"]), 5) and escaped("connected")', outside=True),
    "network-internet": Attempt('for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n  for family in (socket.AF_INET, socket.AF_INET6, 16, 17):\n    attempt(socket.socket, family, kind) and escaped((family, kind))'),
    "network-abstract-socket": Attempt('s = socket.socket(socket.AF_UNIX)\ns.connect("\\0" + FACTS["abstract"])\nescaped("connected")', outside=True),
    "network-unix-socket": Attempt('s = socket.socket(socket.AF_UNIX)\ns.connect(FACTS["unix"])\nescaped("connected")', outside=True),
    "files-read": Attempt('escaped(open(FACTS["secret"]).read())', outside=True),
    "files-write": Attempt('open(FACTS["folder"] + "/written", "w").write("x")\nescaped("written")', outside=True),
    "files-home": Attempt('[escaped(path) for path in FACTS["homes"] if attempt(os.listdir, path) and set(os.listdir(path)) & set(FACTS["home_holds"])]', outside=True),
    "files-symlink": Attempt('os.symlink(FACTS["secret"], "link")\nescaped(open("link").read())', outside=True),
    "files-parent-folders": Attempt('escaped(open("../" * 40 + FACTS["secret"]).read())', outside=True),
    "files-python-installation": Attempt('for path in (os.__file__, sys.executable, "/usr/bin/env", "/etc/passwd"):\n  attempt(open, path, "r+b") and escaped(path)\n  attempt(os.chmod, path, 0o777) is None or escaped(path)\n  attempt(open, os.path.dirname(path) + "/x", "w") and escaped(path)\n  attempt(os.unlink, "/etc/passwd") is None or escaped(path)\nfor path in ("/", "/dev", "/etc", "/proc", "/usr/bin"):\n  attempt(os.mkdir, path + "/x") is None or escaped(path)'),
    "files-old-root": Attempt('for path in ("/proc/1/root", "/proc/1/cwd", "/proc/self/root" + FACTS["folder"], "/.."+ FACTS["folder"]):\n  attempt(os.listdir, path) and escaped(path)', outside=True),
    "files-handles": Attempt('handle = ctypes.create_string_buffer(136)\nctypes.c_uint.from_buffer(handle).value = 128\nmount = ctypes.c_int()\nlibc.name_to_handle_at(-100, b"/usr", handle, ctypes.byref(mount), 0) == 0 and libc.open_by_handle_at(os.open("/usr", os.O_RDONLY), handle, os.O_RDONLY) >= 0 and escaped("opened")'),
    "processes-of-others": Attempt('own = {os.getpid(), 1}\nothers = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in own]\nothers and escaped(others)', outside=True),
    "processes-environment": Attempt('for name in os.listdir("/proc"):\n  if name.isdigit() and FACTS["variable"] in (attempt(lambda: open(f"/proc/{name}/environ").read()) or ""): escaped(name)', outside=True),
    "processes-first-one": Attempt('for name in ("mem", "environ", "maps", "fd", "root", "cwd", "exe"):\n  path = f"/proc/1/{name}"\n  (attempt(open, path, "rb") or attempt(os.listdir, path) or attempt(os.readlink, path)) and escaped(path)'),
    "signals": Attempt('attempt(os.kill, FACTS["victim"], signal.SIGKILL) is None and not attempt(os.kill, FACTS["victim"], 0)\ntry:\n  os.kill(FACTS["victim"], 0)\n  escaped("found")\nexcept ProcessLookupError: pass\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nattempt(os.kill, -1, signal.SIGTERM)'),
    "signals-first-process": Attempt('for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV): attempt(os.kill, 1, number)\ntime.sleep(0.1)'),
    "ptrace": Attempt('child = os.fork()\nif child == 0: time.sleep(600); os._exit(0)\nattached = libc.ptrace(16, child, 0, 0) == 0\nos.kill(child, 9)\nattached and escaped("attached")\nlibc.ptrace(0, 0, 0, 0) == 0 and escaped("traced")', outside=True),
    "memory-of-others": Attempt('child = os.fork()\nif child == 0: time.sleep(600); os._exit(0)\nbuffer = ctypes.create_string_buffer(8)\nclass V(ctypes.Structure): _fields_ = (("b", ctypes.c_void_p), ("n", ctypes.c_size_t))\nlocal, far = V(ctypes.addressof(buffer), 8), V(id(FACTS), 8)\nread = libc.process_vm_readv(child, ctypes.byref(local), 1, ctypes.byref(far), 1, 0) > 0\nos.kill(child, 9)\nread and escaped("read")', outside=True),
    "namespaces-unshare": Attempt('for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000, 0x08000000, 0x04000000, 0x02000000):\n  libc.unshare(flag) == 0 and escaped(hex(flag))', outside=True),
    "namespaces-clone": Attempt('for flag in (0x10000000, 0x40000000, 0x20000000):\n  pid = system_call({"x86_64": 56, "aarch64": 220}[os.uname().machine], flag | 17, 0, 0, 0, 0)\n  if pid == 0: os._exit(0)\n  pid > 0 and escaped(hex(flag))', outside=True),
    "namespaces-clone3": Attempt('arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)\npid = system_call(435, ctypes.byref(arguments), 88)\nif pid == 0: os._exit(0)\npid > 0 and escaped(pid)', outside=True),
    "namespaces-enter": Attempt('for kind in ("mnt", "net", "pid", "user"):\n  file = attempt(os.open, f"/proc/1/ns/{kind}", os.O_RDONLY) or attempt(os.open, f"/proc/self/ns/{kind}", os.O_RDONLY)\n  file and libc.setns(file, 0) == 0 and escaped(kind)'),
    "mount": Attempt('libc.mount(b"none", b".", b"tmpfs", 0, None) == 0 and escaped("tmpfs")\nlibc.mount(b"/", b".", None, 4096 | 16384, None) == 0 and escaped("bind")\nlibc.mount(b"none", b"/usr", None, 32 | 4096, None) == 0 and escaped("writable")\nlibc.umount2(b"/proc", 2) == 0 and escaped("umount")\nsystem_call(430, b"tmpfs", 0) >= 0 and escaped("fsopen")\nsystem_call(428, -100, b"/", 1) >= 0 and escaped("open_tree")'),
    "chroot": Attempt('os.mkdir("a")\nattempt(os.chroot, "a") is None and libc.chroot(b"a") != 0 or escaped("chroot")', outside=os.geteuid() == 0),
    "setuid": Attempt('import shutil, subprocess\nshutil.copy(sys.executable, "mine")\nos.chmod("mine", 0o6755)\nfor user in (0, 1, 65534, 1001):\n  attempt(os.setuid, user) is None or os.getuid() == 1000 or escaped(user)\nfor path in ("/usr/bin/su", "/usr/bin/passwd", "/usr/bin/mount", "./mine"):\n  if os.path.exists(path):\n    child = os.fork()\n    if child == 0:\n      os.execv(path, [path, "-I", "-S", "-c", "import os; os._exit(7 if os.geteuid() != os.getuid() else 0)"])\n    os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 and escaped(path)\nattempt(os.setgroups, [0]) is None or os.getgroups() == [] or escaped("groups")'),
    "capabilities": Attempt('open("file", "w").close()\nattempt(os.chown, "file", 0, 0) is None or escaped("chown")\nattempt(os.nice, -5) is None or escaped("nice")\nstatus = attempt(lambda: open("/proc/self/status").read())\nfor name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):\n  if status and int(status.partition(name + ":")[2].split()[0], 16): escaped(name)\nif status and status.partition("NoNewPrivs:")[2].split()[0] != "1": escaped("new privileges")'),
    "devices": Attempt('import stat\nfor kind, number in ((stat.S_IFBLK, os.makedev(8, 0)), (stat.S_IFCHR, os.makedev(1, 1)), (stat.S_IFCHR, os.makedev(1, 3))):\n  attempt(os.mknod, "device", kind | 0o600, number) is None and not os.path.exists("device") or escaped(number)\nset(os.listdir("/dev")) - {"null", "zero", "full", "random", "urandom"} and escaped(os.listdir("/dev"))', outside=os.geteuid() == 0),
    "terminal": Attempt('attempt(os.open, "/dev/tty", os.O_RDWR) and escaped("tty")\nattempt(os.openpty) and escaped("pty")\nlibc.ioctl(0, 0x5412, b"x") == 0 and escaped("typed")'),
    "kernel-settings": Attempt('for path in ("/sys", "/proc/sys", "/proc/kcore", "/proc/sysrq-trigger", "/proc/kallsyms", "/proc/bus", "/proc/cmdline", "/sys/fs/cgroup", "/proc/config.gz"):\n  os.path.exists(path) and escaped(path)', outside=True),
    "kernel-interfaces": Attempt('numbers = {"bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "kexec_load": 246, "init_module": 175, "delete_module": 176, "syslog": 103, "personality": 135, "modify_ldt": 154, "fanotify_init": 300, "swapoff": 168, "acct": 163}\nfor name, number in numbers.items():\n  ctypes.set_errno(0)\n  result = system_call(number, 0, 0, 0, 0, 0)\n  result >= 0 and escaped(name)\n  ctypes.get_errno() == errno.EPERM or escaped((name, ctypes.get_errno()))', x86=True, outside=True),
    "kernel-new-calls": Attempt('for number in (470, 480, 600, 1000):\n  ctypes.set_errno(0)\n  system_call(number, 0, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS or escaped(number)'),
    "kernel-clock-and-name": Attempt('attempt(time.clock_settime, time.CLOCK_REALTIME, time.time()) is None or escaped("clock")\nattempt(socket.sethostname, "x") is None or escaped("name")\nlibc.reboot(0) == 0 and escaped("reboot")\nos.uname().nodename == "sandbox" or escaped(os.uname().nodename)'),
    "keyring": Attempt('key = libc.syscall(248, b"user", b"sandbox-test", b"x", ctypes.c_size_t(1), -2)\nkey > 0 and escaped("added")\nlibc.syscall(250, 0, -4, 0) > 0 and escaped("asked")', x86=True, outside=True),
    "shared-memory": Attempt('os.path.exists("/dev/shm") and escaped("/dev/shm")\nlibc.shmget(0x5A5A, 4096, 0o1600) >= 0 and escaped("shmget")\nlibc.msgget(0x5A5A, 0o1600) >= 0 and escaped("msgget")\nlibc.semget(0x5A5A, 1, 0o1600) >= 0 and escaped("semget")\nhasattr(os, "memfd_create") and attempt(os.memfd_create, "x") and escaped("memfd")', outside=True),
    "queues-of-sockets": Attempt('for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n  attempt(socket.socket, socket.AF_UNIX, kind) and escaped(kind)\nfor kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET): attempt(socket.socketpair, socket.AF_UNIX, kind) and escaped(kind)\none, other = socket.socketpair()\none.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)\nescaped("widened")', outside=True),
    "memory-shared": Attempt('import mmap\nattempt(mmap.mmap, -1, 4096) and escaped("anonymous")\nattempt(lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096)) and escaped("zero")', outside=True),
    "queues-of-requests": Attempt('libc.syscall({"x86_64": 206, "aarch64": 0}[os.uname().machine], 1, ctypes.byref(ctypes.c_ulong())) == 0 and escaped("io_setup")', outside=True),
    "queues-of-events": Attempt('libc.inotify_init() >= 0 and escaped("inotify")', outside=True),
    "pages-in-sockets": Attempt('reading, writing = os.pipe()\nfile = os.open("file", os.O_RDWR | os.O_CREAT)\nos.write(file, bytes(4096))\nattempt(os.splice, file, writing, 1, 0) and escaped("splice")\nattempt(os.sendfile, socket.socketpair()[0].fileno(), file, 0, 1) and escaped("sendfile")', outside=True),
    "pages-in-pipes": Attempt('reading, writing = os.pipe()\nclass V(ctypes.Structure): _fields_ = (("b", ctypes.c_void_p), ("n", ctypes.c_size_t))\nlibc.vmsplice(writing, ctypes.byref(V(id(FACTS), 8)), ctypes.c_size_t(1), 0) > 0 and escaped("vmsplice")', outside=True),
    "descriptors": Attempt('fds = [fd for fd in range(3, 256) if attempt(os.fstat, fd)]\nfds and escaped(fds)', outside=True),
    "environment": Attempt('FACTS["variable"] in str(dict(os.environ)) and escaped("secret")', outside=True),
    "other-users-of-the-machine": Attempt('len(open("/etc/passwd").readlines()) > 1 and escaped("users")\nos.path.exists("/etc/shadow") and escaped("shadow")\nos.path.exists("/etc/hosts") and escaped("hosts")', outside=True),
}  # fmt: skip


def setup_module() -> None:
    """Without namespaces there is nothing to escape from: that a run is refused then is what `test_sandbox_process` tests."""
    with contextlib.suppress(UsageError):
        build(ProcessSandboxConfig()).confinement()
        return
    pytest.skip("this kernel gives no namespaces", allow_module_level=True)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """What there is to find outside: a secret file, a server on each kind of socket, a process, a variable, an open file."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text("the secret")
    os.environ["SANDBOX_TEST_SECRET"] = "hunter2-hunter2"
    opened = os.open(folder / "secret", os.O_RDONLY)
    os.set_inheritable(opened, True)
    victim = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"])
    servers = []
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, f"\0intarsia-{os.getpid()}"),
        (socket.AF_UNIX, str(folder / "s")),
    ):
        server = socket.socket(family)
        server.bind(address)
        server.listen()
        servers.append(server)
        threading.Thread(target=accept, args=(server,), daemon=True).start()
    home = Path.home()
    yield {
        "folder": str(folder),
        "secret": str(folder / "secret"),
        "port": servers[0].getsockname()[1],
        "abstract": f"intarsia-{os.getpid()}",
        "unix": str(folder / "s"),
        "victim": victim.pid,
        "variable": "hunter2-hunter2",
        "homes": [str(home), "/root", "/home"],
        "home_holds": [entry.name for entry in home.iterdir() if entry.name != ".pyenv"],
    }
    assert victim.poll() is None, "an attempt has ended a process outside"
    victim.kill()
    victim.wait()
    for server in servers:
        server.close()
    os.close(opened)
    del os.environ["SANDBOX_TEST_SECRET"]


def accept(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def run(code: str, facts: dict | None = None, limits: SandboxLimits = LIMITS, sandbox: ProcessSandbox | None = None) -> Completed:
    import json

    box = sandbox or build(ProcessSandboxConfig())
    return asyncio.run(
        box.run([sys.executable, "-I", "-S", "main.py"], {"main.py": PRELUDE + code + "\nprint('HELD')\n"}, json.dumps(facts or {}), limits)
    )


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempts_are_held(name, facts):
    attempt = ATTEMPTS[name]
    if attempt.x86 and os.uname().machine != "x86_64":
        pytest.skip("it knows another machine's numbers of system calls")
    done = run(attempt.code, facts)
    assert "ESCAPED" not in done.output, done
    # A refused call ends the program, or the program goes on to its last line.
    assert done.output.strip() == "HELD" or done.status == 1, done
    assert done.ended == "exit" and ("Error" in done.errors or done.status == 0), done


@pytest.mark.parametrize("name", [name for name, attempt in ATTEMPTS.items() if attempt.outside])
def test_attempts_would_succeed_outside(name, facts, tmp_path):
    import json

    if ATTEMPTS[name].x86 and os.uname().machine != "x86_64":
        pytest.skip("it knows another machine's numbers of system calls")
    (tmp_path / "main.py").write_text(PRELUDE + ATTEMPTS[name].code + "\nprint('HELD')\n")
    command = [sys.executable, "-I", "-S", "main.py"]
    done = subprocess.run(
        command, input=json.dumps(facts), cwd=tmp_path, capture_output=True, text=True, timeout=600, close_fds=False, check=False
    )
    assert done.stdout.startswith("ESCAPED"), done


# ---------------------------------------------------------------- taking more than is given

TAKING = {
    "fork-bomb": "while True:\n  try: os.fork()\n  except OSError: pass",
    "thread-bomb": "import threading\nmade = 0\ntry:\n  while made < 1000: threading.Thread(target=time.sleep, args=(3600,), daemon=True).start(); made += 1\nexcept RuntimeError: pass\nmade < 12 or escaped(made)\nprint('HELD', flush=True)\nos._exit(0)",
    "memory-one-process": "try:\n  hoard = bytearray(400 << 20)\n  escaped('taken')\nexcept MemoryError: pass",
    "memory-many-processes": "for _ in range(6):\n  if os.fork() == 0: hoard = bytearray(os.urandom(1 << 20) * 100); time.sleep(3600)\ntime.sleep(3600)",
    "memory-threads": "import threading\ndef hold():\n  time.sleep(0.2)\n  hoard = bytearray(os.urandom(1 << 20) * 100)\n  time.sleep(3600)\nfor _ in range(5):\n  if os.fork() == 0:\n    threading.Thread(target=hold).start()\n    libc.syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)\ntime.sleep(30)\nescaped('taken')",
    "memory-in-sockets": "for _ in range(9):\n  if os.fork() == 0:\n    kept = []\n    try:\n      while True:\n        kept += socket.socketpair()\n        for one in kept[-2:]:\n          one.setblocking(False)\n          try:\n            while True: one.send(bytes(65536))\n          except BlockingIOError: pass\n    except OSError: time.sleep(3600)\ntime.sleep(30)\nescaped('taken')",
    "disk-one-file": "try:\n  with open('big', 'wb', 0) as file:\n    for _ in range(64): file.write(bytes(1 << 20))\n  escaped('written')\nexcept OSError: pass",
    "disk-many-files": "made = 0\ntry:\n  while made < 64:\n    with open(f'f{made}', 'wb', 0) as file: file.write(bytes(1 << 20))\n    made += 1\nexcept OSError: pass\nmade <= 8 or escaped(made)",
    "disk-many-names": "made = 0\ntry:\n  while made < 100000: os.mkdir(f'd{made}'); made += 1\nexcept OSError: pass\nmade < 20000 or escaped(made)",
    "time-sleep": "time.sleep(3600)",
    "time-loop": "while True: pass",
    "time-many-processes": "os.fork(); os.fork()\nwhile True: pass",
    "time-deaf": "for number in range(1, 65):\n  try: signal.signal(number, signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: pass",
    "time-ignored-children": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor _ in range(20):\n  if os.fork() == 0:\n    while time.process_time() < 0.3: pass\n    os._exit(0)\n  attempt(os.wait)\nescaped('computed')",
    "time-limits-raised": "import resource\nfor name in ('RLIMIT_CPU', 'RLIMIT_AS', 'RLIMIT_NPROC', 'RLIMIT_FSIZE'):\n  try: resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY,) * 2); escaped(name)\n  except ValueError: pass",
    "output-flood": "while True: os.write(1, b'x' * 65536)",
    "output-flood-on-errors": "while True: os.write(2, b'x' * 65536)",
    "output-kept-open": "if os.fork() == 0: time.sleep(3600)",
    "child-left-behind": "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(3600)\n  os._exit(0)\ntime.sleep(0.05)",
    "first-process-starved": "os.setpriority(os.PRIO_PROCESS, 0, 19)\nfor _ in range(8):\n  if os.fork() == 0:\n    while True: pass\ntime.sleep(3600)",
}
ENDS = {
    "fork-bomb": {"seconds", "cpu_seconds"},
    "memory-many-processes": {"memory"},
    "memory-threads": {"memory"},
    "memory-in-sockets": {"memory"},
    "time-sleep": {"seconds"},
    "time-loop": {"cpu_seconds"},
    "time-many-processes": {"cpu_seconds"},
    "time-deaf": {"cpu_seconds"},
    "time-ignored-children": {"cpu_seconds"},
    "output-flood": {"output"},
    "output-flood-on-errors": {"output"},
    "first-process-starved": {"seconds", "cpu_seconds"},
}
SHORT = dataclasses.replace(LIMITS, seconds=2.0, cpu_seconds=10.0)
LITTLE_CPU = dataclasses.replace(LIMITS, seconds=600.0, cpu_seconds=0.5)


@pytest.mark.parametrize("name", TAKING)
def test_no_more_is_taken_than_is_given(name):
    marker = f"taking-{name}-{os.getpid()}"
    box = build(ProcessSandboxConfig())
    limits = LITTLE_CPU if ENDS.get(name) == {"cpu_seconds"} else SHORT if "seconds" in ENDS.get(name, ()) else LIMITS
    command = [sys.executable, "-I", "-S", "main.py", marker]
    begin = time.monotonic()
    done = asyncio.run(box.run(command, {"main.py": PRELUDE + TAKING[name] + "\nprint('HELD')\n"}, "{}", limits))
    seconds = time.monotonic() - begin
    assert done.ended in ENDS.get(name, {"exit"}), done
    assert "ESCAPED" not in done.output and (name in ENDS or "HELD" in done.output), done
    assert len(done.output) <= limits.output_bytes and len(done.errors) <= limits.output_bytes
    assert seconds < limits.seconds + 400, "it was not ended in time"
    assert not processes_with(marker), "a process is left"


def test_other_system_call_tables_are_closed():
    """x32 has numbers of its own, which no list of denied ones holds."""
    if os.uname().machine != "x86_64":
        pytest.skip("x32 is x86_64's")
    done = run("system_call(0x40000000 | 39)\nescaped('x32')")
    assert (done.ended, done.status) == ("signal", 31), done


def test_nothing_is_left_for_the_next_command():
    assert run("open('left', 'w').write('x')\nopen(os.environ['TMPDIR'] + '/left', 'w').write('x')").output == "HELD\n"
    assert run("(os.listdir('.') != ['main.py'] or os.listdir(os.environ['TMPDIR'])) and escaped(os.listdir('.'))").output == "HELD\n"


def test_commands_at_one_time_do_not_see_each_other():
    code = "open('mine', 'w').close()\ntime.sleep(0.5)\nothers = [n for n in os.listdir('/proc') if n.isdigit()] if os.path.exists('/proc/self') else ['1', '2']\nlen(others) == 2 or escaped(others)"
    box = build(ProcessSandboxConfig())

    async def both() -> list[Completed]:
        return await asyncio.gather(
            *(box.run([sys.executable, "-I", "-S", "-c", PRELUDE + code + "\nprint('HELD')"], stdin="{}", limits=LIMITS) for _ in range(3))
        )

    assert [done.output for done in asyncio.run(both())] == ["HELD\n"] * 3


def test_every_attempt_is_in_the_docs():
    text = DOCS.read_text(encoding="utf-8")
    missing = [name for name in (*ATTEMPTS, *TAKING) if f"`{name}`" not in text]
    assert not missing
    assert len(ATTEMPTS) + len(TAKING) > 40
