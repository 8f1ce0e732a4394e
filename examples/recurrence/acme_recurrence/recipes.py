"""Runs of the family. Torch-free."""

from __future__ import annotations

from intarsia.config import CheckpointConfig, DataConfig, MixturePart, Recipe, TrainConfig
from intarsia_checkpoint_posix.config import PosixConfig
from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_data.config import ByteTokenizerConfig, PackedConfig, StdlibConfig
from intarsia_eager.config import CrossEntropyConfig, EagerConfig
from intarsia_flexshard.config import FlexShardConfig
from intarsia_optimizers.config import AdamWConfig, ConstantConfig

from acme_recurrence.config import toy


def debug() -> Recipe:
    """Three steps on bytes of Python's standard library."""
    return Recipe(
        name="toy-recurrence-debug",
        model=toy(dim=32, layers=2, heads=4, head_dim=8, hidden=64, vocab_size=264, max_positions=128),
        data=DataConfig(tokenizer=ByteTokenizerConfig(), loader=PackedConfig(), mixture=(MixturePart(source=StdlibConfig(limit=6)),)),
        optimizer=AdamWConfig(lr=1e-2),
        schedule=ConstantConfig(),
        loss=CrossEntropyConfig(chunk=64),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=3, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=3, sequence_length=64, micro_batch=2, global_batch=4),
    )
