"""What this distribution offers. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_commands() -> list[Entry]:
    """`intarsia plan`."""
    return [
        Entry(
            name="plan",
            target="intarsia_planner.plan_command:command",
            doc="Memory, communication, step time and MFU of a recipe on any number of devices, without starting one.",
        )
    ]
