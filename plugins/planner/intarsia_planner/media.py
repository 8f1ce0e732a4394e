"""The images that a plan takes rows to have, for models that see: what `vision.share` of a row's tokens stands for, within the loader's budget of patches."""

from __future__ import annotations

from typing import Any

import torch
from intarsia.config import Recipe

SIDE = 32
"""Patches on a side of an image: 512 pixels where a patch has 16."""

Grid = tuple[int, int, int]


def grids_of(recipe: Recipe) -> tuple[Grid, ...]:
    """(frames, rows, columns) of the images of one row; none where the model has no vision tower or the loader makes no patches."""
    vision: Any = getattr(recipe.model, "vision", None)
    budget: int | None = getattr(recipe.data.loader, "patches", None)
    if vision is None or budget is None:
        return ()
    merge = vision.merge
    patches = min(int(vision.share * recipe.train.sequence_length) * merge**2, budget)
    side = SIDE // merge * merge
    if patches >= side**2:
        return ((1, side, side),) * (patches // side**2)
    columns = patches // merge**2 * merge
    return ((1, merge, columns),) if columns else ()


def extra_of(recipe: Recipe, rows: int) -> dict[str, Any]:
    """What the loader would add to a micro-batch of so many rows, on the meta device."""
    grids = grids_of(recipe)
    if not grids:
        return {}
    length, patches = recipe.train.sequence_length, sum(frames * height * width for frames, height, width in grids)
    vision: Any = recipe.model.vision  # type: ignore[attr-defined]
    return {
        "positions_3BS": torch.zeros(3, rows, length, dtype=torch.int64, device="meta"),
        "visual_BS": torch.zeros(rows, length, dtype=torch.int64, device="meta"),
        "patches_NC": torch.zeros(rows * patches, vision.values, device="meta"),
        "grids": grids * rows,
    }
