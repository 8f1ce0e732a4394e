"""Rows of text, images and video for tests of models that see, made by the rules of Qwen3-VL's fact sheet alone: what a loader adds for our models, and what transformers' classes take.

A row is given as segments: an int is so many tokens of text, ("image", rows, columns) and ("video", frames, rows, columns) are media by their patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Segment = Any
IMAGE, VIDEO, START, END, TEXT = 250, 251, 252, 253, 240
"""Special tokens of the tiny reference configs; text has ids below TEXT."""


@dataclasses.dataclass
class Samples:
    """Rows of one document each. `extra` is ours; `theirs` are the keyword arguments of a reference class."""

    tokens_BS: Tensor
    extra: dict[str, Any]
    theirs: dict[str, Any]


def make_samples(rows: Sequence[Sequence[Segment]], values: int, merge: int = 2, seed: int = 0) -> Samples:
    """Rows of equal length: text fills what the segments leave of the longest. `values` are those of one patch."""
    draw = torch.Generator().manual_seed(seed)
    made = [_row(row, merge, draw) for row in rows]
    length = max(len(ids) for ids, *_ in made)
    tokens, positions, types, visual, patches, grids = [], [], [], [], [], []
    seen = 0
    for ids, places, kinds, media in made:
        missing = length - len(ids)
        first = max((max(place) for place in places), default=-1) + 1
        ids += torch.randint(0, TEXT, (missing,), generator=draw).tolist()
        places += [(first + k,) * 3 for k in range(missing)]
        kinds += [0] * missing
        numbers = []
        for kind in kinds:
            numbers.append(seen if kind else -1)
            seen += bool(kind)
        tokens.append(ids)
        positions.append(places)
        types.append(kinds)
        visual.append(numbers)
        grids += media
    for _, frames, height, width in grids:
        patches.append(torch.randn(frames * height * width, values, generator=draw))
    extra: dict[str, Any] = {"positions_3BS": torch.tensor(positions).permute(2, 0, 1).contiguous()}
    theirs: dict[str, Any] = {"mm_token_type_ids": torch.tensor(types)}
    if grids:
        extra |= {
            "visual_BS": torch.tensor(visual),
            "patches_NC": torch.cat(patches),
            "grids": tuple(grid[1:] for grid in grids),
        }
    for kind, name, grid_name in (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw")):
        mine = [(each, grid) for each, grid in zip(patches, grids, strict=True) if grid[0] == kind]
        if mine:
            theirs |= {name: torch.cat([each for each, _ in mine]), grid_name: torch.tensor([grid[1:] for _, grid in mine])}
    return Samples(torch.tensor(tokens), extra, theirs)


def _row(
    segments: Sequence[Segment], merge: int, draw: torch.Generator
) -> tuple[list[int], list[tuple[int, int, int]], list[int], list[Any]]:
    ids: list[int] = []
    places: list[tuple[int, int, int]] = []
    kinds: list[int] = []
    media: list[Any] = []
    at = 0

    def text(new: Sequence[int]) -> None:
        nonlocal at
        for each in new:
            ids.append(each)
            places.append((at, at, at))
            kinds.append(0)
            at += 1

    def frame(token: int, kind: int, height: int, width: int) -> None:
        nonlocal at
        text([START])
        for row in range(height // merge):
            for column in range(width // merge):
                ids.append(token)
                places.append((at, at + row, at + column))
                kinds.append(kind)
        at += max(height, width) // merge
        text([END])

    def some(count: int) -> list[int]:
        return torch.randint(0, TEXT, (count,), generator=draw).tolist()

    for segment in segments:
        if isinstance(segment, int):
            text(some(segment))
        elif segment[0] == "image":
            media.append(("image", 1, *segment[1:]))
            frame(IMAGE, 1, *segment[1:])
        else:
            media.append(segment)
            for _ in range(segment[1]):
                text(some(3))  # where a processor writes the time
                frame(VIDEO, 2, *segment[2:])
    return ids, places, kinds, media


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


BATCHES: dict[str, Sequence[Sequence[Segment]]] = {
    "images": [[5, ("image", 4, 6), 30, ("image", 8, 4), 20], [70, ("image", 2, 2), 3]],
    "video": [[4, ("video", 2, 4, 6), 60]],
    "mixed": [[3, ("image", 4, 4), 9, ("video", 2, 4, 8), 40, ("image", 6, 2), 5], [90], [("image", 8, 8), ("video", 2, 2, 2), 40]],
    "text": [[90], [90]],
}
"""More than one chunk of a gated delta rule each."""
