"""Runs of Qwen3, from minutes on a laptop to the published sizes. Torch-free.

The larger recipes name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere; a real run says
`data.tokenizer=...` and `data.mixture.0.source=jsonl data.mixture.0.source.paths=[...]`. Rows of 4096 tokens are the published first stage's; rates and batches, which are not published,
are what models of such sizes are trained with.
"""

from __future__ import annotations

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
from intarsia_models_common.config import SwiGLUConfig
from intarsia_optimizers.config import AdamWConfig, CosineConfig, MuonConfig, WSDConfig

from intarsia_qwen3 import config
from intarsia_qwen3.config import Qwen3Config


def _debug(name: str, model: Qwen3Config) -> Recipe:
    return Recipe(
        name=name,
        model=model,
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


def debug() -> Recipe:
    """Bytes of Python's own standard library, 1.8 M parameters, Muon: two minutes on two cores."""
    return _debug("qwen3-debug", config.debug())


def moe_debug() -> Recipe:
    """The same with experts."""
    return _debug("qwen3-moe-debug", config.moe_debug())


def _published(name: str, model: Qwen3Config, *, lr: float, steps: int, global_batch: int, recompute: bool = True) -> Recipe:
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
        train=TrainConfig(steps=steps, sequence_length=4096, micro_batch=1, global_batch=global_batch),
        precision=PrecisionConfig(master="float32", compute="bfloat16", reduce="float32"),
        compile=CompileConfig(mode="local" if isinstance(model.layers[0].feed_forward, SwiGLUConfig) else "none"),
        recompute=RecomputeConfig(mode="blocks" if recompute else "none"),
        evaluation=EvaluationConfig(every=1000, batches=8),
    )


def qwen3_0_6b() -> Recipe:
    """Qwen3 0.6B on 4096-token rows."""
    return _published("qwen3-0.6b", config.qwen3_0_6b(), lr=6e-4, steps=100_000, global_batch=512, recompute=False)


def qwen3_1_7b() -> Recipe:
    """Qwen3 1.7B on 4096-token rows."""
    return _published("qwen3-1.7b", config.qwen3_1_7b(), lr=4e-4, steps=100_000, global_batch=512, recompute=False)


def qwen3_4b() -> Recipe:
    """Qwen3 4B on 4096-token rows."""
    return _published("qwen3-4b", config.qwen3_4b(), lr=3e-4, steps=200_000, global_batch=1024)


def qwen3_8b() -> Recipe:
    """Qwen3 8B on 4096-token rows."""
    return _published("qwen3-8b", config.qwen3_8b(), lr=3e-4, steps=200_000, global_batch=2048)


def qwen3_14b() -> Recipe:
    """Qwen3 14B on 4096-token rows."""
    return _published("qwen3-14b", config.qwen3_14b(), lr=2e-4, steps=300_000, global_batch=4096)


def qwen3_32b() -> Recipe:
    """Qwen3 32B on 4096-token rows."""
    return _published("qwen3-32b", config.qwen3_32b(), lr=1.5e-4, steps=400_000, global_batch=4096)


def qwen3_30b_a3b() -> Recipe:
    """Qwen3 30B-A3B on 4096-token rows; `mesh.ep` deals its experts out."""
    return _published("qwen3-30b-a3b", config.qwen3_30b_a3b(), lr=3e-4, steps=300_000, global_batch=4096)


def qwen3_235b_a22b() -> Recipe:
    """Qwen3 235B-A22B on 4096-token rows; `mesh.ep` deals its experts out, `mesh.pp` its layers."""
    return _published("qwen3-235b-a22b", config.qwen3_235b_a22b(), lr=1.5e-4, steps=400_000, global_batch=8192)
