"""Settings of the placements. The class of a settings object says which placement was chosen. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import Config, PlacementConfig


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

    unit: int = chz.field(
        default=64,
        doc="Elements between places where a member may be cut, counted from its beginning; 64 bfloat16 are the alignment of members.",
    )


@chz.chz(typecheck=True)
class Owned(PlacementConfig):
    """Gives each member whole to one rank."""


@chz.chz(typecheck=True)
class Block(PlacementConfig):
    """Shares out tiles."""

    tile: tuple[int, ...] = chz.field(
        default=(128, 128),
        doc="Sizes of a tile in the last one, two or three dimensions; any dimension before them is cut at every index. -1 is the whole dimension: "
        "(-1, -1) keeps matrices whole, those in stacks of experts too.",
    )


@chz.chz(typecheck=True)
class Replicate(PlacementConfig):
    """Stores everything everywhere."""


@chz.chz(typecheck=True)
class MixedRule(Config):
    """Which members of a mixed bucket a placement cuts."""

    match: str = chz.field(doc="A glob on the parameters' canonical names.")
    placement: PlacementConfig = chz.field(doc="What cuts them.")


@chz.chz(typecheck=True)
class Mixed(PlacementConfig):
    """Cuts the members of one bucket by different placements."""

    rules: tuple[MixedRule, ...] = chz.field(default=(), doc="The first rule whose glob has a member's name cuts it.")
    default: PlacementConfig = chz.field(default_factory=Row, doc="What cuts the members that no rule has.")
