"""The kind of this distribution. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import offer


@offer("sandbox", base="intarsia_sandbox.config:SandboxConfig")
def offer_sandboxes() -> Sequence[Entry]:
    """Sandboxes. Target: `build(config) -> Sandbox` (`intarsia_sandbox.contracts`), in a module that imports no torch."""
    return ()
