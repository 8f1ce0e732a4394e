"""Offers Parquet and Arrow files as data sources."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_data_sources() -> Sequence[Entry]:
    """Tables, one document in each row."""
    configs, home = "intarsia_arrow.config", "intarsia_arrow.sources"
    return [
        Entry(
            name="parquet",
            config=f"{configs}:ParquetConfig",
            target=f"{home}:ParquetSource",
            doc="Parquet files, one document in each row.",
        ),
        Entry(
            name="arrow",
            config=f"{configs}:ArrowConfig",
            target=f"{home}:ArrowSource",
            doc="Arrow IPC and Feather files, one document in each row.",
        ),
    ]
