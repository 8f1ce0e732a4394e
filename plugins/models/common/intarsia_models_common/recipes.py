"""Runs that families' recipes start from: minutes on a laptop, and published sizes. Torch-free.

They name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere.
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
from intarsia_optimizers.config import AdamWConfig, CosineConfig, MuonConfig, WSDConfig

from intarsia_models_common.config import LanguageModelConfig


def standard_library() -> DataConfig:
    """Bytes of the source of Python's own standard library."""
    return DataConfig(loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=StdlibConfig()),))


def small_run(name: str, model: LanguageModelConfig, *, steps: int = 200) -> Recipe:
    """Rows of 256 bytes, eight a step, by Muon."""
    return Recipe(
        name=name,
        model=model,
        data=standard_library(),
        optimizer=MuonConfig(lr=0.03, weight_decay=0.01, momentum=0.9, adamw_lr=0.02, newton_schulz_dtype="float32"),
        schedule=WSDConfig(warmup_steps=10, decay=0.3),
        loss=CrossEntropyConfig(),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=100, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=steps, sequence_length=256, micro_batch=8, global_batch=8),
        evaluation=EvaluationConfig(every=steps // 4, batches=16),
    )


def small_visual_run(name: str, model: LanguageModelConfig, data: DataConfig) -> Recipe:
    """The same for models of a family that sees, on `data`: longer, and by gentler steps."""
    return chz.replace(
        small_run(name, model, steps=450),
        data=data,
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
        evaluation=EvaluationConfig(every=100, batches=4),
    )


def published_run(
    name: str,
    model: LanguageModelConfig,
    *,
    lr: float,
    steps: int,
    sequence_length: int,
    global_batch: int,
    micro_batch: int = 1,
    compiled: bool = False,
    recompute: bool = True,
) -> Recipe:
    """AdamW under a cosine, bfloat16 with masters in float32. `compiled`: each block by itself; `recompute`: each block in backward."""
    return Recipe(
        name=name,
        model=model,
        data=standard_library(),
        optimizer=AdamWConfig(lr=lr, weight_decay=0.1, betas=(0.9, 0.95)),
        schedule=CosineConfig(warmup_steps=2000, floor=0.1),
        loss=CrossEntropyConfig(chunk=2048),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=1000, keep_last=3, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=steps, sequence_length=sequence_length, micro_batch=micro_batch, global_batch=global_batch),
        precision=PrecisionConfig(master="float32", compute="bfloat16", reduce="float32"),
        compile=CompileConfig(mode="local" if compiled else "none"),
        recompute=RecomputeConfig(mode="blocks" if recompute else "none"),
        evaluation=EvaluationConfig(every=1000, batches=8),
    )
