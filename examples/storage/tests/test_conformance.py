"""The storage keeps the promises of storages."""

from __future__ import annotations

from acme_sqlite.config import SQLiteConfig
from intarsia_testing import StorageConformance


class TestSQLite(StorageConformance):
    entry = "acme-sqlite:sqlite"


class TestOtherFile(StorageConformance):
    entry = "acme-sqlite:sqlite"
    config = SQLiteConfig(file="other.db")
