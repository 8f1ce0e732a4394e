"""Runs of Qwen3.5, from minutes on a laptop to the published sizes. Torch-free.

The larger recipes name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere; a real run says

    data.tokenizer=tokenizer_json data.tokenizer.path=... data.loader=multimodal data.loader.processor=patches data.mixture.0.source=media_jsonl data.mixture.0.source.paths=[...]

where the defaults of `patches` are what transformers' processor of the family does.
"""

from __future__ import annotations

import chz
from intarsia.config import (
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    EvaluationConfig,
    MixturePart,
    PrecisionConfig,
    Recipe,
    RecomputeConfig,
    TrainConfig,
)
from intarsia_checkpoint_posix.config import PosixConfig
from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_data.config import ByteTokenizerConfig, PackedConfig, StdlibConfig
from intarsia_eager.config import CrossEntropyConfig, EagerConfig
from intarsia_flexshard.config import FlexShardConfig
from intarsia_multimodal.config import DrawnConfig, MultimodalConfig, PatchProcessorConfig
from intarsia_optimizers.config import AdamWConfig, CosineConfig, MuonConfig, WSDConfig

from intarsia_qwen3_5 import config
from intarsia_qwen3_5.config import Qwen35Config

SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens that the byte tokenizer is given; in debug sizes they have the ids of `model.vision_start_id` and its like."""


def small_processor() -> PatchProcessorConfig:
    """How the debug sizes see: images of 32 x 32 pixels in patches of 8."""
    return PatchProcessorConfig(patch=8, min_pixels=1024, max_pixels=1024, video_min_pixels=1024, video_max_pixels=8192)


def _drawn() -> DataConfig:
    return DataConfig(
        loader=MultimodalConfig(processor=small_processor(), patches=1024),
        tokenizer=ByteTokenizerConfig(specials=SPECIALS),
        mixture=(MixturePart(source=DrawnConfig(documents=20_000)),),
    )


def _debug(name: str, model: Qwen35Config) -> Recipe:
    return Recipe(
        name=name,
        model=model,
        data=_drawn(),
        # Tables of positions and taps of convolutions are no maps between spaces.
        optimizer=MuonConfig(
            lr=0.003,
            adjust="match_rms_adamw",
            weight_decay=0.01,
            newton_schulz_dtype="float32",
            not_matrices=("*embed*", "*head*", "*positions*", "*_conv*"),
            adamw_lr=0.003,
            adamw_betas=(0.9, 0.98),
        ),
        schedule=WSDConfig(warmup_steps=30, decay=0.4),
        loss=CrossEntropyConfig(),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=100, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=450, sequence_length=256, micro_batch=8, global_batch=8),
        evaluation=EvaluationConfig(every=100, batches=4),
    )


def debug() -> Recipe:
    """Questions on drawn images, every part of the dense models in 1.6 M parameters."""
    return _debug("qwen3-5-debug", config.debug())


def moe_debug() -> Recipe:
    """The same with experts."""
    return _debug("qwen3-5-moe-debug", config.moe_debug())


def text_debug() -> Recipe:
    """Bytes of Python's own standard library, without a vision tower."""
    recipe = _debug("qwen3-5-text-debug", config.text_debug())
    data = DataConfig(loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=StdlibConfig()),))
    return chz.replace(recipe, data=data)


def _published(name: str, model: Qwen35Config, *, lr: float, steps: int, global_batch: int, recompute: bool = True) -> Recipe:
    return Recipe(
        name=name,
        model=model,
        data=DataConfig(loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=StdlibConfig()),)),
        optimizer=AdamWConfig(lr=lr, weight_decay=0.1, betas=(0.9, 0.95)),
        schedule=CosineConfig(warmup_steps=2000, floor=0.1),
        loss=CrossEntropyConfig(chunk=2048),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=1000, keep_last=3, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=steps, sequence_length=8192, micro_batch=1, global_batch=global_batch),
        precision=PrecisionConfig(master="float32", compute="bfloat16", reduce="float32"),
        compile=CompileConfig(mode="none"),
        recompute=RecomputeConfig(mode="blocks" if recompute else "none"),
        evaluation=EvaluationConfig(every=1000, batches=8),
    )


def qwen3_5_0_8b() -> Recipe:
    """Qwen3.5 0.8B on 8192-token rows."""
    return _published("qwen3-5-0.8b", config.qwen3_5_0_8b(), lr=5e-4, steps=100_000, global_batch=256)


def qwen3_5_2b() -> Recipe:
    """Qwen3.5 2B on 8192-token rows."""
    return _published("qwen3-5-2b", config.qwen3_5_2b(), lr=4e-4, steps=100_000, global_batch=256)


def qwen3_5_4b() -> Recipe:
    """Qwen3.5 4B on 8192-token rows."""
    return _published("qwen3-5-4b", config.qwen3_5_4b(), lr=3e-4, steps=100_000, global_batch=512)


def qwen3_5_9b() -> Recipe:
    """Qwen3.5 9B on 8192-token rows."""
    return _published("qwen3-5-9b", config.qwen3_5_9b(), lr=3e-4, steps=200_000, global_batch=1024)


def qwen3_5_27b() -> Recipe:
    """Qwen3.5 27B on 8192-token rows."""
    return _published("qwen3-5-27b", config.qwen3_5_27b(), lr=1.5e-4, steps=300_000, global_batch=2048)


def qwen3_5_35b_a3b() -> Recipe:
    """Qwen3.5 35B-A3B on 8192-token rows."""
    return _published("qwen3-5-35b-a3b", config.qwen3_5_35b_a3b(), lr=3e-4, steps=200_000, global_batch=2048)


def qwen3_5_122b_a10b() -> Recipe:
    """Qwen3.5 122B-A10B on 8192-token rows."""
    return _published("qwen3-5-122b-a10b", config.qwen3_5_122b_a10b(), lr=2e-4, steps=300_000, global_batch=4096)


def qwen3_5_397b_a17b() -> Recipe:
    """Qwen3.5 397B-A17B on 8192-token rows."""
    return _published("qwen3-5-397b-a17b", config.qwen3_5_397b_a17b(), lr=1.5e-4, steps=400_000, global_batch=4096)
