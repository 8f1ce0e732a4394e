"""Offers the metric sink `tensorboard`. Torch-free."""

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
            name="tensorboard",
            target="intarsia_tensorboard.sink:build",
            config="intarsia_tensorboard.config:TensorBoardConfig",
            doc="Scalars for TensorBoard.",
        )
    ]
