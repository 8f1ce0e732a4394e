"""Bicubic resizing with antialiasing, by Pillow or by torch, and the normalisation that goes with each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from PIL import Image


def resize(image_HWC: numpy.ndarray, height: int, width: int, how: str) -> numpy.ndarray:
    """An image uint8 [H, W, 3] at another size. `how` is "pillow" or "torch"."""
    if how == "pillow":
        return numpy.asarray(Image.fromarray(image_HWC).resize((width, height), Image.Resampling.BICUBIC))
    import torch

    if image_HWC.shape[:2] == (height, width):
        return image_HWC
    planes_1CHW = torch.from_numpy(numpy.ascontiguousarray(image_HWC.transpose(2, 0, 1)))[None]
    resized_1CHW = torch.nn.functional.interpolate(planes_1CHW, (height, width), mode="bicubic", align_corners=False, antialias=True)
    return resized_1CHW[0].permute(1, 2, 0).contiguous().numpy()


def level_table(mean: Sequence[float], std: Sequence[float], how: str) -> numpy.ndarray:
    """What each of the 256 levels of each channel becomes, float32 [3, 256]: (level / 255 - mean) / std, rounded where the library named by `how` rounds."""
    levels = numpy.arange(256)
    mean_C1, std_C1 = (numpy.asarray(values, dtype=numpy.float32)[:, None] for values in (mean, std))
    if how == "pillow":
        scaled = (levels.astype(numpy.float64) * (1 / 255)).astype(numpy.float32)
        return (scaled - mean_C1) / std_C1
    factor = numpy.float32(1.0 / (1 / 255))
    return (levels.astype(numpy.float32) - mean_C1 * factor) / (std_C1 * factor)


def to_patches(frames_THWC: numpy.ndarray, table_CL: numpy.ndarray, patch: int, temporal: int, merge: int) -> numpy.ndarray:
    """Patches float32 [t * h * w, 3 * temporal * patch * patch] of frames uint8 [T, H, W, 3], T and H, W multiples of temporal and patch * merge.

    Order of patches: frame, block row, block column, row in the block, column in the block. Values of a patch: channel, frame, row, column.
    """
    count, height, width, channels = frames_THWC.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = frames_THWC.reshape(count // temporal, temporal, rows, merge, patch, columns, merge, patch, channels)
    blocks = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    patches = numpy.empty(blocks.shape, numpy.float32)
    for channel in range(channels):
        patches[:, :, :, :, :, channel] = table_CL[channel][blocks[:, :, :, :, :, channel]]
    return patches.reshape(-1, channels * temporal * patch * patch)


def from_patches(
    patches_NC: numpy.ndarray,
    grid: tuple[int, int, int],
    mean: Sequence[float],
    std: Sequence[float],
    patch: int,
    temporal: int,
    merge: int,
) -> numpy.ndarray:
    """The frames uint8 [T, H, W, 3] of patches: the inverse of `to_patches`, up to rounding."""
    frames, rows, columns = grid
    channels = len(mean)
    blocks = patches_NC.reshape(frames, rows // merge, columns // merge, merge, merge, channels, temporal, patch, patch)
    pixels = blocks.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(frames * temporal, rows * patch, columns * patch, channels)
    levels = (pixels * numpy.asarray(std, numpy.float32) + numpy.asarray(mean, numpy.float32)) * 255
    return numpy.clip(numpy.rint(levels), 0, 255).astype(numpy.uint8)
