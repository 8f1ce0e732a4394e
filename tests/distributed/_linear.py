"""A tiny model of Gated DeltaNet and attention (three to one), on meshes and in one process, for `test_linear_equals_one`: every gradient is compared on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chz
import torch
from intarsia import logical, plugins
from intarsia.comm import Communicator, SelfCommunicator, init_world
from intarsia.config import Recipe, RecomputeConfig
from intarsia.contracts import IGNORE, Batch, LossSum
from intarsia.layout import slices
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia_eager.config import WholeConfig
from intarsia_eager.engine import EagerEngine
from intarsia_flexshard.config import FlexShardConfig
from intarsia_llama3 import recipes
from intarsia_llama3.sharding import TABLE
from intarsia_models_common.base import LanguageModel
from intarsia_models_common.config import AttentionConfig, BlockConfig, LanguageModelConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.linear_attention.sharding import delta_rows
from intarsia_parallel.config import DeclaredConfig
from intarsia_pipeline.config import PipelineConfig
from torch import Tensor

SCALE = 0.01
# Documents of each row, by how a row is cut: over borders and at them, parts shorter than the convolution's four taps, ranks without tokens.
LENGTHS: dict[str, tuple[tuple[int, ...], ...]] = {
    "long": ((3, 40, 1, 29), (73,)),
    "whole": ((37,), (37,)),
    "at borders": ((10, 10, 1, 9), (20, 10)),
    "short": ((9,), (2, 7)),
    "few": ((3,), (3,)),
}
ROWS = (
    *(row for row in TABLE if "attention" not in row[0] or "norm" in row[0]),
    *(row for i in range(3) for row in delta_rows(f"layers.{i}.attention")),
    ("layers.3.attention", "attention_heads"),
    *((f"layers.3.attention.{name}", "column") for name in ("wq", "wk", "wv")),
    ("layers.3.attention.wo", "row"),
)


def config_of(chunk: int = 8) -> LanguageModelConfig:
    """Two key heads that serve two value heads each; chunks that parts do not fill."""
    mixer = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=6, chunk=chunk)
    delta = BlockConfig(attention=mixer, feed_forward=SwiGLUConfig(hidden=36))
    softmax = BlockConfig(attention=AttentionConfig(heads=4, kv_heads=2, head_dim=8), feed_forward=SwiGLUConfig(hidden=36))
    return LanguageModelConfig(
        vocab_size=64,
        dim=32,
        max_positions=128,
        layers=(delta, delta, delta, softmax),
        rope=RopeConfig(),
        initial_std=0.08,
        embedding_std=1.0,
    )


def recipe_of(pipeline: bool = False, recompute: bool = False, tokens: int = 73) -> Recipe:
    """One step of two micro-batches on each data rank."""
    base = recipes.debug()
    return chz.replace(
        base,
        model=config_of(),
        engine=PipelineConfig() if pipeline else base.engine,
        recompute=RecomputeConfig(mode="blocks" if recompute else "none"),
        train=chz.replace(base.train, micro_batch=2, global_batch=4, sequence_length=tokens),
    )


def batch_of(lengths: tuple[tuple[int, ...], ...], seed: int) -> Batch:
    """Random tokens in documents of these lengths; the last token of each has no label."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), sum(lengths[0]))
    tokens, labels = (torch.randint(64, shape, generator=generator) for _ in range(2))
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in lengths]).int()
    labels[:, -1] = IGNORE
    return Batch(tokens, labels, places, documents, lengths)


def model_of(recipe: Recipe) -> tuple[LanguageModel, ParameterTable]:
    """On the meta device."""
    assert isinstance(recipe.model, LanguageModelConfig)
    with torch.device("meta"):
        model = LanguageModel(recipe.model)
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
    sizes, lengths = dict(job["mesh"]), LENGTHS[job["lengths"]]
    recipe = recipe_of("pp" in sizes, job.get("recompute", False), sum(lengths[0]))
    batches = [batch_of(lengths, 7 + number) for number in range(2)]
    expected_loss, expected = one_process(chz.replace(recipe, engine=recipes.debug().engine), batches)
    mesh = Mesh(check_mesh(chz.replace(recipe.mesh, **{"dp_shard": 1, **sizes}), world.size), world)
    model, table = model_of(recipe)
    parallel = plugins.current().build(DeclaredConfig()).apply(model, table, mesh, recipe, ROWS)
    sharded = plugins.current().build(FlexShardConfig(debug=True)).shard(model, table, mesh, world)
    engine = plugins.current().build(recipe.engine, model, plugins.current().build(recipe.loss), recipe, parallel)
    model.train()
    results = engine.run(batches[mesh.data_rank :: mesh.data_ranks], SCALE, sharded)
    sharded.finish_gradients()
    errors: dict[str, float] = {}
    for name, parameter in sharded.parameters().items():
        if parameter.grad is None:
            continue
        layout, whole = table[name].layout, expected[name]
        boxes = layout.local(table.rank_in(layout)) if layout is not None else None
        local = whole.flatten() if boxes is None else torch.cat([whole[slices(box)].flatten() for box in boxes] or [whole.new_empty(0)])
        difference = (parameter.grad.flatten().double() - local.double()).abs()
        errors[name] = float(difference.max() / whole.double().abs().max().clamp(min=1e-12)) if local.numel() else 0.0
    loss = mesh.comm("pp", "dp_replicate", "dp_shard", "cp").all_reduce(torch.tensor(total_of(results), dtype=torch.float64), "sum", "loss")
    return {"errors": errors, "loss": abs(float(loss) / expected_loss - 1), "expected": sorted(expected)}


def run(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A job of `_meshes`."""
    world = init_world("cpu", 300.0) if job["ranks"] > 1 else SelfCommunicator()
    try:
        return {"rank": on_mesh(world, job)}
    finally:
        world.close()
        logical.reset()
