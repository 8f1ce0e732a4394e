"""Data of small runs on drawn images, for recipes of model families. Torch-free."""

from __future__ import annotations

from intarsia.config import DataConfig, MixturePart
from intarsia_data.config import ByteTokenizerConfig

from intarsia_multimodal.config import DrawnConfig, MultimodalConfig, PatchProcessorConfig

SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens that the byte tokenizer is given; in debug sizes they have the ids of `model.vision_start_id` and its like."""


def small_processor() -> PatchProcessorConfig:
    """How debug sizes see: images of 32 x 32 pixels in patches of 8."""
    return PatchProcessorConfig(patch=8, min_pixels=1024, max_pixels=1024, video_min_pixels=1024, video_max_pixels=8192)


def drawn_data() -> DataConfig:
    """Questions on drawn images, as bytes."""
    return DataConfig(
        loader=MultimodalConfig(processor=small_processor(), patches=1024),
        tokenizer=ByteTokenizerConfig(specials=SPECIALS),
        mixture=(MixturePart(source=DrawnConfig(documents=20_000)),),
    )
