"""Settings of the storage. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import StorageConfig


@chz.chz(typecheck=True)
class PosixConfig(StorageConfig):
    """Files on a local or network file system that renames atomically."""

    root: str = chz.field(
        default="", doc="Folder that gets a folder for each run, named like the run's directory; empty: the run directory."
    )
    fsync: bool = chz.field(
        default=True, doc="Wait until bytes and names are on the medium. Off: faster, a power cut may lose a checkpoint."
    )
