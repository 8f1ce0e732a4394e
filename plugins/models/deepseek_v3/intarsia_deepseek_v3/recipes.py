"""Runs of DeepSeek-V3 and its kin, from minutes on a laptop to the published sizes. Torch-free.

The larger recipes name the byte tokenizer and the standard library's source, which are always there, so that any of them starts anywhere; a real run says
`data.tokenizer=...` and `data.mixture.0.source=jsonl data.mixture.0.source.paths=[...]`.
"""

from __future__ import annotations

import chz
from intarsia.config import Recipe
from intarsia_models_common.recipes import published_run, small_run
from intarsia_optimizers.config import MuonConfig

from intarsia_deepseek_v3 import config


def debug() -> Recipe:
    """Bytes of Python's own standard library, every part of V3 in 2 M parameters, Muon: two minutes on two cores."""
    return small_run("deepseek-v3-debug", config.debug())


def deepseek_v3_671b() -> Recipe:
    """DeepSeek-V3 on 4096-token rows, 15,360 of them a step, with the published AdamW, peak rate, warm-up and weight of multi-token prediction."""
    return published_run(
        "deepseek-v3-671b",
        config.deepseek_v3_671b(),
        lr=2.2e-4,
        steps=235_000,
        sequence_length=4096,
        global_batch=15360,
    )


def moonlight_16b() -> Recipe:
    """Moonlight-16B-A3B on 8192-token rows, by Muon as published: its rate is AdamW's, since updates are scaled to AdamW's size."""
    recipe = published_run("moonlight-16b", config.moonlight_16b(), lr=4.2e-4, steps=350_000, sequence_length=8192, global_batch=2048)
    return chz.replace(recipe, optimizer=MuonConfig(lr=4.2e-4, weight_decay=0.1, momentum=0.95))


def deepseek_v2_lite() -> Recipe:
    """DeepSeek-V2-Lite on 4096-token rows, 4608 of them a step, with the published AdamW, peak rate and warm-up."""
    return published_run(
        "deepseek-v2-lite",
        config.deepseek_v2_lite(),
        lr=4.2e-4,
        steps=300_000,
        sequence_length=4096,
        global_batch=4608,
    )
