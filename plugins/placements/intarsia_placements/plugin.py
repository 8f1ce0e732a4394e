"""The placements' entry points, one plugin for each, so that any may be disabled or replaced alone. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl


class PlacementPlugin:
    """Offers one placement of this distribution."""

    INTARSIA_API = 1

    def __init__(self, name: str, config: str, doc: str) -> None:
        self.entry = Entry(
            name=name,
            target=f"intarsia_placements.{name}:build",
            config=f"intarsia_placements.config:{config}",
            doc=doc,
        )

    @hookimpl
    def offer_placements(self) -> list[Entry]:
        """The placement's entry."""
        return [self.entry]


row = PlacementPlugin("row", "Row", "Cuts every member evenly along one dimension, the first by default.")
column = PlacementPlugin("column", "Column", "Cuts every member evenly along one dimension, the second by default.")
flat = PlacementPlugin("flat", "Flat", "Cuts the bucket's elements, laid end to end, into even ranges of whole units.")
owned = PlacementPlugin("owned", "Owned", "Gives each member whole to one rank, balanced by cost.")
block = PlacementPlugin("block", "Block", "Shares out tiles of a given size, none of which is cut.")
replicate = PlacementPlugin("replicate", "Replicate", "Stores every member whole on every rank.")
mixed = PlacementPlugin("mixed", "Mixed", "Cuts the members of one bucket by different placements, chosen by name.")
