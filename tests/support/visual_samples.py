"""What a loader adds to packed rows, for tests of models that see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def packed_media(lengths: Sequence[Sequence[int]], values: int) -> dict[str, Any]:
    """What a loader adds to packed rows: two images in the first row's last document, one in the last row's, none elsewhere. `values` are those of one patch."""
    rows, length = len(lengths), sum(lengths[0])
    positions_3BS = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in lengths]).expand(3, rows, length).clone()
    visual_BS = torch.full((rows, length), -1)
    seen = 0
    for row, count, grid in ((0, 2, (2, 4)), (0, 2, (4, 2)), (rows - 1, 4, (4, 4))):
        at = length - 9 + (4 if seen else 0) if row == 0 else length - 6
        visual_BS[row, at : at + count] = torch.arange(seen, seen + count)
        seen += count
        first = int(positions_3BS[0, row, at])
        width = grid[1] // 2
        for number in range(count):
            places = (first, first + number // width, first + number % width)
            positions_3BS[:, row, at + number] = torch.tensor(places)
        positions_3BS[:, row, at + count :] += max(grid) // 2 - count
    draw = torch.Generator().manual_seed(5)
    return {
        "positions_3BS": positions_3BS,
        "visual_BS": visual_BS,
        "patches_NC": torch.randn(4 * seen, values, generator=draw),
        "grids": ((1, 2, 4), (1, 4, 2), (1, 4, 4)),
    }
