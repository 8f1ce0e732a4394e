"""Offers the storage `posix`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_storages() -> Sequence[Entry]:
    """The storage."""
    return [
        Entry(
            name="posix",
            config="intarsia_checkpoint_posix.config:PosixConfig",
            target="intarsia_checkpoint_posix.storage:build",
            doc="Files on a local or network file system.",
        )
    ]
