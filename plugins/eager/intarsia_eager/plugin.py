"""Offers the engine `eager`, the loss `cross_entropy` and the sharder `whole`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_losses() -> Sequence[Entry]:
    """The loss."""
    return [
        Entry(
            name="cross_entropy",
            config="intarsia_eager.config:CrossEntropyConfig",
            target="intarsia_eager.cross_entropy:build",
            doc="Next-token cross-entropy in chunks, without full logits.",
        )
    ]


@hookimpl
def offer_engines() -> Sequence[Entry]:
    """The engine."""
    return [
        Entry(
            name="eager",
            config="intarsia_eager.config:EagerConfig",
            target="intarsia_eager.engine:build",
            doc="Runs the model as it is written, with compiled and recomputed regions.",
        )
    ]


@hookimpl
def offer_sharders() -> Sequence[Entry]:
    """The sharder."""
    return [
        Entry(
            name="whole",
            config="intarsia_eager.config:WholeConfig",
            target="intarsia_eager.whole:build",
            doc="One process holds every parameter whole.",
        )
    ]
