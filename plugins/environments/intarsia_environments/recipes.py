"""Runs that learn from rewards on a laptop's CPU. Torch-free.

What the numbers were chosen by: a policy with few ids finds right answers by chance, and a graded reward leads to them one token at a time. Fresh weights drawn with a deviation
of 0.06 (0.5 for embeddings) and a learning rate of 1e-3 learn; at 3e-3 entropy collapses before the answers are right, and so it does in smaller steps than of 256 samples, for some
seeds. Seen: alphabet_sort/debug, held-out reward 0.08 at first, 0.92 after 150 steps and 0.94 after 200; arithmetic/debug 0.25 at first, 0.81 after
200 and 0.85 after 300, with an entropy_coefficient of 0.05 as well: the rarest sums are never tried. code/debug learns to write what runs (reward 0.02 at first, 0.1 after 20 steps) and not, in its steps, what is right: a right expression is a matter of all or nothing, and each try costs the start of a sandbox.
"""

from __future__ import annotations

from intarsia.config import (
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    MixturePart,
    ModelConfig,
    Recipe,
    TokenizerConfig,
    TrainConfig,
)
from intarsia_checkpoint_posix.config import PosixConfig
from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_data.config import StdlibConfig
from intarsia_eager.config import EagerConfig
from intarsia_flexshard.config import FlexShardConfig
from intarsia_generation.engine.config import LocalConfig
from intarsia_llama3.config import Llama3Config, llama3
from intarsia_models_common.config import RopeConfig
from intarsia_optimizers.config import AdamWConfig, WSDConfig
from intarsia_rl.algorithms.config import GRPOConfig, PolicyLossConfig
from intarsia_rl.config import HeldOutConfig, RolloutsConfig
from intarsia_rl.processes.config import LeastLoadedConfig, LocalProcessesConfig
from intarsia_rl.render.config import ChatConfig
from intarsia_rl.weights.config import SharedMemoryConfig

from intarsia_environments.config import AlphabetSortConfig, ArithmeticConfig, CharactersConfig, CodeConfig


def small_model(tokenizer_ids: int) -> Llama3Config:
    """About 110 thousand parameters."""
    return llama3(
        dim=64,
        layers=2,
        heads=4,
        kv_heads=4,
        head_dim=16,
        hidden=192,
        vocab_size=tokenizer_ids,
        max_positions=512,
        rope=RopeConfig(theta=10000.0),
        initial_std=0.06,
        embedding_std=0.5,
    )


def small_run(
    name: str,
    environment: EnvironmentConfig,
    tokenizer: TokenizerConfig,
    model: ModelConfig,
    *,
    steps: int,
    groups: int = 16,
    group: int = 16,
    held_out: int = 64,
) -> Recipe:
    """A run that learns from rewards by GRPO."""
    return Recipe(
        name=name,
        model=model,
        data=DataConfig(
            loader=RolloutsConfig(
                environment=environment,
                generator=LocalConfig(max_sequences=groups * group),
                launcher=LocalProcessesConfig(),
                routing=LeastLoadedConfig(),
                renderer=ChatConfig(),
                weights=SharedMemoryConfig(),
                held_out=HeldOutConfig(tasks=held_out),
                group=group,
                groups=groups,
            ),
            tokenizer=tokenizer,
            # Every recipe names a source; rollouts read none.
            mixture=(MixturePart(source=StdlibConfig(limit=1)),),
        ),
        optimizer=AdamWConfig(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95)),
        schedule=WSDConfig(warmup_steps=10, decay=0.2),
        loss=PolicyLossConfig(algorithm=GRPOConfig()),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=50, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=steps, sequence_length=256, micro_batch=8, global_batch=8, threads=1),
    )


def alphabet_sort_debug() -> Recipe:
    """Sort two letters of eight, then a third one between them: two turns, a reward for every place."""
    environment = AlphabetSortConfig(letters=8, length=1, first=2, more=1, turns=2, separator="", instructions="")
    return small_run("alphabet-sort-debug", environment, CharactersConfig(alphabet="abcdefgh"), small_model(14), steps=250)


def arithmetic_debug() -> Recipe:
    """Sums of five digits from 0 to 2."""
    environment = ArithmeticConfig(level=0, partial=0.1, instructions="")
    return small_run("arithmetic-debug", environment, CharactersConfig(alphabet="0123456789+"), small_model(17), steps=300)


def code_debug() -> Recipe:
    """Write the expression that a function returns; each try runs in the sandbox."""
    environment = CodeConfig(level=0, form="expression", turns=2, tests=4, instructions="", tokens=8)
    tokenizer = CharactersConfig(alphabet="x0123456789+-*() ")
    return small_run("code-debug", environment, tokenizer, small_model(23), steps=100, groups=4, group=4, held_out=8)
