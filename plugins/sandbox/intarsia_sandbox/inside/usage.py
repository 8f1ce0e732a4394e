"""What the processes of a command use together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


def _waiting_bytes() -> int:
    """What may wait in a socket that nobody reads: where less than the kernel's bound does, 32 KiB (or a page) and their head go in whole. Looked up when this is imported: a root of one's own does not show it."""
    most = 212_992
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/core/wmem_default") as file:
        most = int(file.read())
    return most + max(32_768, PAGE) + 2 * PAGE


SOCKET_BYTES = _waiting_bytes()


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resident bytes, CPU seconds, and the processes themselves; `own_cpu_seconds` are those of each process (its number and the time it began at) without those of children that it waited for.
    `threads` are those by which processes show what they have: of a process whose first thread has ended another one's."""

    memory_bytes: int
    cpu_seconds: float
    processes: tuple[int, ...]
    own_cpu_seconds: Mapping[tuple[int, int], float]
    threads: tuple[int, ...]


def measure(init: int, proc: str = "/proc") -> Usage:
    """Of the descendants of `init`. Pages that several processes share count once in each, and every open file as a full socket; `proportional` is exact and dear."""
    parents: dict[int, int] = {}
    others: dict[int, int] = {}
    facts: dict[int, tuple[int, float, tuple[int, int], float]] = {}
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        fields = _fields(name, proc)
        if not fields:
            continue
        parents[int(name)] = int(fields[1])
        began, ticks = int(fields[19]), list(map(int, fields[11:15]))
        if fields[0] == b"Z" and (living := _living(name, proc)):
            others[int(name)], fields = living
        facts[int(name)] = int(fields[21]) * PAGE, sum(ticks) / TICKS, (int(name), began), sum(ticks[:2]) / TICKS
    found = [number for number in parents if number != init and _descends(number, init, parents)]
    threads = tuple(others.get(number, number) for number in found)
    memory = sum(facts[number][0] for number in found) + SOCKET_BYTES * sum(len(_files(number, proc)) for number in threads)
    own = {facts[number][2]: facts[number][3] for number in found}
    return Usage(memory, sum(facts[number][1] for number in found), tuple(found), own, threads)


def _fields(place: str, proc: str) -> list[bytes]:
    """What a process or thread says of itself, from its state on; nothing where it has ended."""
    try:
        with open(f"{proc}/{place}/stat", "rb") as file:
            # The command's name is in brackets and may hold anything.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _living(name: str, proc: str) -> tuple[int, list[bytes]] | None:
    """A thread of a process whose first one has ended, with what it says; None where all have."""
    try:
        threads = os.listdir(f"{proc}/{name}/task")
    except OSError:
        return None
    found = ((int(thread), _fields(f"{name}/task/{thread}", proc)) for thread in threads)
    return next((each for each in found if each[1] and each[1][0] not in (b"Z", b"X")), None)


def _files(number: int, proc: str) -> list[str]:
    """A process's open files, by path; none where it has ended."""
    try:
        return [f"{proc}/{number}/fd/{name}" for name in os.listdir(f"{proc}/{number}/fd")]
    except OSError:
        return []


def _sockets(usage: Usage, proc: str) -> int:
    """How many sockets they have open, each once."""
    found: set[str] = set()
    for path in (path for number in usage.threads for path in _files(number, proc)):
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return sum(target.startswith("socket:") for target in found)


def proportional(usage: Usage, proc: str = "/proc") -> int:
    """Resident bytes, with shared pages shared out, and what may wait in sockets; the plain sum where the kernel does not say."""
    total = SOCKET_BYTES * _sockets(usage, proc)
    for number in usage.threads:
        try:
            with open(f"{proc}/{number}/smaps_rollup", "rb") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith(b"Pss:")) * 1024
        except (FileNotFoundError, ProcessLookupError, StopIteration):
            continue
        except OSError:
            return usage.memory_bytes
    return total


def _descends(number: int, init: int, parents: dict[int, int]) -> bool:
    seen = 0
    while number in parents and seen <= len(parents):
        number, seen = parents[number], seen + 1
        if number == init:
            return True
    return False
