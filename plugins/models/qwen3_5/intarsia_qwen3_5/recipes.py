"""Runs of Qwen3.5, from minutes on a laptop to the published sizes. Torch-free.

The larger recipes name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere; a real run says

    data.tokenizer=tokenizer_json data.tokenizer.path=... data.loader=multimodal data.loader.processor=patches data.mixture.0.source=media_jsonl data.mixture.0.source.paths=[...]

where the defaults of `patches` are what transformers' processor of the family does.
"""

from __future__ import annotations

from functools import partial

from intarsia.config import Recipe
from intarsia_models_common.recipes import published_run, small_visual_run, standard_library
from intarsia_multimodal.recipes import drawn_data

from intarsia_qwen3_5 import config

_published = partial(published_run, sequence_length=8192)


def debug() -> Recipe:
    """Questions on drawn images, every part of the dense models in 1.6 M parameters."""
    return small_visual_run("qwen3-5-debug", config.debug(), drawn_data())


def moe_debug() -> Recipe:
    """The same with experts."""
    return small_visual_run("qwen3-5-moe-debug", config.moe_debug(), drawn_data())


def text_debug() -> Recipe:
    """Bytes of Python's own standard library, without a vision tower."""
    return small_visual_run("qwen3-5-text-debug", config.text_debug(), standard_library())


def qwen3_5_0_8b() -> Recipe:
    """Qwen3.5 0.8B on 8192-token rows."""
    return _published("qwen3-5-0.8b", config.qwen3_5_0_8b(), lr=5e-4, steps=100_000, global_batch=256)


def qwen3_5_2b() -> Recipe:
    """Qwen3.5 2B on 8192-token rows."""
    return _published("qwen3-5-2b", config.qwen3_5_2b(), lr=4e-4, steps=100_000, global_batch=256)


def qwen3_5_4b() -> Recipe:
    """Qwen3.5 4B on 8192-token rows."""
    return _published("qwen3-5-4b", config.qwen3_5_4b(), lr=3e-4, steps=100_000, global_batch=512)


def qwen3_5_9b() -> Recipe:
    """Qwen3.5 9B on 8192-token rows."""
    return _published("qwen3-5-9b", config.qwen3_5_9b(), lr=3e-4, steps=200_000, global_batch=1024)


def qwen3_5_27b() -> Recipe:
    """Qwen3.5 27B on 8192-token rows."""
    return _published("qwen3-5-27b", config.qwen3_5_27b(), lr=1.5e-4, steps=300_000, global_batch=2048)


def qwen3_5_35b_a3b() -> Recipe:
    """Qwen3.5 35B-A3B on 8192-token rows."""
    return _published("qwen3-5-35b-a3b", config.qwen3_5_35b_a3b(), lr=3e-4, steps=200_000, global_batch=2048)


def qwen3_5_122b_a10b() -> Recipe:
    """Qwen3.5 122B-A10B on 8192-token rows."""
    return _published("qwen3-5-122b-a10b", config.qwen3_5_122b_a10b(), lr=2e-4, steps=300_000, global_batch=4096)


def qwen3_5_397b_a17b() -> Recipe:
    """Qwen3.5 397B-A17B on 8192-token rows."""
    return _published("qwen3-5-397b-a17b", config.qwen3_5_397b_a17b(), lr=1.5e-4, steps=400_000, global_batch=4096)
