"""The entries of linear attention. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_LINEAR = "intarsia_models_common.linear_attention"


@hookimpl
def offer_components() -> Sequence[Entry]:
    """The mixer."""
    return [
        Entry(
            name="gated_delta_net",
            config=f"{_LINEAR}.config:GatedDeltaNetConfig",
            target=f"{_LINEAR}.mixer:GatedDeltaNet",
            doc="Gated DeltaNet: a short convolution and a recurrence with a matrix of state for each head.",
        )
    ]


@hookimpl
def offer_operators() -> Sequence[Entry]:
    """What kernels may replace."""
    return [
        Entry(
            name="short_conv",
            target=f"{_LINEAR}.operators:SHORT_CONV",
            doc="A causal convolution of a few taps for each channel, with the past inputs as state.",
        ),
        Entry(
            name="gated_delta_rule",
            target=f"{_LINEAR}.operators:GATED_DELTA_RULE",
            doc="The gated delta rule: a recurrence with a matrix of state for each head.",
        ),
    ]
