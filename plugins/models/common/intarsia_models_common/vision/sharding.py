"""Rows of a sharding table for a vision tower, for the tables of families. Torch-free."""

from __future__ import annotations

from intarsia_models_common.sharding import Row


def vision_rows(prefix: str = "visual") -> list[Row]:
    """The tower at `prefix` runs with whole parameters: on all images of the rank's rows, or on its share of them, as the run's `parallel.vision` says. `PREFIX_rows` is what says
    which feature stands in the place of which token of the residual stream."""
    return [(prefix, "media", {}), (f"{prefix}_rows", "replicated", {"inputs": 0})]
