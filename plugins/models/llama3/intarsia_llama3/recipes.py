"""Runs of Llama 3, from minutes on a laptop to the published sizes. Torch-free.

The larger recipes name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere; a real run says
`data.tokenizer=...` and `data.mixture.0.source=jsonl data.mixture.0.source.paths=[...]`.
"""

from __future__ import annotations

from functools import partial

import chz
from intarsia.config import Recipe
from intarsia_models_common.recipes import published_run, small_run
from intarsia_optimizers.config import CosineConfig

from intarsia_llama3 import config

_published = partial(published_run, sequence_length=8192, compiled=True)


def debug() -> Recipe:
    """Bytes of Python's own standard library, 1.8 M parameters, Muon: below 2.3 bits per byte in about two minutes on two cores."""
    return small_run("llama3-debug", config.debug(), steps=400)


def llama3_1b() -> Recipe:
    """Llama 3.2 1B on 8192-token rows. Two rows at a time take 43 GB on one GPU and run 4 % faster than one, which takes 33 GB; four take 65 GB for 3 % more."""
    return _published("llama3-1b", config.llama3_1b(), lr=4e-4, steps=100_000, global_batch=256, recompute=False, micro_batch=2)


def llama3_3b() -> Recipe:
    """Llama 3.2 3B on 8192-token rows."""
    return _published("llama3-3b", config.llama3_3b(), lr=3e-4, steps=100_000, global_batch=512)


def llama3_8b() -> Recipe:
    """Llama 3.1 8B on 8192-token rows."""
    return _published("llama3-8b", config.llama3_8b(), lr=3e-4, steps=200_000, global_batch=1024)


def llama3_70b() -> Recipe:
    """Llama 3.1 70B on 8192-token rows."""
    return _published("llama3-70b", config.llama3_70b(), lr=1.5e-4, steps=400_000, global_batch=2048)


def llama3_405b() -> Recipe:
    """Llama 3.1 405B on 8192-token rows; 8e-5 and 8000 steps of warm-up as published."""
    recipe = _published("llama3-405b", config.llama3_405b(), lr=8e-5, steps=1_200_000, global_batch=2048)
    return chz.replace(recipe, schedule=CosineConfig(warmup_steps=8000, floor=0.01))
