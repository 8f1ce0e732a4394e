"""A run on a laptop's CPU that learns from rewards for what it says of images. Torch-free. Needs intarsia-multimodal and intarsia-qwen3-vl (the extra `vision`)."""

from __future__ import annotations

import chz
from intarsia.config import Recipe
from intarsia_models_common.config import RopeConfig, SwiGLUConfig
from intarsia_models_common.vision.config import VisionConfig
from intarsia_multimodal.config import DrawnTasksConfig
from intarsia_multimodal.recipes import SPECIALS, small_processor
from intarsia_qwen3_vl.config import Qwen3VLConfig, qwen3_vl

from intarsia_environments.config import CharactersConfig
from intarsia_environments.recipes import small_run

LETTERS = "bgry"
"""The first ones of the four colours."""


def small_model(first_special: int) -> Qwen3VLConfig:
    """About 260 thousand parameters, with a tower of two blocks."""
    start, end, image, video = (first_special + number for number in range(len(SPECIALS)))
    return qwen3_vl(
        dim=64,
        layers=2,
        heads=4,
        kv_heads=4,
        head_dim=16,
        feed_forward=SwiGLUConfig(hidden=192),
        vision=VisionConfig(depth=2, dim=64, hidden=128, heads=4, out_dim=64, patch=8, table=4, deepstack=(0,), position_std=0.5),
        vocab_size=first_special + len(SPECIALS),
        rope=RopeConfig(theta=1e4, sections=(4, 2, 2)),
        max_positions=512,
        vision_start_id=start,
        vision_end_id=end,
        image_id=image,
        video_id=video,
        initial_std=0.06,
        embedding_std=0.5,
    )


def drawn_debug() -> Recipe:
    """Name the colour of what is drawn by its first letter. Seen: held-out reward 0 at first, 0.67 after 20 steps, 1 after 40. Whole words (answer=words) take several times as many."""
    environment = DrawnTasksConfig(questions=("colour",), answer="letter", ask=False, instructions="")
    tokenizer = CharactersConfig(alphabet=LETTERS, specials=SPECIALS)
    recipe = small_run("drawn-debug", environment, tokenizer, small_model(len(LETTERS) + 6), steps=60)
    loader = chz.replace(recipe.data.loader, processor=small_processor())
    return chz.replace(recipe, data=chz.replace(recipe.data, loader=loader))
