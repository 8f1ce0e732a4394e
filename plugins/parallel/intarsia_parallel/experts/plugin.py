"""Offers the role `expert` and the dispatchers of several ranks. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_EXPERTS = "intarsia_parallel.experts"


@hookimpl
def offer_roles() -> Sequence[Entry]:
    """The role of stacked experts."""
    return [
        Entry(
            name="expert",
            config=f"{_EXPERTS}.config:ExpertConfig",
            target=f"{_EXPERTS}.role:build",
            doc="Stacked experts cut over ep, and a dispatcher that brings them their tokens.",
        )
    ]


@hookimpl(optionalhook=True)
def offer_dispatchers() -> Sequence[Entry]:
    """See `intarsia_models_common.moe.hookspecs`."""
    return [
        Entry(
            name="all_to_all",
            config=f"{_EXPERTS}.config:AllToAllConfig",
            target=f"{_EXPERTS}.alltoall:build",
            doc="All-to-all of exact counts; the host waits for them.",
        ),
        Entry(
            name="fixed_capacity",
            config=f"{_EXPERTS}.config:FixedCapacityConfig",
            target=f"{_EXPERTS}.fixed:build",
            doc="All-to-all of a fixed number of rows; the host never waits.",
        ),
    ]
