"""What a vision tower costs, by the sizes of images. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia_models_common.vision.config import VisionConfig


def frame_flops(config: VisionConfig, rows: int, columns: int, trunk: float = 1.0, mergers: float = 1.0) -> float:
    """FLOPs of the forward pass over one frame of rows x columns patches: 2 for each weight of each projection, and 4 for each channel of each pair of patches. What the mergers do counts `mergers` times, what
    comes before them `trunk` times."""
    patches, merged = rows * columns, config.merge**2 * config.dim
    block = 2.0 * (4 * config.dim**2 + 2 * config.dim * config.hidden) + 4.0 * config.dim * patches
    feature = 2.0 * (merged**2 + merged * config.out_dim) * (1 + len(config.deepstack))
    return trunk * patches * (2.0 * config.values * config.dim + config.depth * block) + mergers * patches / config.merge**2 * feature


def tower_flops(config: VisionConfig, grids: Sequence[Sequence[int]], trunk: float = 1.0, mergers: float = 1.0) -> float:
    """FLOPs of the forward pass over images and videos of these (frames, rows, columns), weighed as in `frame_flops`."""
    return sum(frames * frame_flops(config, rows, columns, trunk, mergers) for frames, rows, columns in grids)
