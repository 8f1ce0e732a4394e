"""The kind "sandbox", and the sandbox `process`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def add_hookspecs() -> Sequence[str]:
    """The kind that this distribution owns."""
    return ["intarsia_sandbox.hookspecs"]


@hookimpl(optionalhook=True)
def offer_sandboxes() -> Sequence[Entry]:
    """The sandbox."""
    return [
        Entry(
            name="process",
            config="intarsia_sandbox.config:ProcessSandboxConfig",
            target="intarsia_sandbox.process:build",
            doc="Processes in Linux namespaces, with resource limits and a filter of system calls.",
        )
    ]
