"""Settings. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config.bases import Config


@chz.chz(typecheck=True)
class SandboxConfig(Config):
    """Settings of a sandbox."""


@chz.chz(typecheck=True)
class ProcessSandboxConfig(SandboxConfig):
    """Linux namespaces, resource limits and a filter of system calls."""

    unconfined: bool = chz.field(
        default=False, doc="Run even where the kernel gives no namespaces: with resource limits alone. Only for code that you trust."
    )
    paths: tuple[str, ...] = chz.field(
        default=(),
        doc="Further files and folders that commands may read, at their own places; the system's programs and this Python are always there.",
    )
    at_once: int | None = chz.field(
        default=None,
        doc="Commands that run at one time, over all of a process that shares a sandbox; others wait, and their limits with them. None: one for each CPU.",
    )
