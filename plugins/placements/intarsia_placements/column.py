"""`column`: `row` along the second dimension, as tensor parallelism cuts the input side of a weight."""

from __future__ import annotations

from intarsia_placements.config import Column
from intarsia_placements.row import DimensionPlacement


def build(config: Column) -> DimensionPlacement:
    """The placement of `config`."""
    return DimensionPlacement("column", config.dim)
