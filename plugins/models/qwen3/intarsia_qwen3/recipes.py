"""Runs of Qwen3, from minutes on a laptop to the published sizes. Torch-free.

The larger recipes name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere; a real run says
`data.tokenizer=...` and `data.mixture.0.source=jsonl data.mixture.0.source.paths=[...]`. Rows of 4096 tokens are the published first stage's; rates and batches, which are not published,
are what models of such sizes are trained with.
"""

from __future__ import annotations

from intarsia.config import Recipe
from intarsia_models_common.config import SwiGLUConfig
from intarsia_models_common.recipes import published_run, small_run

from intarsia_qwen3 import config
from intarsia_qwen3.config import Qwen3Config


def debug() -> Recipe:
    """Bytes of Python's own standard library, 1.8 M parameters, Muon: two minutes on two cores."""
    return small_run("qwen3-debug", config.debug())


def moe_debug() -> Recipe:
    """The same with experts."""
    return small_run("qwen3-moe-debug", config.moe_debug())


def _published(name: str, model: Qwen3Config, *, lr: float, steps: int, global_batch: int, recompute: bool = True) -> Recipe:
    dense = isinstance(model.layers[0].feed_forward, SwiGLUConfig)
    return published_run(
        name, model, lr=lr, steps=steps, sequence_length=4096, global_batch=global_batch, compiled=dense, recompute=recompute
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
