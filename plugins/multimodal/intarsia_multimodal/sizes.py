"""What becomes of an image's or a video's size: pure arithmetic on integers, that of the Qwen-VL processors.

Sides are rounded to multiples of `factor` (pixels on a side of one feature); where the pixels are then out of bounds, both sides are scaled alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from intarsia_multimodal.contracts import MediaError

MOST_RATIO = 200
"""Of the longer side to the shorter."""


def image_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) after resizing, in pixels: multiples of `factor`, their product within `least` to `most`. Errors: MediaError for one that is too long."""
    check_ratio(height, width)
    return _bounded(height, width, height * width, 1, factor, least, most)


def video_size(frames: int, height: int, width: int, temporal: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) of each frame after resizing; `least` and `most` are pixels of all `frames` together, which are counted in multiples of `temporal`.

    Errors: MediaError for one that is too long.
    """
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_ratio(height, width)
    return _bounded(height, width, frames * height * width, round(frames / temporal) * temporal, factor, least, most)


def _bounded(height: int, width: int, pixels: int, frames: int, factor: int, least: int, most: int) -> tuple[int, int]:
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if frames * rows * columns > most:
        scale = math.sqrt(pixels / most)
        return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if frames * rows * columns < least:
        scale = math.sqrt(least / pixels)
        return tuple(math.ceil(side * scale / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return rows, columns


def check_ratio(height: int, width: int) -> None:
    """MediaError where one side is more than 200 times the other."""
    if max(height, width) / min(height, width) > MOST_RATIO:
        raise MediaError(
            f"it has {width} x {height} pixels: one side is more than {MOST_RATIO} times the other, which leaves nothing to see"
        )


def frame_numbers(total: int, video_fps: float, fps: float, least: int, most: int) -> tuple[int, ...]:
    """Which of a video's `total` frames are taken: `fps` for each second, between `least` and `most` (and all, at most), evenly from the first to the last."""
    count = min(max(int(total / video_fps * fps), least), most, total)
    return tuple(numpy.linspace(0, total - 1, count).round().astype(int).tolist())


def timestamps(frames: Sequence[int], fps: float, temporal: int) -> list[float]:
    """Seconds of each temporal patch: the middle of its first and last frame; the last frame is repeated where frames are missing."""
    padded = [*frames, *[frames[-1]] * (-len(frames) % temporal)]
    seconds = [number / fps for number in padded]
    return [(seconds[first] + seconds[first + temporal - 1]) / 2 for first in range(0, len(seconds), temporal)]
