"""What this distribution offers."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_checkpoint_backends() -> Sequence[Entry]:
    """The stream backend."""
    return [
        Entry(
            name="stream",
            target="intarsia_checkpoint_stream.backend:StreamBackend",
            config="intarsia_checkpoint_stream.config:StreamConfig",
            doc="Append-only files, one series for each rank; written in one pass, read by ranges.",
        )
    ]
