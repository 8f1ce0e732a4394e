"""Offers the metric sink `progress`, the launcher `local`, and the commands `train`, `config`, `show` and `plugins`. Torch-free."""

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
    """The commands."""
    return [
        Entry(
            name="train",
            target="intarsia_console.train_command:command",
            doc="Train a model by a recipe, or go on with a run.",
        ),
        Entry(
            name="config",
            target="intarsia_console.config_command:command",
            doc="Print a recipe as it is resolved, and who set each value.",
        ),
        Entry(name="show", target="intarsia_console.show:command", doc="Show a run's curves and facts."),
        Entry(name="plugins", target="intarsia_console.plugins_command:command", doc="List, show and check plugins; trace hook calls."),
    ]


@hookimpl
def offer_launchers() -> Sequence[Entry]:
    """The launcher."""
    return [Entry(name="local", target="intarsia_console.launch:launch", doc="N processes on this machine, without torchrun.")]
