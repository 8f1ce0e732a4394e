"""Calls of the kernel that Python has no names for."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x00000080
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_MOVE, MS_REC = 1024, 2048, 4096, 8192, 16384
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 1, 4, 22, 24, 28
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4
SECCOMP_MODE_FILTER = 2
NO_ROOT_LOCKED = 0b11101111
"""Secure bits: user 0 is nobody special, changing users gives no capability, none is kept or raised, and these bits stay."""
CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class KernelError(OSError):
    """A call that failed, with its name: what the kernel does not give."""

    def __init__(self, call: str, number: int):
        super().__init__(number, os.strerror(number))
        self.call = call

    def __str__(self) -> str:
        return f"{self.call}: {self.strerror}"


def _check(call: str, result: int) -> int:
    if result < 0:
        raise KernelError(call, ctypes.get_errno())
    return result


def unshare(flags: int) -> None:
    """Leave the parent's namespaces."""
    _check("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(f"mount {source} on {target}", _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def enter_root(folder: str) -> None:
    """Make a mount point the root of everything, and let go of the old one."""
    os.chdir(folder)
    number = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine)
    if number is not None and _libc.syscall(ctypes.c_long(number), b".", b".") == 0:
        _check("umount old root", _libc.umount2(b".", MNT_DETACH))
    else:  # A root of the kernel's first file system cannot be exchanged; it is covered.
        mount(".", "/", None, MS_MOVE)
        os.chroot(".")
    os.chdir("/")


def prctl(call: str, option: int, first: int = 0, second: int = 0, third: int = 0, fourth: int = 0) -> None:
    """prctl(2)."""
    _check(f"prctl {call}", _libc.prctl(ctypes.c_int(option), *(ctypes.c_ulong(number) for number in (first, second, third, fourth))))


def set_host_name(name: bytes) -> None:
    """The name of this machine in its own namespace."""
    _check("sethostname", _libc.sethostname(name, ctypes.c_size_t(len(name))))


def drop_capabilities(user: int | None) -> None:
    """Become `user` (None: stay who one is) without any capability, for good."""
    prctl("securebits", PR_SET_SECUREBITS, NO_ROOT_LOCKED)
    prctl("ambient capabilities", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        if _libc.prctl(ctypes.c_int(PR_CAPBSET_DROP), ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break  # There are no more.
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _check("capset", _libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())))


def no_new_privileges() -> None:
    """No program that is started may have more rights than who starts it."""
    prctl("no_new_privs", PR_SET_NO_NEW_PRIVS, 1)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(program: bytes) -> None:
    """Have every system call of this process and its children judged by a BPF program."""
    held = _Filter(len(program) // 8, program)
    _check(
        "seccomp",
        _libc.prctl(
            ctypes.c_int(PR_SET_SECCOMP), ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(held), ctypes.c_ulong(0), ctypes.c_ulong(0)
        ),
    )
