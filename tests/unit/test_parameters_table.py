"""The parameter table: names, ties, blocks, and the check after the build."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from intarsia.comm import SelfCommunicator
from intarsia.config import MeshConfig
from intarsia.contracts import Init, Regions
from intarsia.errors import PluginError, UsageError
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia_eager.config import WholeConfig
from intarsia_eager.whole import Whole, WholeModel
from intarsia_eager.whole import build as build_whole
from torch import nn


class Small(nn.Module):
    def __init__(self, tied: bool = True, declared: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(3, 4, bias=False)
        if tied:
            self.last.weight = self.first.weight
        self.register_buffer("steps", torch.empty(2))
        self.register_buffer("scratch", torch.empty(2), persistent=False)
        self.ties: tuple[tuple[str, ...], ...] = (("first.weight", "last.weight"),) if declared else ()
        self.blocks: tuple[str, ...] = ("layers.0", "layers.1")
        self.skipped: str = ""

    def regions(self) -> Regions:
        return Regions(blocks=self.blocks, ties=self.ties)

    def inits(self) -> Mapping[str, Init]:
        found = {name: Init("normal", std=0.1) for name, _ in self.named_parameters() if name != self.skipped}
        return {**found, "steps": Init("constant", value=7.0)}

    def fill_buffers(self) -> None:
        self.scratch.fill_(2.0)


def on_meta(**arguments: bool) -> Small:
    with torch.device("meta"):
        return Small(**arguments)


def build(model: Small, **arguments: object) -> tuple[ParameterTable, WholeModel]:
    table = ParameterTable.from_model(model, **arguments)  # type: ignore[arg-type]
    world = SelfCommunicator()
    return table, Whole().shard(model, table, Mesh(check_mesh(MeshConfig(), 1), world), world)


def groups_of(table: ParameterTable) -> dict[str, str]:
    return {name: "default" if info.trainable else "" for name, info in table.items()}


def test_names_ties_blocks() -> None:
    table = ParameterTable.from_model(on_meta(), "bfloat16")
    assert table.names() == ["first.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert table["last.weight"] is table["first.weight"] and table["first.weight"].aliases == ("last.weight",)
    assert [info.block for info in table.values()] == ["", "layers.0", "layers.0", "layers.1", "layers.1"]
    assert len(table) == 5 and "last.weight" in table and "x" not in table and table["first.weight"].dtype == "bfloat16"
    with pytest.raises(UsageError, match=r"layers\.0\.wieght.*layers\.0\.weight"):
        table["layers.0.wieght"]
    with pytest.raises(PluginError, match="already"):
        table.tie("first.weight", "last.weight")
    with pytest.raises(UsageError, match=r"'bfloat61'.*'bfloat16'"):
        ParameterTable("bfloat61")
    with pytest.raises(UsageError, match="not a floating-point dtype"):
        ParameterTable("float32", "int8")


def test_a_tie_across_blocks_belongs_to_the_root() -> None:
    model = on_meta(tied=False, declared=False)
    model.layers[1].weight = model.layers[0].weight
    model.ties = (("layers.0.weight", "layers.1.weight"),)
    assert ParameterTable.from_model(model)["layers.1.weight"].block == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model, "ties", ()), "'first.weight' and 'last.weight' are one parameter"),
        (lambda model: setattr(model, "ties", (("first.weight", "layers.0.weight"),)), "do not share one storage"),
        (lambda model: setattr(model, "ties", (("first.weight", "lsat.weight"),)), "'last.weight'"),
        (lambda model: setattr(model, "blocks", ("layers.2",)), r"block 'layers.2'.*'layers.1'"),
        (lambda model: setattr(model, "blocks", ("layers", "layers.1")), "'layers.1' lies inside block 'layers'"),
        (lambda model: setattr(model, "skipped", "layers.1.bias"), r"says nothing of layers\.1\.bias"),
    ],
)
def test_what_a_model_declares_must_be_so(change: object, words: str) -> None:
    model = on_meta()
    change(model)  # type: ignore[operator]
    with pytest.raises(PluginError, match=words):
        ParameterTable.from_model(model)


def test_whole_fills_parameters_and_buffers() -> None:
    model = on_meta()
    table, sharded = build(model, seed=5)
    again, _ = build(other := on_meta(), seed=5)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    assert model.last.weight is model.first.weight is sharded.parameters()["first.weight"]
    assert model.steps.tolist() == [7.0, 7.0] and model.scratch.tolist() == [2.0, 2.0]
    assert [name for name, _ in sharded.modules()] == [""] and again.names() == table.names()
    table.check(model, groups_of(table), sharded)
    sharded.finish_gradients()
    assert all(not parameter.grad.any() for parameter in sharded.parameters().values())
    sharded.zero_gradients()
    assert all(parameter.grad is None for parameter in sharded.parameters().values())


def test_whole_refuses_what_it_cannot_do() -> None:
    table = ParameterTable.from_model(on_meta(), "float32", "bfloat16")
    mesh = Mesh(check_mesh(MeshConfig(), 1), SelfCommunicator())
    with pytest.raises(UsageError, match=r"precision.compute bfloat16.*sharder=flexshard"):
        build_whole(WholeConfig()).shard(on_meta(), table, mesh, mesh.world)
    mesh.sizes["dp_shard"] = 4
    with pytest.raises(UsageError, match=r"mesh.dp_shard is 4"):
        build_whole(WholeConfig()).shard(on_meta(), table, mesh, mesh.world)


def test_a_persistent_buffer_needs_a_start() -> None:
    model = on_meta()
    with torch.device("meta"):
        model.register_buffer("forgotten", torch.empty(1))
    with pytest.raises(PluginError, match="'forgotten'"):
        build(model)


def test_the_check_finds_every_kind_of_damage() -> None:
    def broken(change: object) -> str:
        model = on_meta()
        model.layers[0].bias.requires_grad_(False)
        table, sharded = build(model)
        groups = groups_of(table)
        change(model, table, sharded, groups)  # type: ignore[operator]
        with pytest.raises(PluginError) as caught:
            table.check(model, groups, sharded)
        return str(caught.value)

    def untie(model: Small, *_: object) -> None:
        model.last.weight = nn.Parameter(model.last.weight.detach().clone())

    assert "last.weight is no longer tied to first.weight" in broken(untie)
    assert "layers.0.bias is trained, but was declared frozen" in broken(lambda model, *_: model.layers[0].bias.requires_grad_(True))
    assert "layers.1.bias is in no optimizer group" in broken(lambda m, t, s, groups: groups.pop("layers.1.bias"))
    assert "layers.0.bias is frozen, but in the optimizer group 'x'" in broken(
        lambda m, t, s, groups: groups.update({"layers.0.bias": "x"})
    )
    assert "layers.1.bias is in no bucket" in broken(lambda m, table, *_: setattr(table["layers.1.bias"], "bucket", ""))
    assert "layers.1.bias is not in the model any more" in broken(lambda model, *_: setattr(model.layers[1], "bias", None))
    assert "extra is in the model, but not" in broken(lambda model, *_: setattr(model, "extra", nn.Parameter(torch.ones(1))))
    assert "layers.1.bias has no local part" in broken(lambda m, t, sharded, g: sharded._parameters.pop("layers.1.bias"))
