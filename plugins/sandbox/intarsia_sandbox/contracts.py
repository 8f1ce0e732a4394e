"""What a sandbox is: a place where code that nobody trusts runs, and ends. Torch-free values and a Protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Bounds of one command. Stability: provisional."""

    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 64 << 20
    processes: int = 32
    output_bytes: int = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended. Output is cut at the limit, which `output_cut` says. Stability: provisional.

    `ended`: `exit` (`status` is its code), `signal` (`status` is the number), or the limit that ended it: `seconds`, `cpu_seconds`, `memory`, `output`.
    """

    ended: Literal["exit", "signal", "seconds", "cpu_seconds", "memory", "output"]
    status: int
    output: str
    errors: str
    output_cut: bool = False
    seconds_s: float = 0.0


@runtime_checkable
class Sandbox(Protocol):
    """Built by `target(config)`. Holds nothing between commands. Stability: provisional."""

    def confinement(self) -> Mapping[str, str]:
        """What confines a command here, by what it is confined from (network, files, processes, memory ...): shown and recorded."""

    async def run(
        self, command: Sequence[str], files: Mapping[str, str | bytes] | None = None, stdin: str = "", limits: SandboxLimits | None = None
    ) -> Completed:
        """Run `command` in an empty folder that holds `files` (relative names). Everything that it started is gone when this returns, also when it is cancelled. Raises EnvironmentFailure("sandbox", ...)
        where the sandbox itself fails, and UsageError where it cannot confine."""
