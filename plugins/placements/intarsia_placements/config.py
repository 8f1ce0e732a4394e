"""Settings of the placements. The class of a settings object says which placement was chosen. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import PlacementConfig


@chz.chz(typecheck=True)
class Row(PlacementConfig):
    """Cuts along one dimension."""

    dim: int = chz.field(default=0, doc="The dimension to cut; negative counts from the last. Vectors are cut along their only one.")


@chz.chz(typecheck=True)
class Column(PlacementConfig):
    """Cuts along one dimension."""

    dim: int = chz.field(default=1, doc="The dimension to cut; negative counts from the last. Vectors are cut along their only one.")


@chz.chz(typecheck=True)
class Flat(PlacementConfig):
    """Cuts the bucket into even ranges of elements."""


@chz.chz(typecheck=True)
class Owned(PlacementConfig):
    """Gives each member whole to one rank."""


@chz.chz(typecheck=True)
class Block(PlacementConfig):
    """Shares out tiles."""

    tile: tuple[int, ...] = chz.field(
        default=(128, 128), doc="Sizes of a tile in the last one, two or three dimensions; any dimension before them is cut at every index."
    )


@chz.chz(typecheck=True)
class Replicate(PlacementConfig):
    """Stores everything everywhere."""
