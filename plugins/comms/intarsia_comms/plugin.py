"""What this distribution offers. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_transports() -> Sequence[Entry]:
    """Transports between the GPUs of one host."""
    return [
        Entry(
            name="copy_engine",
            config="intarsia_comms.config:CopyEngineConfig",
            target="intarsia_comms.copy_engine:build",
            doc="Each GPU's copy engines pull from its peers on the same host; no compute units are taken by gathers.",
        )
    ]
