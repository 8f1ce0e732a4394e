"""A tiny model in stages and in one piece, for the tests of the pipeline: what they compute is compared by the callers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import chz
import torch
from intarsia import logical, plugins
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.config import RecomputeConfig
from intarsia.contracts import IGNORE, Batch, LossSum, SequenceContext
from intarsia.layout import whole_region
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable, materialise_buffers
from intarsia_eager.config import WholeConfig
from intarsia_eager.engine import EagerEngine, prepare_regions
from intarsia_eager.whole import build as build_whole
from intarsia_flexshard.config import FlexShardConfig
from intarsia_llama3 import recipes
from intarsia_llama3.config import Llama3Config, llama3
from intarsia_llama3.model import Llama3
from intarsia_pipeline.config import PipelineConfig
from intarsia_pipeline.show_command import config_of
from intarsia_pipeline.split import split
from torch import Tensor, nn

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev")
ROWS, TOKENS, VOCABULARY = 2, 7, 23


@dataclasses.dataclass
class Alone:
    """A Parallel that only splits."""

    part: Any

    def local(self, batch: Batch) -> Batch:
        return batch

    def context(self, batch: Batch, windows: Sequence[int | None]) -> None:
        return None


class Plain:
    """A sharder that no schedule can drive: parameters are whole, and nothing is summed over ranks."""

    def __init__(self, model: nn.Module, table: ParameterTable) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._parameters = {}
        for name, info in table.items():
            parameter = nn.Parameter(torch.empty(info.shape))
            table.fill(name, whole_region(info.shape), parameter)
            self._parameters[name] = parameter
            for each in info.names:
                owner, _, attribute = each.rpartition(".")
                setattr(modules[owner], attribute, parameter)
        materialise_buffers(model, torch.device("cpu"), table.seed)
        self.said: list[bool] = []

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def set_last_micro_batch(self, last: bool) -> None:
        self.said.append(last)

    def finish_gradients(self) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def zero_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


class Streams(Llama3):
    """Its payload is a tree: the stream, a float32 sum of all block outputs, and how many blocks there were, which takes no part in backward."""

    def enter(self, tokens_BS: Tensor, context: SequenceContext) -> Any:
        x_BSD = super().enter(tokens_BS, context)
        return {"x": x_BSD, "more": (x_BSD.float() * 0.0, torch.zeros(1, dtype=torch.int64, device=x_BSD.device))}

    def run_block(self, name: str, carry: Any, shared: Any, context: SequenceContext) -> Any:
        x_BSD = super().run_block(name, carry["x"], shared, context)
        total, count = carry["more"]
        logical.record("blocks", torch.ones((), device=x_BSD.device))
        x_BSD = logical.add_loss(x_BSD, "size", 1e-3 * x_BSD.float().square().sum())
        return {"x": x_BSD, "more": (total + x_BSD.float() * (1.0 + count), count + 1)}

    def leave(self, carry: Any, shared: Any, context: SequenceContext) -> Any:
        return super().leave(carry["x"] + 0.1 * carry["more"][0].to(carry["x"].dtype), shared, context)


def recipe_of(
    schedule: str = "1f1b",
    micro_batches: int = 4,
    layers: int = 8,
    tied: bool = False,
    recompute: bool = False,
    settings: Sequence[str] = (),
    **engine: Any,
) -> Any:
    """A recipe whose step has so many micro-batches on each data rank."""
    base = recipes.debug()
    model = llama3(
        dim=16,
        layers=layers,
        heads=2,
        kv_heads=1,
        head_dim=8,
        hidden=24,
        vocab_size=VOCABULARY,
        max_positions=64,
        tied=tied,
        embedding_std=0.5,
    )
    return chz.replace(
        base,
        model=model,
        engine=PipelineConfig(schedule=config_of(schedule, list(settings)), **engine),
        train=chz.replace(base.train, micro_batch=ROWS, global_batch=ROWS * micro_batches, sequence_length=TOKENS),
        recompute=RecomputeConfig(mode="blocks" if recompute else "none"),
    )


def model_of(config: Llama3Config, streams: bool, dtype: str = "float32") -> tuple[nn.Module, ParameterTable]:
    """On the meta device."""
    with torch.device("meta"):
        model: nn.Module = (Streams if streams else Llama3)(config)
    return model, ParameterTable.from_model(model, "float32", dtype, "float32", 3)


def batches_of(count: int, salt: int = 0, rows: Sequence[int] = ()) -> list[Batch]:
    """Random tokens; some labels do not count. `rows` are the numbers of rows, where they differ."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(100 * salt + number)
        size = rows[number % len(rows)] if rows else ROWS
        tokens, labels = (torch.randint(VOCABULARY, (size, TOKENS), generator=generator) for _ in range(2))
        labels[:, -1] = IGNORE
        positions = torch.arange(TOKENS).expand(size, TOKENS)
        made.append(Batch(tokens, labels, positions, torch.zeros(size, TOKENS, dtype=torch.int32), ((TOKENS,),) * size))
    return made


def facts(results: Sequence[LossSum]) -> dict[str, list[float]]:
    """Sums of micro-batches by name."""
    found: dict[str, list[float]] = {}
    for number, result in enumerate(results):
        for name, value in {"loss": result.total, **result.sums}.items():
            found.setdefault(name, [0.0] * len(results))[number] += float(value)
    return found


def one_process(recipe: Any, batches: Sequence[Batch], streams: bool = False, dtype: str = "float32") -> dict[str, Any]:
    """Sums, gradients and the evaluated loss of the model in one piece."""
    model, table = model_of(recipe.model, streams, dtype)
    world = SelfCommunicator()
    sharder = build_whole(WholeConfig()) if dtype == "float32" else plugins.current().build(FlexShardConfig())
    sharded = sharder.shard(model, table, Mesh({}, world), world)
    prepare_regions(model, recipe.compile, recipe.recompute)
    engine = EagerEngine(model, plugins.current().build(recipe.loss))
    model.train()
    results = engine.run(batches, 0.01, sharded)
    sharded.finish_gradients()
    gradients = {name: parameter.grad.clone() for name, parameter in sharded.parameters().items() if parameter.grad is not None}
    sharded.zero_gradients()
    return {"sums": facts(results), "gradients": gradients, "evaluated": float(engine.evaluate(batches[0]).total)}


def build_stage(
    world: Communicator, recipe: Any, sizes: dict[str, int], streams: bool = False, dtype: str = "float32", flexshard: bool = False
) -> Any:
    """(engine, sharded, table, mesh, part) of this rank."""
    mesh = Mesh(check_mesh(chz.replace(recipe.mesh, **{"dp_shard": 1, **sizes}), world.size), world)
    model, table = model_of(recipe.model, streams, dtype)
    part = split(model, table, mesh, recipe)
    if flexshard:
        sharded: Any = plugins.current().build(FlexShardConfig(debug=True)).shard(model, table, mesh, world)
    else:
        sharded = Plain(model, table)
    engine = plugins.current().build(recipe.engine, model, plugins.current().build(recipe.loss), recipe, Alone(part))
    model.train()
    return engine, sharded, table, mesh, part


def pipelined(
    world: Communicator, recipe: Any, batches: Sequence[Batch], sizes: dict[str, int], steps: int = 1, **build: Any
) -> dict[str, Any]:
    """This rank's sums, gradients (of its own parameters) and evaluated loss."""
    engine, sharded, table, _, part = build_stage(world, recipe, sizes, **build)
    for _ in range(steps):
        sharded.zero_gradients()
        results = engine.run(batches, 0.01, sharded)
        sharded.finish_gradients()
    gradients = {name: parameter.grad.clone() for name, parameter in sharded.parameters().items() if parameter.grad is not None}
    sharded.zero_gradients()
    evaluated = float(engine.evaluate(batches[0]).total)
    copies = [name for name, info in table.items() if info.is_copy]
    return {
        "sums": facts(results),
        "gradients": gradients,
        "evaluated": evaluated,
        "copies": copies,
        "stages": [each.index for each in part.stages],
    }


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to the largest element."""
    return float((one.double() - other.double()).abs().max() / one.double().abs().max().clamp(min=1e-30))


def worst(expected: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The largest relative differences over all ranks: of sums, gradients, the evaluated loss. Every parameter must have been on some rank."""
    names = {name for rank in ranks for name in rank["gradients"]}
    assert names == set(expected["gradients"]), names ^ set(expected["gradients"])
    gradients = [difference(expected["gradients"][name], value) for rank in ranks for name, value in rank["gradients"].items()]
    sums = []
    for name, values in expected["sums"].items():
        found = torch.tensor([rank["sums"].get(name, [0.0] * len(values)) for rank in ranks], dtype=torch.float64).sum(0)
        sums.append(difference(torch.tensor(values, dtype=torch.float64), found))
    evaluated = abs(sum(rank["evaluated"] for rank in ranks) - expected["evaluated"]) / abs(expected["evaluated"])
    return {"gradients": max(gradients), "sums": max(sums), "evaluated": evaluated}
