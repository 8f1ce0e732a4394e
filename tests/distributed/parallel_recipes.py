"""Recipes of the tests that compare meshes with one process: small models with every part that a mesh may cut, on short documents."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import chz
from intarsia.config import CheckpointConfig, DataConfig, EvaluationConfig, MixturePart, ModelConfig, Recipe, TrainConfig
from intarsia_checkpoint_posix.config import PosixConfig
from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_data.config import ByteTokenizerConfig, JsonlConfig, PackedConfig
from intarsia_deepseek_v3 import recipes as deepseek_recipes
from intarsia_deepseek_v3.config import deepseek_v3, v3_router, yarn
from intarsia_llama3 import recipes as llama_recipes
from intarsia_llama3.config import llama3, scaled_rope
from intarsia_models_common.config import MLAConfig, SwiGLUConfig
from intarsia_models_common.moe.config import softmax_experts
from intarsia_multimodal.config import DrawnConfig
from intarsia_optimizers.config import AdamWConfig, ConstantConfig, MuonConfig
from intarsia_qwen3 import recipes as qwen_recipes
from intarsia_qwen3.config import qwen3
from intarsia_qwen3_5 import recipes as qwen3_5_recipes
from intarsia_qwen3_vl import recipes as qwen3_vl_recipes
from intarsia_rl.algorithms.config import DPOConfig
from intarsia_rl.preferences.config import PreferenceFilesConfig, PreferencesConfig

# Where the documents are: set by who runs the recipe.
FOLDER = "INTARSIA_TEST_DOCUMENTS"
LAYERS = 4
# AdamW divides by the gradient's size: where that is rounding alone, a larger eps keeps rounding from becoming an update.
ADAMW = AdamWConfig(lr=3e-3, eps=1e-6)
MUON = MuonConfig(lr=0.02, adamw_lr=3e-3, adamw_eps=1e-6, newton_schulz_dtype="float32")


def write_documents(folder: Path) -> None:
    """Short texts, so that rows hold several; some are longer than a row, some have a single letter."""
    draw = random.Random(5)
    words = ["mesh", "ring", "expert", "stage", "token", "shard", "of", "the", "a", "head"]
    with Path(folder, "documents.jsonl").open("w") as file:
        for number in range(160):
            length = (1, 3, 7, 20)[number % 4] if number % 11 else 60
            text = " ".join(draw.choice(words) for _ in range(length)) if number % 7 else "x"
            file.write(json.dumps({"text": text}) + "\n")


def _recipe(base: Recipe, model: ModelConfig) -> Recipe:
    source = JsonlConfig(paths=(os.environ.get(FOLDER, ".") + "/documents.jsonl",))
    return chz.replace(
        base,
        name="whole",
        model=model,
        data=DataConfig(
            loader=PackedConfig(),
            tokenizer=ByteTokenizerConfig(),
            mixture=(MixturePart(source=source),),
            prefetch=0,
            cache=os.environ.get(FOLDER, ".") + "/cache",
        ),
        optimizer=ADAMW,
        schedule=ConstantConfig(warmup_steps=1),
        checkpoint=CheckpointConfig(every=0, backend=StreamConfig(), storage=PosixConfig(), background=False),
        train=TrainConfig(steps=5, seed=4, sequence_length=64, micro_batch=2, global_batch=8, clip_norm=1.0),
        evaluation=EvaluationConfig(batches=1),
    )


def llama(layers: int = LAYERS, tied: bool = False) -> Recipe:
    """4 query heads on 2 key/value heads, stretched rotary positions."""
    model = llama3(
        dim=64,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=16,
        hidden=100,
        vocab_size=270,
        tied=tied,
        rope=scaled_rope(8.0, 32),
        max_positions=128,
        initial_std=0.08,
        embedding_std=0.5,
    )
    return _recipe(llama_recipes.debug(), model)


def llama_tied() -> Recipe:
    """The head is the embedding."""
    return llama(tied=True)


def llama_deep() -> Recipe:
    """Eight blocks, for schedules with several stages on each rank."""
    return llama(layers=8)


def llama_muon() -> Recipe:
    """By Muon, whose update of a matrix needs all of it."""
    return chz.replace(llama(), optimizer=MUON)


def deepseek(layers: int = LAYERS, tied: bool = False, ahead: int = 1) -> Recipe:
    """Latent attention, a dense block, groups of experts with moving biases and a loss within sequences, a shared expert, one token further ahead."""
    model = deepseek_v3(
        dim=64,
        layers=layers,
        dense_layers=1,
        attention=MLAConfig(heads=4, kv_rank=24, q_rank=28, nope_dim=12, rope_dim=8, value_dim=10),
        dense_hidden=100,
        router=v3_router(experts=8, top_k=2, groups=4, top_groups=2, scale=2.5, sequence_loss=0.01),
        expert_hidden=36,
        shared_experts=1,
        vocab_size=270,
        rope=yarn(10000.0, 4.0, 32, 1.0),
        max_positions=128,
        ahead=ahead,
        tied=tied,
        initial_std=0.08,
        embedding_std=0.5,
    )
    return _recipe(deepseek_recipes.debug(), model)


def deepseek_tied() -> Recipe:
    """One matrix embeds, embeds what follows, and is the head; two tokens further ahead."""
    return deepseek(tied=True, ahead=2)


def deepseek_deep() -> Recipe:
    """Eight blocks, for schedules with several stages on each rank."""
    return deepseek(layers=8)


def deepseek_muon() -> Recipe:
    """By Muon, whose update of a matrix, and of each expert's, needs all of it."""
    return chz.replace(deepseek(), optimizer=MUON)


def deepseek_tied_muon() -> Recipe:
    """What several stages have, by the optimizer whose state is least like a list of elements."""
    return chz.replace(deepseek_tied(), optimizer=MUON)


def qwen(packing: str = "concatenate") -> Recipe:
    """Norms over heads, experts but for one dense block, balanced by a loss of all layers together; 4 query heads on 2 key/value heads, wider together than the stream."""
    model = qwen3(
        dim=48,
        layers=LAYERS,
        heads=4,
        kv_heads=2,
        head_dim=16,
        feed_forward=softmax_experts(8, 2, 28, joint_loss=0.05),
        dense=SwiGLUConfig(hidden=100),
        dense_layers=(1,),
        vocab_size=270,
        max_positions=128,
        initial_std=0.08,
        embedding_std=0.5,
    )
    recipe = _recipe(qwen_recipes.moe_debug(), model)
    return chz.replace(recipe, data=chz.replace(recipe.data, packing=packing), train=chz.replace(recipe.train, steps=3, micro_batch=8))


def qwen_padded() -> Recipe:
    """One document to a row: most of it is padding, and ranks without a row have nothing else."""
    return qwen("one_per_row")


def _seeing(base: Recipe) -> Recipe:
    """A debug size on packed questions on drawn images, and on texts: rows with several images, and rows without any."""
    model = chz.replace(base.model, initial_std=0.08)
    recipe = _recipe(base, model)
    source = JsonlConfig(paths=(os.environ.get(FOLDER, ".") + "/documents.jsonl",))
    mixture = (MixturePart(source=DrawnConfig(documents=120)), MixturePart(source=source, weight=2.0))
    data = chz.replace(recipe.data, loader=chz.replace(base.data.loader, workers=0), tokenizer=base.data.tokenizer, mixture=mixture)
    # Recurrences answer rounding more strongly the faster they learn, and a rounding may send a token to another expert.
    optimizer = chz.replace(ADAMW, lr=3e-4)
    return chz.replace(recipe, data=data, optimizer=optimizer, train=chz.replace(recipe.train, steps=3, sequence_length=100, micro_batch=8))


def qwen3_vl() -> Recipe:
    """Three axes of positions, a vision tower, two DeepStack features."""
    return _seeing(qwen3_vl_recipes.debug())


def qwen3_vl_moe() -> Recipe:
    """The same with experts."""
    return _seeing(qwen3_vl_recipes.moe_debug())


def qwen3_5() -> Recipe:
    """Gated DeltaNet and gated attention in turns, a vision tower, one token further ahead."""
    return _seeing(qwen3_5_recipes.debug())


def qwen3_5_moe() -> Recipe:
    """The same with experts and a shared one behind a gate."""
    return _seeing(qwen3_5_recipes.moe_debug())


def write_preferences(folder: Path) -> None:
    """Short questions, of whose answers the one that ends in a letter of its question is preferred; a few are long."""
    draw = random.Random(6)
    with Path(folder, "preferences.jsonl").open("w") as file:
        for number in range(60):
            prompt = "".join(draw.choice("abcdef") for _ in range(1 + number % 9))
            tail = "x" * (9 if number % 13 == 0 else number % 4)
            file.write(json.dumps({"prompt": prompt, "chosen": tail + prompt[0], "rejected": tail[1:] + draw.choice("wyz")}) + "\n")


def preferences() -> Recipe:
    """Pairs of answers, by DPO."""
    recipe = llama(layers=2)
    source = PreferenceFilesConfig(paths=(os.environ.get(FOLDER, ".") + "/preferences.jsonl",))
    data = chz.replace(recipe.data, loader=PreferencesConfig(), mixture=(MixturePart(source=source),), held_out=0.2)
    train = TrainConfig(steps=5, seed=4, sequence_length=40, micro_batch=2, global_batch=8, clip_norm=1.0)
    return chz.replace(recipe, data=data, loss=DPOConfig(beta=0.3, likelihood=0.1), train=train, evaluation=EvaluationConfig(batches=2))
