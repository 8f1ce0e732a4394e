"""The recipe that the benchmarks run: the Llama of `bare_loop.py`, by the trainer. `intarsia train benchmarks/recipe.py:paired ...`

One long document of random bytes (the head still has 2048 rows), so that every row is one document, as in the bare loop.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import chz
from intarsia.config import CheckpointConfig, DataConfig, EvaluationConfig, MixturePart, ModelConfig, Recipe, TrainConfig
from intarsia_data.config import JsonlConfig, PackedConfig
from intarsia_llama3 import recipes
from intarsia_llama3.config import llama3
from intarsia_optimizers.config import AdamWConfig, ConstantConfig

VOCABULARY, ROWS = 2048, 4


def documents(folder: Path, tokens: int = 200_000) -> Path:
    """A file with one document of random ids, made once."""
    path = folder / f"ids-{tokens}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(0)
        path.write_text(json.dumps({"tokens": [draw.randrange(256) for _ in range(tokens)]}) + "\n", encoding="utf-8")
    return path


def model(layers: int = 6) -> ModelConfig:
    """Dim 256, 8 heads, 4 KV heads of 32, hidden 768, vocabulary 2048."""
    return llama3(vocab_size=VOCABULARY, dim=256, layers=layers, heads=8, kv_heads=4, head_dim=32, hidden=768, max_positions=512)


def paired() -> Recipe:
    """Against `bare_loop.py`."""
    base = recipes.debug()
    source = JsonlConfig(
        paths=(
            str(
                documents(Path(os.environ.get("INTARSIA_BENCH_FOLDER", "runs/bench"))),
            ),
        ),
        field="tokens",
    )
    return chz.replace(
        base,
        name="paired",
        model=model(),
        data=DataConfig(loader=PackedConfig(), tokenizer=base.data.tokenizer, mixture=(MixturePart(source=source),), held_out=0.0),
        optimizer=AdamWConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=ConstantConfig(),
        train=TrainConfig(steps=30, sequence_length=512, micro_batch=ROWS, global_batch=ROWS, threads=1),
        evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=0, backend=base.checkpoint.backend, storage=base.checkpoint.storage),
    )
