"""Where parallelism plugs in: the paralleliser of a build, a table that keeps a stage, models in stages, and sums over the mesh."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import chz
import pytest
import torch
from intarsia import PLUGIN_API, plugins
from intarsia.comm import Communicator, FakeCommunicator, SelfCommunicator
from intarsia.config import ModelConfig, ParallelConfig
from intarsia.contracts import Entry, Init, ModelEntry, Regions, StagePart
from intarsia.errors import PluginError, UsageError
from intarsia.hookspecs import hookimpl
from intarsia.layout import Layout
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia.plugins import current
from intarsia.train.build import parallelise
from intarsia.train.step import over_ranks
from intarsia_eager.context import TrainContext
from intarsia_llama3.config import llama3
from intarsia_testing.communicator import run_ranks
from torch import nn

# ---------------------------------------------------------------- the paralleliser


@chz.chz(typecheck=True)
class Plain(ParallelConfig):
    """The fake `declared`."""

    factor: int = 1


@chz.chz(typecheck=True)
class Other(ParallelConfig):
    """Another one."""


@chz.chz(typecheck=True)
class FakeModel(ModelConfig):
    """A family with a sharding table."""


class Recorder:
    """Remembers what it was given."""

    def __init__(self, config: ParallelConfig) -> None:
        self.config = config

    def apply(self, model: Any, table: Any, mesh: Any, recipe: Any, sharding: Any) -> Any:
        return SimpleNamespace(config=self.config, given=(model, table, mesh, sharding), part=None)


FAKES = types.ModuleType("parallel_seam_fakes")
vars(FAKES).update(
    Plain=Plain, Other=Other, FakeModel=FakeModel, Recorder=Recorder, TABLE=(("layers.*", "column"),), build=lambda config: None
)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plugins with one family and, where asked for, parallelisers of these names."""
    monkeypatch.setitem(sys.modules, "parallel_seam_fakes", FAKES)

    def make(*names: str) -> plugins.Plugins:
        configs = {"declared": "Plain", "other": "Other"}
        entries = [
            Entry(name=name, config=f"parallel_seam_fakes:{configs[name]}", target="parallel_seam_fakes:Recorder", doc="A fake.")
            for name in names
        ]
        family = ModelEntry(
            name="fake",
            config="parallel_seam_fakes:FakeModel",
            target="parallel_seam_fakes:build",
            doc="A fake.",
            sharding="parallel_seam_fakes:TABLE",
        )
        plugin = SimpleNamespace(
            INTARSIA_API=PLUGIN_API,
            offer_parallelisers=hookimpl(lambda: entries, specname="offer_parallelisers"),
            offer_models=hookimpl(lambda: [family], specname="offer_models"),
        )
        found = plugins.load(entry_points=[plugins.Candidate("acme-parallel", "1.0", "main", plugin=plugin)])
        assert not found.failures, found.report()
        return found

    return make


def built(loaded: plugins.Plugins, sizes: dict[str, int], parallel: ParallelConfig | None = None) -> Any:
    decided: dict[str, tuple[str, str]] = {}
    recipe = SimpleNamespace(parallel=parallel, model=FakeModel(vocab_size=1, dim=1, max_positions=1))
    resolved = SimpleNamespace(recipe=recipe, decide=lambda path, value, reason: decided.update({path: (value, reason)}))
    world = 1
    for axis in ("pp", "dp_shard", "cp", "tp"):
        world *= sizes.get(axis, 1)
    mesh = Mesh(sizes, FakeCommunicator(0, world))
    return SimpleNamespace(resolved=resolved, plugins=loaded, mesh=mesh, model="model", table="table", parallel=None, decided=decided)


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"cp": 2}, {"tp": 2}, {"dp_shard": 2, "ep": 2}], ids=str)
def test_a_mesh_that_needs_one_gets_declared_with_the_familys_table(loaded: Any, sizes: dict[str, int]) -> None:
    found = built(loaded("other", "declared"), sizes)
    parallelise(found)
    axis, size = list(sizes.items())[-1]
    assert found.parallel.config == Plain() and found.parallel.given == ("model", "table", found.mesh, FAKES.TABLE)
    assert found.decided == {"parallel": ("acme-parallel:declared", f"the mesh has {axis} {size}")}


def test_a_mesh_of_data_parallelism_needs_none(loaded: Any) -> None:
    found = built(loaded("declared"), {"dp_shard": 4})
    parallelise(found)
    assert found.parallel is None and found.decided == {}


def test_what_the_recipe_names_is_used_on_any_mesh(loaded: Any) -> None:
    for sizes in ({}, {"tp": 2}):
        found = built(loaded("declared", "other"), sizes, Other())
        parallelise(found)
        assert found.parallel.config == Other() and found.decided == {}


def test_without_a_paralleliser_the_plugin_is_named(loaded: Any) -> None:
    with pytest.raises(UsageError, match=r"mesh: cp 2, tp 2 needs a paralleliser.*Install intarsia-parallel"):
        parallelise(built(loaded(), {"cp": 2, "tp": 2}))


# ---------------------------------------------------------------- a stage's table


class Tied(nn.Module):
    """Two blocks between an embedding and a head that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 4, bias=False)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1].weight.requires_grad_(False)

    def regions(self) -> Regions:
        return Regions(blocks=("layers.0", "layers.1"), ties=(("embedding.weight", "head.weight"),))

    def inits(self) -> dict[str, Init]:
        return {name: Init("ones") for name, _ in self.named_parameters()}


def test_a_table_keeps_a_stages_part_and_the_whole_models_numbers() -> None:
    first, last = (ParameterTable.from_model(Tied()) for _ in range(2))
    total = {"parameters": 12 + 16 + 16, "trainable_parameters": 28}
    assert first.total == total
    first.keep(["embedding.weight", "layers.0.weight"])
    last.keep(["head.weight", "layers.1.weight"])
    assert first.names() == ["embedding.weight", "layers.0.weight"] and last.names() == ["embedding.weight", "layers.1.weight"]
    assert (first.total, last.total) == (total, total)
    one, copy = first["embedding.weight"], last["head.weight"]
    assert (one.names, one.is_copy) == (("embedding.weight",), False) and (copy.names, copy.is_copy) == (("head.weight",), True)
    assert copy.name == "embedding.weight" and "layers.0.weight" not in last
    with pytest.raises(UsageError, match=r"no parameter 'layers.0.weight'"):
        last["layers.0.weight"]


def test_a_whole_tables_names_and_its_check_are_as_ever() -> None:
    table, model = ParameterTable.from_model(Tied()), Tied()
    table.keep(name for name, _ in model.named_parameters(remove_duplicate=False))
    assert table["head.weight"].names == ("embedding.weight", "head.weight") and not table["head.weight"].is_copy


class Kept:
    """A ShardedModel that has what the table has."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters


def test_the_build_of_a_stage_is_checked_by_the_names_it_has() -> None:
    model, table = Tied(), ParameterTable.from_model(Tied())
    model.embedding, model.layers[0] = None, None  # type: ignore[assignment]
    table.keep(name for name, _ in model.named_parameters())
    for info in table.values():
        info.bucket, info.layout = "b", Layout.whole(info.shape)
    groups = {"embedding.weight": "default", "layers.1.weight": ""}
    parameters = {"embedding.weight": model.head.weight, "layers.1.weight": model.layers[1].weight}
    table.check(model, groups, Kept(parameters))  # type: ignore[arg-type]
    model.head = None  # type: ignore[assignment]
    with pytest.raises(PluginError, match=r"head.weight is not in the model any more"):
        table.check(model, groups, Kept(parameters))  # type: ignore[arg-type]


def test_a_copy_does_not_count_in_norms() -> None:
    table = ParameterTable()
    for name, is_copy in (("a", False), ("b", True)):
        table.add(ParameterInfo(name, (2,), "float32", Init("zeros"), layout=Layout.whole((2,)), is_copy=is_copy))
    norm = table.norm({"a": torch.tensor([3.0, 4.0]), "b": torch.full((2,), 100.0)}, SelfCommunicator())
    assert norm == 5.0


# ---------------------------------------------------------------- models in stages


@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_of_a_model_compose_to_the_whole(tied: bool) -> None:
    config = chz.replace(llama3(dim=32, layers=3, heads=2, kv_heads=1, head_dim=16, hidden=32, vocab_size=32), tied=tied)

    def model() -> Any:
        made = current().build(config)
        torch.manual_seed(0)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.1)
        return made

    whole = model()
    tokens = torch.arange(12).view(2, 6)
    context = TrainContext(torch.arange(6).expand(2, 6))
    stages = [StagePart(0, True, False, ("layers.0",)), StagePart(1, False, False, ()), StagePart(2, False, True, ("layers.1", "layers.2"))]
    carry: Any = tokens
    for stage in stages:
        part = model()
        keep = [name for name, there in (("tok_embeddings", stage.first), ("norm", stage.last), ("head", stage.last)) if there]
        for name in {"tok_embeddings", "norm", "head"} - set(keep):
            setattr(part, name, None)
        for number in range(3):
            if f"layers.{number}" not in stage.blocks:
                part.layers[number] = None
        assert (
            part.regions().blocks == stage.blocks
            and part.regions().ties == ()
            and set(part.inits()) == {name for name, _ in part.named_parameters()}
        )
        part.fill_buffers()
        carry = part(carry, context, stage)
    assert torch.equal(carry, whole(tokens, context))


# ---------------------------------------------------------------- sums over the mesh


def test_sums_count_once_along_tp_and_stages_have_sums_of_their_own() -> None:
    sizes = {"pp": 2, "dp_shard": 2, "tp": 2}

    def work(world: Communicator) -> tuple[list[str], list[float]]:
        mesh = Mesh(sizes, world)
        place = mesh.coordinates
        sums = {"loss": torch.tensor(10.0 * place["pp"] + place["dp_shard"], dtype=torch.float64)}
        sums[f"load_{place['pp']}"] = torch.ones((), dtype=torch.float64)
        found = SimpleNamespace(mesh=mesh, world=world)
        names, values = over_ranks(found, sums, torch.ones(1, dtype=torch.float64), "test")  # type: ignore[arg-type]
        return names, values.tolist()

    for names, values in run_ranks(8, work):
        assert names == ["load_0", "load_1", "loss"] and values == [2.0, 2.0, 0 + 1 + 10 + 11, 8.0]
