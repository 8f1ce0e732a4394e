"""What follows from the sizes of images alone: where patches lie, which positions they are given, who sees whom. Worked out on the host, once for each size.

A grid is (frames, rows, columns) of patches: of an image 1 frame, of a video as many as its patches span in time. Patches stand one behind another in merge-block order: frame after
frame, and in each of them square after square of `merge` x `merge` patches (from left to right, then downwards), whose patches follow each other likewise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from intarsia.errors import UsageError

Grid = tuple[int, int, int]
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of N patches: the four entries of the position table around each (int64) and their weights (float32), its row and column (int64); and the patches of each frame."""

    entries_4N: Array
    weights_4N: Array
    places_N2: Array
    lengths: tuple[int, ...]


def checked(grids: Sequence[Sequence[int]], merge: int) -> tuple[Grid, ...]:
    """The grids as tuples of whole numbers. UsageError for one that is no grid, or whose sides are no multiple of `merge`."""
    found = []
    for number, grid in enumerate(grids):
        sizes = tuple(int(each) for each in grid)
        if len(sizes) != 3 or min(sizes) < 1:
            raise UsageError(f"Grid {number} of the batch is {grid!r}: it must be frames, rows and columns of patches, each 1 or more.")
        if sizes[1] % merge or sizes[2] % merge:
            raise UsageError(
                f"Grid {number} of the batch has {sizes[1]} x {sizes[2]} patches, and the model merges squares of {merge} x {merge}: rows and columns must be "
                f"multiples of {merge}. Give the data's processor the model's merge."
            )
        found.append((sizes[0], sizes[1], sizes[2]))
    return tuple(found)


def patches_of(grids: Sequence[Grid]) -> int:
    """How many patches there are."""
    return sum(frames * rows * columns for frames, rows, columns in grids)


@functools.lru_cache(maxsize=64)
def layout(grids: tuple[Grid, ...], table: int, merge: int) -> Layout:
    """The layout of several images one behind another; `table` is the side of the table of positions."""
    parts = [_frame(rows, columns, table, merge) for _, rows, columns in grids]
    frames = [grid[0] for grid in grids]
    return Layout(
        _joined([np.tile(part[0], (1, n)) for part, n in zip(parts, frames, strict=True)], (4, 0), np.int64),
        _joined([np.tile(part[1], (1, n)) for part, n in zip(parts, frames, strict=True)], (4, 0), np.float32),
        _joined([np.tile(part[2], (1, n)) for part, n in zip(parts, frames, strict=True)], (2, 0), np.int64).T.copy(),
        tuple(rows * columns for count, rows, columns in grids for _ in range(count)),
    )


def _joined(parts: list[Array], empty: tuple[int, int], dtype: npt.DTypeLike) -> Array:
    return np.ascontiguousarray(np.concatenate(parts, 1)) if parts else np.zeros(empty, dtype)


@functools.lru_cache(maxsize=512)
def _frame(rows: int, columns: int, table: int, merge: int) -> tuple[Array, Array, Array]:
    """Of one frame: entries [4, n] and weights [4, n] of the position table, places [2, n]."""
    raster = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    row, column = np.divmod(raster.transpose(0, 2, 1, 3).reshape(-1), columns)
    below, share_row = _taps(row, rows, table)
    right, share_column = _taps(column, columns, table)
    ends = [(below[i], right[j], share_row[i], share_column[j]) for i in (0, 1) for j in (0, 1)]
    entries = np.stack([at_row * table + at_column for at_row, at_column, _, _ in ends])
    weights = np.stack([one * other for _, _, one, other in ends])
    return entries, weights.astype(np.float32), np.stack([row, column])


def _taps(index: Array, count: int, table: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Along one axis: the entries before and behind, and their shares. The first of `count` lies on the table's first entry, the last on its last."""
    at = index * ((table - 1) / (count - 1)) if count > 1 else np.zeros(len(index))
    before = np.minimum(np.floor(at).astype(np.int64), table - 1)
    share = at - before
    return (before, np.minimum(before + 1, table - 1)), (1 - share, share)
