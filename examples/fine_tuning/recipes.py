"""Supervised fine-tuning on conversations, then direct preference optimisation of what it gave: each a minute on a laptop.

intarsia train examples/fine_tuning/recipes.py:sft --dir runs/sft
intarsia train examples/fine_tuning/recipes.py:sft_templated --dir runs/sft-templated
intarsia train examples/fine_tuning/recipes.py:dpo --dir runs/dpo train.init_from=runs/sft
"""

from __future__ import annotations

from pathlib import Path

import chz
from intarsia.config import DataConfig, EvaluationConfig, MixturePart, Recipe, TrainConfig
from intarsia_chat.config import TemplatedConfig
from intarsia_data.config import ByteTokenizerConfig, JsonlConfig, PackedConfig
from intarsia_llama3 import recipes
from intarsia_optimizers.config import AdamWConfig, CosineConfig
from intarsia_rl.algorithms.config import DPOConfig
from intarsia_rl.preferences.config import PreferenceFilesConfig, PreferencesConfig

HERE = Path(__file__).parent


def sft() -> Recipe:
    """Cross-entropy on what the assistant says; each conversation has a row of its own, so that none is cut."""
    source = JsonlConfig(paths=(str(HERE / "conversations.jsonl"),), field="messages")
    return chz.replace(
        recipes.debug(),
        name="sft",
        data=DataConfig(
            loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=source),), packing="one_per_row"
        ),
        train=TrainConfig(steps=150, sequence_length=64, micro_batch=16, global_batch=16),
        evaluation=EvaluationConfig(every=50, batches=2),
    )


def sft_templated() -> Recipe:
    """The same conversations as a chat template writes them, for a model whose special tokens are those of the template."""
    recipe = sft()
    tokenizer = TemplatedConfig(tokenizer=ByteTokenizerConfig(specials=("<|im_start|>", "<|im_end|>")), template="chatml")
    return chz.replace(
        recipe,
        name="sft-templated",
        model=chz.replace(recipe.model, vocab_size=max(recipe.model.vocab_size, 266)),
        data=chz.replace(recipe.data, tokenizer=tokenizer),
        train=chz.replace(recipe.train, sequence_length=192),
    )


def dpo() -> Recipe:
    """Pairs, against the weights that the run begins with."""
    source = PreferenceFilesConfig(paths=(str(HERE / "preferences.jsonl"),))
    return chz.replace(
        sft(),
        name="dpo",
        data=DataConfig(loader=PreferencesConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=source),)),
        loss=DPOConfig(beta=0.1),
        optimizer=AdamWConfig(lr=1e-4),
        schedule=CosineConfig(warmup_steps=5),
        train=TrainConfig(steps=40, sequence_length=128, micro_batch=4, global_batch=16),
        evaluation=EvaluationConfig(every=20, batches=1, at_start=True),
    )
