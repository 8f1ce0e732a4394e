"""What this distribution offers."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """The command."""
    return [
        Entry(
            name="checkpoint",
            target="intarsia_checkpoint_formats.command:command",
            doc="List, show, verify, compare, export and import checkpoints.",
        )
    ]


@hookimpl
def offer_checkpoint_formats() -> Sequence[Entry]:
    """Copies and plain weights."""
    return [
        Entry(
            name="native",
            target="intarsia_checkpoint_formats.native:NativeFormat",
            doc="The same checkpoint, whole, elsewhere or by another backend. Options: backend.",
        ),
        Entry(
            name="safetensors",
            target="intarsia_checkpoint_formats.plain:SafetensorsFormat",
            doc="Plain weights by name, in shards with an index. Options: owner, shard_bytes, dtype.",
        ),
    ]
