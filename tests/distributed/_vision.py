"""A tiny language model that sees, on meshes and in one process, for `test_vision_equals_one`: what both compute is compared on every rank."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chz
import torch
from intarsia import logical, plugins
from intarsia.comm import Communicator, SelfCommunicator, init_world
from intarsia.config import ParameterGroup, Recipe, RecomputeConfig
from intarsia.contracts import IGNORE, Batch, LossSum
from intarsia.layout import slices
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia.train.groups import freeze
from intarsia_eager.config import WholeConfig
from intarsia_eager.engine import EagerEngine
from intarsia_flexshard.config import FlexShardConfig
from intarsia_llama3 import recipes
from intarsia_llama3.sharding import TABLE
from intarsia_models_common.config import AttentionConfig, BlockConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.vision.base import VisionLanguageModel
from intarsia_models_common.vision.config import VisionConfig, VisionLanguageModelConfig
from intarsia_models_common.vision.sharding import vision_rows
from intarsia_parallel.config import DeclaredConfig
from intarsia_pipeline.config import PipelineConfig
from torch import Tensor

SCALE = 0.01
TOKENS = 21
IMAGE = 61
ROWS = (*TABLE, *vision_rows("visual"))

# (frames, rows, columns) of the images of each row, by micro-batch: many and few, a video, rows without any, and micro-batches without any.
IMAGES: dict[str, list[list[list[tuple[int, int, int]]]]] = {
    "uneven": [[[(1, 4, 6), (1, 2, 2)], []], [[(2, 2, 4)], [(1, 2, 2), (1, 2, 6), (1, 2, 2)]]],
    "one rank has none": [[[], []], [[(1, 4, 4)], [(3, 2, 2), (1, 2, 6)]]],
    "nobody has any": [[[], []], [[], []]],
    "text": [[[], []], [[], []]],
}


def config_of(depth: int = 3) -> VisionLanguageModelConfig:
    """Four blocks, the first two of which get DeepStack features; heads of 4 channels in the tower."""
    block = BlockConfig(attention=AttentionConfig(heads=4, kv_heads=2, head_dim=8), feed_forward=SwiGLUConfig(hidden=36))
    return VisionLanguageModelConfig(
        vocab_size=64,
        dim=32,
        max_positions=64,
        layers=(block,) * 4,
        rope=RopeConfig(sections=(2, 1, 1)),
        initial_std=0.2,
        embedding_std=0.5,
        vision=VisionConfig(depth=depth, dim=16, hidden=24, heads=2, out_dim=32, patch=2, table=3, deepstack=(0, 1)),
        image_id=IMAGE,
        video_id=60,
        vision_start_id=62,
        vision_end_id=63,
    )


def recipe_of(pipeline: bool = False, frozen: Sequence[str] = (), recompute: bool = False) -> Recipe:
    """One step of two micro-batches on each data rank."""
    base = recipes.debug()
    return chz.replace(
        base,
        model=config_of(),
        engine=PipelineConfig() if pipeline else base.engine,
        recompute=RecomputeConfig(mode="blocks" if recompute else "none"),
        parameter_groups=(ParameterGroup(name="still", match=tuple(frozen), frozen=True),) if frozen else (),
        train=chz.replace(base.train, micro_batch=2, global_batch=4, sequence_length=TOKENS),
    )


def batch_of(images: Sequence[Sequence[tuple[int, int, int]]], seed: int) -> Batch:
    """Rows of text, with features in the places of some tokens; all of a row's images are within it."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    tokens, labels = (torch.randint(60, (len(images), TOKENS), generator=generator) for _ in range(2))
    visual = torch.full((len(images), TOKENS), -1)
    positions, count = torch.arange(TOKENS).expand(3, len(images), TOKENS).clone(), 0
    for row, grids in enumerate(images):
        at = 1
        for frames, rows, columns in grids:
            features = frames * rows * columns // 4
            at += draw.randrange(2)
            visual[row, at : at + features] = torch.arange(count, count + features)
            positions[1, row, at : at + features] = at + torch.arange(features) % 3
            at, count = at + features, count + features
        assert at <= TOKENS
    tokens[visual >= 0] = IMAGE
    labels[visual >= 0] = IGNORE
    flat = tuple(grid for row in images for grid in row)
    patches = torch.randn(4 * count, 24, generator=generator)
    extra = {"positions_3BS": positions, "visual_BS": visual, "patches_NC": patches, "grids": flat}
    lengths = ((8, TOKENS - 8), (TOKENS,))[: len(images)]
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in lengths]).int()
    return Batch(tokens, labels, places, documents, lengths, extra=extra)


def model_of(recipe: Recipe) -> tuple[VisionLanguageModel, ParameterTable]:
    """On the meta device, frozen where the recipe says so."""
    assert isinstance(recipe.model, VisionLanguageModelConfig)
    with torch.device("meta"):
        model = VisionLanguageModel(recipe.model)
    freeze(recipe.parameter_groups, model)
    return model, ParameterTable.from_model(model, "float32", "float32", "float32", 3)


def one_process(recipe: Recipe, batches: Sequence[Batch]) -> tuple[float, dict[str, Tensor]]:
    """The sum of losses, and every gradient."""
    model, table = model_of(recipe)
    world = SelfCommunicator()
    sharded = plugins.current().build(WholeConfig()).shard(model, table, Mesh({}, world), world)
    model.train()
    results = EagerEngine(model, plugins.current().build(recipe.loss)).run(batches, SCALE, sharded)
    sharded.finish_gradients()
    return total_of(results), {name: each.grad for name, each in sharded.parameters().items() if each.grad is not None}


def total_of(results: Sequence[LossSum]) -> float:
    """The sum over micro-batches."""
    return sum(float(each.total) for each in results)


def on_mesh(world: Communicator, job: Mapping[str, Any]) -> dict[str, Any]:
    """One step on the job's mesh, held against one process: the largest difference of any gradient, relative to its largest element, and of the loss."""
    logical.reset()
    sizes = dict(job["mesh"])
    recipe = recipe_of("pp" in sizes, job.get("frozen", ()), job.get("recompute", False))
    batches = [batch_of(images, 7 + number) for number, images in enumerate(IMAGES[job["images"]])]
    if job["images"] == "text":  # By a loader that knows of no images: no rank runs the tower.
        batches = [dataclasses.replace(batch, extra={}) for batch in batches]
    expected_loss, expected = one_process(chz.replace(recipe, engine=recipes.debug().engine), batches)
    mesh = Mesh(check_mesh(chz.replace(recipe.mesh, **{"dp_shard": 1, **sizes}), world.size), world)
    model, table = model_of(recipe)
    parallel = plugins.current().build(DeclaredConfig(vision=job["vision"])).apply(model, table, mesh, recipe, ROWS)
    sharded = plugins.current().build(FlexShardConfig(debug=True)).shard(model, table, mesh, world)
    engine = plugins.current().build(recipe.engine, model, plugins.current().build(recipe.loss), recipe, parallel)
    model.train()
    mine = batches[mesh.data_rank :: mesh.data_ranks]
    for _ in range(2):  # The second step finds what the first one left.
        sharded.zero_gradients()
        results = engine.run(mine, SCALE, sharded)
        sharded.finish_gradients()
    worst, names = 0.0, []
    for name, parameter in sharded.parameters().items():
        if parameter.grad is None:
            continue
        names.append(name)
        layout, whole = table[name].layout, expected[name]
        boxes = layout.local(table.rank_in(layout)) if layout is not None else None
        local = whole.flatten() if boxes is None else torch.cat([whole[slices(box)].flatten() for box in boxes] or [whole.new_empty(0)])
        if local.numel():
            error = (parameter.grad.flatten().double() - local.double()).abs().max() / whole.double().abs().max().clamp(min=1e-12)
            worst = max(worst, float(error))
    loss = mesh.comm("pp", "dp_replicate", "dp_shard", "cp").all_reduce(torch.tensor(total_of(results), dtype=torch.float64), "sum", "loss")
    tower = {name: float(each.abs().max()) for name, each in expected.items() if name.startswith("visual.")}
    return {"worst": worst, "loss": abs(float(loss) / expected_loss - 1), "names": names, "expected": sorted(expected), "tower": tower}


def run(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A job of `_meshes`."""
    world = init_world("cpu", 300.0) if job["ranks"] > 1 else SelfCommunicator()
    try:
        return {"rank": on_mesh(world, job)}
    finally:
        world.close()
        logical.reset()
