"""Rows of tokens, images and video for both sides of a parity test: what a loader adds for our models, and the keyword arguments of the reference class.

Shape suffixes: B rows, S tokens, N patches, C values of a patch, M features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from intarsia_generation.prompts import Input, Shown
from torch import Tensor

Segment = int | tuple[Any, ...]
"""So many tokens of text; ("image", rows, columns) or ("video", frames, rows, columns) by patches."""

IMAGE, VIDEO, START, END, TEXT = 250, 251, 252, 253, 240
"""Special tokens of tiny reference configs with a vocabulary of 256; text has ids below TEXT."""

BATCHES: dict[str, Sequence[Sequence[Segment]]] = {
    "images": [[5, ("image", 4, 6), 30, ("image", 8, 4), 20], [70, ("image", 2, 2), 3]],
    "video": [[4, ("video", 2, 4, 6), 60]],
    "mixed": [[3, ("image", 4, 4), 9, ("video", 2, 4, 8), 40, ("image", 6, 2), 5], [90], [("image", 8, 8), ("video", 2, 2, 2), 40]],
    "text": [[90], [90]],
}
"""Rows by name: images; a video of two frames; both in rows of which one has none; text alone. Each is longer than 64 tokens, a chunk of a gated delta rule."""


@dataclasses.dataclass
class Samples:
    """Rows of one document each, of equal length. `extra` is what our context shows (`Batch.extra`), `theirs` the further keyword arguments of the reference class. `order_N` says where
    each of our patches lies among theirs, where a reference takes images and video apart."""

    tokens_BS: Tensor
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    theirs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    order_N: Tensor | None = None

    def inputs(self) -> list[Input]:
        """The rows as prompts of generation."""
        if not self.extra:
            return [Input(tuple(row)) for row in self.tokens_BS.tolist()]
        return [Input(tuple(row), "", self._shown(number)) for number, row in enumerate(self.tokens_BS.tolist())]

    def _shown(self, row: int) -> Shown | None:
        visual_BS = self.extra.get("visual_BS")
        if visual_BS is None or not bool((visual_BS[row] >= 0).any()):
            return None
        numbers = visual_BS[row][visual_BS[row] >= 0]
        low, high = int(numbers[0]), int(numbers[-1]) + 1
        patches_NC = self.extra["patches_NC"]
        each = len(patches_NC) // (int(visual_BS.max()) + 1)
        grids, seen = [], 0
        for grid in self.extra["grids"]:
            if low * each <= seen < high * each:
                grids.append(tuple(grid))
            seen += grid[0] * grid[1] * grid[2]
        visual_S = torch.where(visual_BS[row] >= 0, visual_BS[row] - low, -1)
        return Shown(self.extra["positions_3BS"][:, row], visual_S, patches_NC[low * each : high * each], tuple(grids), "")


def text_samples(vocabulary: int, tokens: int, rows: int = 2) -> Samples:
    """Random tokens."""
    return Samples(torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1)))


def make_samples(rows: Sequence[Sequence[Segment]], values: int, merge: int = 2, seed: int = 0) -> Samples:
    """Rows of equal length by the rules of Qwen3-VL, made from its definition alone: text fills what the segments leave of the longest. `values` are those of one patch.

    An image is a start, its features' places row by row, and an end; each frame of a video likewise, behind the tokens of its time. Positions of text count on three axes alike; a
    frame's places have the time at which it begins and count rows and columns from there; what follows goes on behind the longer side.
    """
    draw = torch.Generator().manual_seed(seed)
    made = [_row(row, merge, draw) for row in rows]
    length = max(len(ids) for ids, *_ in made)
    tokens, positions, types, visual, grids = [], [], [], [], []
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
    patches = [torch.randn(frames * height * width, values, generator=draw) for _, frames, height, width in grids]
    extra: dict[str, Any] = {"positions_3BS": torch.tensor(positions).permute(2, 0, 1).contiguous()}
    theirs: dict[str, Any] = {"mm_token_type_ids": torch.tensor(types)}
    if not grids:
        return Samples(torch.tensor(tokens), extra, theirs)
    extra |= {"visual_BS": torch.tensor(visual), "patches_NC": torch.cat(patches), "grids": tuple(grid[1:] for grid in grids)}
    order = [torch.empty(0, dtype=torch.int64)] * len(grids)
    at = 0
    for medium, name, grid_name in (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw")):
        mine = [number for number, grid in enumerate(grids) if grid[0] == medium]
        if mine:
            theirs |= {name: torch.cat([patches[k] for k in mine]), grid_name: torch.tensor([grids[k][1:] for k in mine])}
        for k in mine:
            order[k] = torch.arange(at, at + len(patches[k]))
            at += len(patches[k])
    return Samples(torch.tensor(tokens), extra, theirs, torch.cat(order))


def _row(
    segments: Sequence[Segment], merge: int, draw: torch.Generator
) -> tuple[list[int], list[tuple[int, int, int]], list[int], list[Any]]:
    """Ids, positions, kinds of tokens (0 text, 1 image, 2 video) and media of a row."""
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
