"""Recipes that `parallel_gpu.py` runs: eight layers of Llama 3 8B's width, and a mixture of experts shaped as DeepSeek-V3's, in bfloat16.

Rows hold one document, so that what is counted is what is computed.
"""

from __future__ import annotations

import os
from pathlib import Path

import chz
from intarsia.config import CheckpointConfig, DataConfig, EvaluationConfig, MixturePart, Recipe, TrainConfig
from intarsia_data.config import PackedConfig, TextConfig
from intarsia_deepseek_v3.config import DeepSeekV3Config, deepseek_v3, v3_router
from intarsia_llama3 import recipes as llama
from intarsia_llama3.config import llama3
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_optimizers.config import ConstantConfig
from train_gpu import long_text

FOLDER = Path(os.environ.get("INTARSIA_BENCH_FOLDER", "runs/bench"))


def _timed(recipe: Recipe, sequence: int, rows: int) -> Recipe:
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = TextConfig(paths=(str(long_text(FOLDER, 4_000_000)),))
    return chz.replace(
        recipe,
        data=DataConfig(loader=PackedConfig(), tokenizer=recipe.data.tokenizer, mixture=(MixturePart(source=source),), held_out=0.0),
        schedule=ConstantConfig(),
        train=TrainConfig(steps=14, sequence_length=sequence, micro_batch=1, global_batch=rows),
        evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=0, backend=recipe.checkpoint.backend, storage=recipe.checkpoint.storage),
    )


def wide() -> Recipe:
    """Eight layers of Llama 3 8B's width, vocabulary 32000, rows of 8192 tokens, eight rows a step."""
    model = llama3(dim=4096, layers=8, heads=32, kv_heads=8, head_dim=128, hidden=14336, vocab_size=32000)
    return _timed(chz.replace(llama.llama3_8b(), name="wide", model=model, recompute=llama.llama3_1b().recompute), 8192, 8)


def wide_debug() -> Recipe:
    """The same of a size for a CPU."""
    model = llama3(dim=64, layers=8, heads=4, kv_heads=2, head_dim=16, hidden=128, vocab_size=320)
    return _timed(chz.replace(llama.llama3_8b(), name="wide-debug", model=model, recompute=llama.llama3_1b().recompute), 128, 8)


def _experts(layers: int, dim: int, heads: int, rank: int, experts: int, hidden: int, vocab_size: int) -> DeepSeekV3Config:
    return deepseek_v3(
        dim=dim,
        layers=layers,
        dense_layers=1,
        attention=MLAConfig(heads=heads, kv_rank=rank, nope_dim=dim // 16, rope_dim=dim // 32, value_dim=dim // 16),
        dense_hidden=4 * hidden,
        router=v3_router(experts=experts, top_k=6, groups=1, top_groups=1, scale=2.446),
        expert_hidden=hidden,
        shared_experts=2,
        vocab_size=vocab_size,
        rope=RopeConfig(interleaved=True),
        max_positions=8192,
    )


def experts() -> Recipe:
    """Four layers shaped as Moonlight's (DeepSeek-V3's code, 64 experts of which 6 serve a token), rows of 4096 tokens, two at a time, 16 a step."""
    model = _experts(4, 2048, 16, 512, 64, 1408, 32000)
    recipe = _timed(chz.replace(llama.llama3_8b(), name="experts", model=model, recompute=llama.llama3_1b().recompute), 4096, 16)
    return chz.replace(recipe, train=chz.replace(recipe.train, micro_batch=2))


def experts_debug() -> Recipe:
    """The same of a size for a CPU."""
    model = _experts(3, 64, 4, 16, 8, 32, 320)
    return _timed(chz.replace(llama.llama3_8b(), name="experts-debug", model=model, recompute=llama.llama3_1b().recompute), 128, 8)
