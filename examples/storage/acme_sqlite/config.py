"""The storage's settings. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import StorageConfig


@chz.chz(typecheck=True)
class SQLiteConfig(StorageConfig):
    """One database for each run."""

    file: str = chz.field(default="files.sqlite", doc="The database's name in the storage's folder.")
    timeout_s: float = chz.field(default=60.0, doc="How long a writer waits for the others, in seconds.")
