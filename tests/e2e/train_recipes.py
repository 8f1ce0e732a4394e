"""A recipe small enough for a hundred runs: 2 layers of width 16 on bytes, packed documents, accumulation, sizes that do not divide."""

from __future__ import annotations

from intarsia.config import CheckpointConfig, DataConfig, EvaluationConfig, MixturePart, Recipe, TrainConfig
from intarsia_checkpoint_posix.config import PosixConfig
from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_data.config import ByteTokenizerConfig, PackedConfig, StdlibConfig
from intarsia_eager.config import CrossEntropyConfig, EagerConfig, WholeConfig
from intarsia_llama3.config import llama3
from intarsia_optimizers.config import AdamWConfig, CosineConfig


def tiny() -> Recipe:
    """8 steps of 5 rows, 2 rows in a micro-batch."""
    return Recipe(
        name="tiny",
        model=llama3(dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=32, vocab_size=264, max_positions=64),
        data=DataConfig(
            loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=StdlibConfig(limit=6)),), held_out=0.3
        ),
        optimizer=AdamWConfig(lr=1e-2),
        schedule=CosineConfig(warmup_steps=3),
        loss=CrossEntropyConfig(chunk=16),
        engine=EagerConfig(),
        sharder=WholeConfig(),
        checkpoint=CheckpointConfig(every=3, backend=StreamConfig(), storage=PosixConfig(), background=True),
        train=TrainConfig(steps=8, sequence_length=24, micro_batch=2, global_batch=5, threads=1),
        evaluation=EvaluationConfig(every=4, batches=2),
    )
