"""What core itself offers, through the same door as everybody else."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """The command that works without any other plugin."""
    return [Entry(name="train", target="intarsia.cli.train:command", doc="Train a model by a recipe, or go on with a run.")]
