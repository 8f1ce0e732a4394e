"""A DeepSeek-V3-like mixture of experts trained on one CPU thread in float32: tokens per CPU-second against torchtitan's, as JSON.

    python benchmarks/moe_cpu.py [--steps 10] [--pairs 3]

Width 256, 4 layers of latent attention and 8 experts of which 2 take each token, a shared expert, 8.4 M parameters, rows of 512 tokens, 4 to a step, AdamW. A short and a longer run of
`intarsia train` are made by turns; the difference of their CPU-seconds over the difference of their tokens leaves out starting up, and is what a busy machine
changes least. Every step is a whole one: data, forward, backward, clipping, update, events.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from intarsia.config import CheckpointConfig, DataConfig, EvaluationConfig, MixturePart, Recipe, TrainConfig
from intarsia_checkpoint_posix.config import PosixConfig
from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_data.config import ByteTokenizerConfig, PackedConfig, StdlibConfig
from intarsia_deepseek_v3.config import deepseek_v3, v3_router
from intarsia_eager.config import CrossEntropyConfig, EagerConfig
from intarsia_flexshard.config import FlexShardConfig
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_optimizers.config import AdamWConfig, CosineConfig

TOKENS = 4 * 512
TORCHTITAN_TOKENS_PER_CPU_S = 1394.0
"""torchtitan 0.3.0, patched to run on a CPU at all (its experts are hard-wired to bfloat16), with torch 2.13 on a two-core machine at this size."""
WANTED = 1.1
WARMUP = 3


def recipe() -> Recipe:
    """The run."""
    return Recipe(
        name="moe-cpu",
        model=deepseek_v3(
            dim=256,
            layers=4,
            dense_layers=0,
            attention=MLAConfig(heads=4, kv_rank=64, nope_dim=64, rope_dim=32, value_dim=64),
            dense_hidden=1024,
            router=v3_router(experts=8, top_k=2, groups=4, top_groups=2, scale=2.5),
            expert_hidden=256,
            shared_experts=1,
            vocab_size=1024,
            rope=RopeConfig(interleaved=True),
            max_positions=512,
        ),
        data=DataConfig(loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=(MixturePart(source=StdlibConfig()),)),
        optimizer=AdamWConfig(lr=1e-3),
        schedule=CosineConfig(),
        loss=CrossEntropyConfig(),
        engine=EagerConfig(),
        sharder=FlexShardConfig(),
        checkpoint=CheckpointConfig(every=0, backend=StreamConfig(), storage=PosixConfig()),
        train=TrainConfig(steps=WARMUP, sequence_length=512, micro_batch=4, global_batch=4, threads=1, device="cpu"),
        evaluation=EvaluationConfig(every=0),
    )


def cpu_seconds(folder: Path, steps: int, more: list[str]) -> float:
    """User and system seconds of a run of so many steps."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", "intarsia", "train", f"{Path(__file__).resolve()}:recipe", "--dir", str(run), "--quiet"]
    command += [f"train.steps={steps}", f"data.cache={folder / 'cache'}", *more]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps that count")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE", help="changes to the recipe")
    arguments = parser.parse_args()
    rates = []
    with tempfile.TemporaryDirectory() as name:
        cpu_seconds(Path(name), 1, arguments.overrides)  # fills the cache
        for _ in range(arguments.pairs):
            short = cpu_seconds(Path(name), WARMUP, arguments.overrides)
            long = cpu_seconds(Path(name), WARMUP + arguments.steps, arguments.overrides)
            rates.append(arguments.steps * TOKENS / (long - short))
    rate = statistics.median(rates)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": sys.version.split()[0],
        "tokens_per_cpu_s": rate,
        "raw": rates,
        "torchtitan_tokens_per_cpu_s": TORCHTITAN_TOKENS_PER_CPU_S,
        "ratio": rate / TORCHTITAN_TOKENS_PER_CPU_S,
        "enough": rate >= WANTED * TORCHTITAN_TOKENS_PER_CPU_S,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
