"""Plans of models that see: images are part of a row's tokens, memory and FLOPs, and whole pipelines of hybrids are traced."""

from __future__ import annotations

from typing import Any

import chz
import pytest
import torch
from intarsia import plugins
from intarsia.config import Recipe, resolve
from intarsia.mesh import check_mesh
from intarsia_planner import media
from intarsia_planner.devices import find
from intarsia_planner.plan import RunPlan, make_plan


def planned(recipe: Recipe, ranks: int = 1, device: str = "h200") -> RunPlan:
    return make_plan(recipe, check_mesh(recipe.mesh, ranks), find(device), plugins.current())


def recipe_of(name: str, *overrides: str) -> Recipe:
    return resolve(name, list(overrides)).recipe


SEEING = ("data.loader=multimodal", "data.loader.processor=patches", "data.loader.patches=8192")


def test_a_rows_images_are_a_share_of_its_tokens_within_the_loaders_budget():
    recipe: Any = recipe_of("qwen3_vl/2b", *SEEING)
    assert media.grids_of(recipe) == ((1, 32, 32),) * 8  # 8192 patches are the budget, half of the tokens would be 16,384
    assert media.grids_of(recipe_of("qwen3_vl/2b", *SEEING, "model.vision.share=0.125")) == ((1, 32, 32),) * 4
    assert media.grids_of(recipe_of("qwen3_vl/debug", "data.loader.patches=40")) == ((1, 2, 20),)
    assert media.grids_of(recipe_of("qwen3_vl/2b", *SEEING, "model.vision.share=0.0")) == ()
    assert (
        media.grids_of(recipe_of("qwen3_vl/2b"))
        == media.grids_of(recipe_of("qwen3_5/text-debug"))
        == ()
        == media.grids_of(recipe_of("llama3/debug"))
    )
    extra = media.extra_of(recipe, 2)
    assert extra["patches_NC"].shape == (2 * 8192, 3 * 2 * 16 * 16) and len(extra["grids"]) == 16
    assert extra["visual_BS"].shape == (2, 8192) and extra["positions_3BS"].shape == (3, 2, 8192)


def test_flops_are_the_texts_and_the_towers():
    recipe: Any = recipe_of("qwen3_vl/debug")
    blind = planned(chz.replace(recipe, model=chz.replace(recipe.model, vision=chz.replace(recipe.model.vision, share=0.0))))
    seeing = planned(recipe)
    with torch.device("meta"):
        model: Any = plugins.current().build(recipe.model)
    rows, tokens = recipe.train.global_batch, recipe.train.sequence_length
    assert blind.flops == pytest.approx(rows * tokens * model.flops_per_token(tokens))
    assert seeing.flops == pytest.approx(blind.flops + rows * model.media_flops({"grids": media.grids_of(recipe)}))
    (one,), (other,) = seeing.stages, blind.stages
    assert one.flops - other.flops == pytest.approx(seeing.flops - blind.flops, rel=0.1)  # backward of attention makes its scores again
    assert one.held.activations > other.held.activations and one.elements == other.elements


def test_a_tower_that_is_recomputed_keeps_less_and_computes_more():
    recipe: Any = recipe_of("qwen3_vl/debug")
    made = [chz.replace(recipe.model, vision=chz.replace(recipe.model.vision, recompute=policy)) for policy in ("never", "always")]
    kept, recomputed = (planned(chz.replace(recipe, model=model)).stages[0] for model in made)
    assert recomputed.held.activations < 0.8 * kept.held.activations
    assert recomputed.flops > kept.flops


@pytest.mark.parametrize("name", ["qwen3_vl/debug", "qwen3_vl/moe-debug", "qwen3_5/debug", "qwen3_5/moe-debug"])
def test_every_axis_is_planned(name):
    moe = ["mesh.ep=2"] if "moe" in name else []
    mesh = ["mesh.pp=2", "mesh.cp=2", "mesh.tp=2", "mesh.dp_shard=2", "engine=pipeline", "train.micro_batch=1", *moe]
    plan = planned(recipe_of(name, *mesh), 16)
    assert len(plan.stages) == 2 and all(stage.held.peak > 0 for stage in plan.stages)
    assert {axes for stage in plan.stages for axes, _ in stage.wire} >= {"tp", "cp", "pp"}


@pytest.mark.slow
def test_the_largest_hybrid_on_1024_ranks():
    plan = planned(recipe_of("qwen3_5/397b-a17b", *SEEING, "mesh.pp=4", "mesh.ep=64", "engine=pipeline"), 1024)
    assert plan.elements - plan.ahead == 396_802_360_816 and plan.devices == 1024 and plan.fits
