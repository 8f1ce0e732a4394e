"""What the distribution offers. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_placements() -> list[Entry]:
    """The placement."""
    return [
        Entry(
            name="zigzag",
            config="acme_zigzag.config:ZigzagConfig",
            target="acme_zigzag.placement:build",
            doc="Cuts members into twice as many row blocks as ranks; each rank gets one from either end.",
        )
    ]
