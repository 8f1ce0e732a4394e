"""What the distribution offers. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_storages() -> list[Entry]:
    """The storage."""
    return [
        Entry(
            name="sqlite",
            config="acme_sqlite.config:SQLiteConfig",
            target="acme_sqlite.storage:build",
            doc="All files of a run's checkpoints in one SQLite database.",
        )
    ]
