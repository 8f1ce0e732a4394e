"""Offers the metric sink `progress` and the command `show`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_metric_sinks() -> Sequence[Entry]:
    """The sink."""
    return [
        Entry(
            name="progress",
            target="intarsia_console.progress:build",
            config="intarsia_console.config:ProgressConfig",
            doc="A live line on a terminal, plain lines elsewhere.",
        )
    ]


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """The command."""
    return [Entry(name="show", target="intarsia_console.show:command", doc="Show a run's curves and facts.")]
