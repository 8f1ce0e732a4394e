"""Runs of Qwen3-VL, from minutes on a laptop to the published sizes. Torch-free.

The larger recipes name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere; a real run says

    data.tokenizer=tokenizer_json data.tokenizer.path=... data.loader=multimodal data.loader.processor=patches data.mixture.0.source=media_jsonl data.mixture.0.source.paths=[...]

where the defaults of `patches` are what transformers' processor of the family does.
"""

from __future__ import annotations

from functools import partial

from intarsia.config import Recipe
from intarsia_models_common.recipes import published_run, small_visual_run
from intarsia_multimodal.recipes import drawn_data

from intarsia_qwen3_vl import config

_published = partial(published_run, sequence_length=8192)


def debug() -> Recipe:
    """Questions on drawn images, every part of the dense models in 2.0 M parameters."""
    return small_visual_run("qwen3-vl-debug", config.debug(), drawn_data())


def moe_debug() -> Recipe:
    """The same with experts."""
    return small_visual_run("qwen3-vl-moe-debug", config.moe_debug(), drawn_data())


def qwen3_vl_2b() -> Recipe:
    """Qwen3-VL 2B on 8192-token rows."""
    return _published("qwen3-vl-2b", config.qwen3_vl_2b(), lr=4e-4, steps=100_000, global_batch=256)


def qwen3_vl_4b() -> Recipe:
    """Qwen3-VL 4B on 8192-token rows."""
    return _published("qwen3-vl-4b", config.qwen3_vl_4b(), lr=3e-4, steps=100_000, global_batch=512)


def qwen3_vl_8b() -> Recipe:
    """Qwen3-VL 8B on 8192-token rows."""
    return _published("qwen3-vl-8b", config.qwen3_vl_8b(), lr=3e-4, steps=200_000, global_batch=1024)


def qwen3_vl_32b() -> Recipe:
    """Qwen3-VL 32B on 8192-token rows."""
    return _published("qwen3-vl-32b", config.qwen3_vl_32b(), lr=1.5e-4, steps=300_000, global_batch=2048)


def qwen3_vl_30b_a3b() -> Recipe:
    """Qwen3-VL 30B-A3B on 8192-token rows."""
    return _published("qwen3-vl-30b-a3b", config.qwen3_vl_30b_a3b(), lr=3e-4, steps=200_000, global_batch=2048)


def qwen3_vl_235b_a22b() -> Recipe:
    """Qwen3-VL 235B-A22B on 8192-token rows."""
    return _published("qwen3-vl-235b-a22b", config.qwen3_vl_235b_a22b(), lr=1.5e-4, steps=400_000, global_batch=4096)
