"""What the kit offers: the commands that need its checks."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """Commands for plugin authors."""
    return [
        Entry(
            name="kernels",
            target="intarsia_testing.cli_kernels:Kernels",
            doc="List kernels, check one against its reference, time them here.",
        ),
        Entry(
            name="new-plugin",
            target="intarsia_testing.cli_new_plugin:NewPlugin",
            doc="Scaffold a distribution whose tests say what is left to write.",
        ),
    ]
