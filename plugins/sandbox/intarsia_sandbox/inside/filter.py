"""Which system calls a command may not make, as a BPF program for seccomp. Numbers are those of the kernel's headers for x86_64 and aarch64."""

from __future__ import annotations

import errno
import struct

from intarsia_sandbox.inside import kernel

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LAST_KNOWN = 469
"""System calls of higher numbers are newer than this list; a command is told that they do not exist."""

DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # file systems
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    # namespaces
    "setns": (308, 268),
    "unshare": (272, 97),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # keys, tracing, kernel programs
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "lookup_dcookie": (212, 18),
    "syslog": (103, 116),
    # memory that no process's size shows: some outlives processes, some waits in queues (of sockets with names, for which there is no bound)
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "semget": (64, 190),
    "socket": (41, 198),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "create_module": (174, None),
    "query_module": (178, None),
    "_sysctl": (156, None),
    "sysfs": (139, None),
    "ustat": (136, None),
}
OF_FIRST: dict[str, tuple[int, int]] = {
    "prlimit64": (302, 261),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
"""Whose first argument may not be the first process, which watches the command: where there is one user, it is that one's as well."""
SETPRIORITY, PRIO_USER, FIRST = (141, 140), 2, 1
CLONE3 = 435
CLONE, SOCKETPAIR, SETSOCKOPT, IOCTL, MMAP = (56, 220), (53, 199), (54, 208), (16, 29), (9, 222)
AF_UNIX, SOCK_STREAM, SO_SNDBUF, TIOCSTI, TIOCLINUX = 1, 1, 7, 0x5412, 0x541C
NEW_NAMESPACES = kernel.NAMESPACES | kernel.CLONE_NEWTIME

LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT, FOURTH_ARGUMENT = 0, 4, 16, 24, 32, 40
KIND_OF_SOCKET = 0xF
"""The bits of a socket's type that are not flags."""
SHARED_ANONYMOUS = 0x21
"""MAP_SHARED (and MAP_SHARED_VALIDATE) and MAP_ANONYMOUS: pages of such a mapping stay when no process has them any more, as long as one has any part of it."""
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
X32 = 0x40000000


def program(machine: str) -> bytes | None:
    """The filter for a machine as `uname` calls it; None where there is none."""
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    lines: list[bytes] = []

    def add(code: int, value: int, yes: int = 0, no: int = 0) -> None:
        lines.append(struct.pack("HBBI", code, yes, no, value))

    add(LOAD, ARCHITECTURE)
    add(EQUAL, ARCHITECTURES[machine], yes=1)
    add(RETURN, KILL)
    add(LOAD, NUMBER)
    if machine == "x86_64":
        add(AT_LEAST, X32, no=1)
        add(RETURN, KILL)
    add(AT_LEAST, LAST_KNOWN + 1, no=1)
    add(RETURN, FAIL | errno.ENOSYS)
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            add(EQUAL, number, no=1)
            add(RETURN, FAIL | errno.EPERM)
    # Its flags lie in memory, which a filter cannot read: libraries then take clone.
    add(EQUAL, CLONE3, no=1)
    add(RETURN, FAIL | errno.ENOSYS)
    add(EQUAL, CLONE[column], no=4)
    add(LOAD, FIRST_ARGUMENT)
    add(ANY_BIT, NEW_NAMESPACES, no=1)
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    for both in OF_FIRST.values():
        add(EQUAL, both[column], no=4)
        add(LOAD, FIRST_ARGUMENT)
        add(EQUAL, FIRST, no=1)
        add(RETURN, FAIL | errno.EPERM)
        add(RETURN, ALLOW)
    add(EQUAL, SETPRIORITY[column], no=6)
    add(LOAD, FIRST_ARGUMENT)
    add(EQUAL, PRIO_USER, yes=2)
    add(LOAD, SECOND_ARGUMENT)
    add(EQUAL, FIRST, no=1)
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    # Streams in pairs alone: what waits in them is bound by their size, which `usage` counts.
    add(EQUAL, SOCKETPAIR[column], no=7)
    add(LOAD, FIRST_ARGUMENT)
    add(EQUAL, AF_UNIX, no=3)
    add(LOAD, SECOND_ARGUMENT)
    add(AND, KIND_OF_SOCKET)
    add(EQUAL, SOCK_STREAM, yes=1)
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, SETSOCKOPT[column], no=4)
    add(LOAD, THIRD_ARGUMENT)
    add(EQUAL, SO_SNDBUF, no=1)
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, MMAP[column], no=5)
    add(LOAD, FOURTH_ARGUMENT)
    add(AND, SHARED_ANONYMOUS)
    add(EQUAL, SHARED_ANONYMOUS, no=1)
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, IOCTL[column], no=5)
    add(LOAD, SECOND_ARGUMENT)
    add(EQUAL, TIOCSTI, yes=2)
    add(EQUAL, TIOCLINUX, yes=1)
    add(RETURN, ALLOW)
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    return b"".join(lines)
