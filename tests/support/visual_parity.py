"""Parity of a family that sees with its reference class: text, images, video, and rows that mix them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from intarsia_testing.parity import ParityTests
from intarsia_testing.parity_samples import BATCHES, Samples, make_samples
from torch import Tensor


class VisualParity(ParityTests):
    """As `ParityTests`, over each of the kit's batches with images and video."""

    noise = 0.1
    batches: ClassVar[tuple[str, ...]] = tuple(BATCHES)

    def samples(self, theirs: Any, batch: str) -> Samples:
        """Rows by the rules of Qwen3-VL."""
        vision = theirs.config.vision_config
        return make_samples(BATCHES[batch], vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    def gradient_scale(self, name: str, gradients: Mapping[str, Tensor]) -> float:
        """What a bias of keys does to all scores of a query alike has no effect: of its gradient much is what rounding leaves."""
        return super().gradient_scale(name.replace(".wk.bias", ".wv.bias"), gradients)
