"""Runs of DeepSeek-V3 and its kin, from minutes on a laptop to the published sizes. Torch-free.

The larger recipes name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere; a real run says
`data.tokenizer=...` and `data.mixture.0.source=jsonl data.mixture.0.source.paths=[...]`.
"""

from __future__ import annotations

from intarsia.config import (
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    EvaluationConfig,
    MixturePart,
    OptimizerConfig,
    PrecisionConfig,
    Recipe,
    RecomputeConfig,
    ScheduleConfig,
    TrainConfig,
)
from intarsia_checkpoint_posix.config import PosixConfig
from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_data.config import ByteTokenizerConfig, PackedConfig, StdlibConfig
from intarsia_eager.config import CrossEntropyConfig, EagerConfig
from intarsia_flexshard.config import FlexShardConfig
from intarsia_optimizers.config import AdamWConfig, CosineConfig, MuonConfig, WSDConfig

from intarsia_deepseek_v3 import config
from intarsia_deepseek_v3.config import DeepSeekV3Config


def debug() -> Recipe:
    """Bytes of Python's own standard library, every part of V3 in 2 M parameters, Muon: two minutes on two cores."""
    return Recipe(
        name="deepseek-v3-debug",
        model=config.debug(),
        data=DataConfig(loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=StdlibConfig()),)),
        optimizer=MuonConfig(lr=0.03, weight_decay=0.01, momentum=0.9, adamw_lr=0.02, newton_schulz_dtype="float32"),
        schedule=WSDConfig(warmup_steps=10, decay=0.3),
        loss=CrossEntropyConfig(),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=100, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=200, sequence_length=256, micro_batch=8, global_batch=8),
        evaluation=EvaluationConfig(every=50, batches=16),
    )


def _published(
    name: str,
    model: DeepSeekV3Config,
    *,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    steps: int,
    sequence_length: int,
    global_batch: int,
) -> Recipe:
    return Recipe(
        name=name,
        model=model,
        data=DataConfig(loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=StdlibConfig()),)),
        optimizer=optimizer,
        schedule=schedule,
        loss=CrossEntropyConfig(chunk=2048),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=1000, keep_last=3, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=steps, sequence_length=sequence_length, micro_batch=1, global_batch=global_batch),
        precision=PrecisionConfig(master="float32", compute="bfloat16", reduce="float32"),
        compile=CompileConfig(mode="none"),
        recompute=RecomputeConfig(mode="blocks"),
        evaluation=EvaluationConfig(every=1000, batches=8),
    )


def deepseek_v3_671b() -> Recipe:
    """DeepSeek-V3 on 4096-token rows, 15,360 of them a step, with the published AdamW, peak rate, warm-up and weight of multi-token prediction."""
    return _published(
        "deepseek-v3-671b",
        config.deepseek_v3_671b(),
        optimizer=AdamWConfig(lr=2.2e-4, weight_decay=0.1, betas=(0.9, 0.95)),
        schedule=CosineConfig(warmup_steps=2000, floor=0.1),
        steps=235_000,
        sequence_length=4096,
        global_batch=15360,
    )


def moonlight_16b() -> Recipe:
    """Moonlight-16B-A3B on 8192-token rows, by Muon as published: its rate is AdamW's, since updates are scaled to AdamW's size."""
    return _published(
        "moonlight-16b",
        config.moonlight_16b(),
        optimizer=MuonConfig(lr=4.2e-4, weight_decay=0.1, momentum=0.95),
        schedule=CosineConfig(warmup_steps=2000, floor=0.1),
        steps=350_000,
        sequence_length=8192,
        global_batch=2048,
    )


def deepseek_v2_lite() -> Recipe:
    """DeepSeek-V2-Lite on 4096-token rows, 4608 of them a step, with the published AdamW, peak rate and warm-up."""
    return _published(
        "deepseek-v2-lite",
        config.deepseek_v2_lite(),
        optimizer=AdamWConfig(lr=4.2e-4, weight_decay=0.1, betas=(0.9, 0.95)),
        schedule=CosineConfig(warmup_steps=2000, floor=0.1),
        steps=300_000,
        sequence_length=4096,
        global_batch=4608,
    )
