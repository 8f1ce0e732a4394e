"""What the processes of a command use together."""

from __future__ import annotations

import dataclasses
import os

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resident bytes, CPU seconds, and the processes themselves."""

    memory_bytes: int
    cpu_seconds: float
    processes: tuple[int, ...]


def measure(init: int, proc: str = "/proc") -> Usage:
    """Of the descendants of `init`. Pages that several processes share count once in each; `proportional` is exact and dear."""
    parents: dict[int, int] = {}
    facts: dict[int, tuple[int, float]] = {}
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            with open(f"{proc}/{name}/stat", "rb") as file:
                # The command's name is in brackets and may hold anything.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # It has ended.
        parents[int(name)] = int(fields[1])
        facts[int(name)] = int(fields[21]) * PAGE, sum(map(int, fields[11:15])) / TICKS
    found = [number for number in parents if number != init and _descends(number, init, parents)]
    return Usage(sum(facts[number][0] for number in found), sum(facts[number][1] for number in found), tuple(found))


def proportional(usage: Usage, proc: str = "/proc") -> int:
    """Resident bytes, with shared pages shared out; the plain sum where the kernel does not say."""
    total = 0
    for number in usage.processes:
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
