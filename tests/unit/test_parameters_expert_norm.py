"""Norms count each element once on a mesh with expert groups; an optimizer that cannot update split masters is refused; loading gives masters back."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from intarsia.comm import FakeCommunicator
from intarsia.config import MeshConfig
from intarsia.contracts import Init, Member
from intarsia.errors import UsageError
from intarsia.layout import Layout
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia.train.build import build_optimizer
from intarsia.train.state import ModelState
from intarsia_placements import row
from intarsia_placements.config import Row
from intarsia_placements.layouts import build_layouts
from torch import nn

SHAPE = (6, 4)


def layouts() -> dict[str, Layout]:
    """Experts over ep, then over its complement; only over ep (copies along the complement); a dense one over dp_shard; replicas of the whole."""
    by_row = row.build(Row())
    member = [Member("w", SHAPE)]
    replicas = ("dp_replicate", 2, "replicate")
    return {
        "experts": build_layouts(member, [replicas, ("ep", 2, by_row), ("ep_shard", 3, by_row)])["w"],
        "copied experts": build_layouts(member, [("ep", 2, by_row)])["w"],
        "dense": build_layouts(member, [("dp_shard", 3, by_row)])["w"],
        "whole": Layout.whole(SHAPE),
    }


@pytest.mark.parametrize("name", ["experts", "copied experts", "dense", "whole"])
def test_every_element_counts_once(name: str) -> None:
    layout, whole = layouts()[name], torch.arange(24.0).view(SHAPE)
    sizes = check_mesh(MeshConfig(pp=1, dp_replicate=2, dp_shard=3, tp=2, ep=2), 12)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(12):
        table = ParameterTable()
        table.mesh = Mesh(sizes, FakeCommunicator(rank, 12))
        table.add(ParameterInfo("w", SHAPE, "float32", Init("zeros"), layout=layout))
        boxes = [whole[tuple(map(slice, box.start, box.end))].reshape(-1) for box in layout.local(table.rank_in(layout))]
        local = torch.cat(boxes) if boxes else torch.zeros(0)
        total += table.norm({"w": local}, FakeCommunicator(rank, 12)).double() ** 2
    assert math.isclose(total.item(), float((whole**2).sum()), rel_tol=1e-5)


class Plain:
    def learning_rates(self) -> dict[str, float]:
        return {"default": 1.0}


class Splitting(Plain):
    updates_split_masters = True


def built(optimizer: Any) -> Any:
    table = ParameterTable()
    low = torch.zeros(SHAPE, dtype=torch.int16)
    table.add(ParameterInfo("w", SHAPE, "float32", Init("zeros"), low=low))
    recipe = SimpleNamespace(parameter_groups=(), optimizer=SimpleNamespace(), schedule="schedule")
    plugins = SimpleNamespace(build=lambda config, *context: optimizer)
    sharded = SimpleNamespace(parameters=lambda: {"w": nn.Parameter(torch.zeros(SHAPE))})
    return SimpleNamespace(
        resolved=SimpleNamespace(recipe=recipe), table=table, sharded=sharded, plugins=plugins, world=FakeCommunicator(0, 1)
    )


def test_split_masters_need_an_optimizer_that_updates_them() -> None:
    with pytest.raises(UsageError, match=r"SimpleNamespace updates whole masters only.*sharder.master=split"):
        build_optimizer(built(Plain()))
    accepting = Splitting()
    assert build_optimizer(built(accepting)) is accepting


def test_what_was_loaded_is_given_to_the_sharder_and_what_is_missing_is_left_out() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(2))
    calls: list[Any] = []
    copies = {name: value.detach().clone() for name, value in model.named_parameters()}
    sharded = SimpleNamespace(
        parameters=lambda: dict(model.named_parameters()),
        masters=lambda: copies,
        load_masters=lambda values: calls.append(sorted(values)),
        after_update=lambda: calls.append("stale"),
    )
    table = ParameterTable()
    for name, value in model.named_parameters():
        table.add(ParameterInfo(name, tuple(value.shape), "float32", Init("zeros"), layout=Layout.whole(tuple(value.shape))))
    state = ModelState(model, sharded, table)  # type: ignore[arg-type]
    items = {item.name: item.value for item in state.state()}
    assert items["weight"].data_ptr() == copies["weight"].data_ptr() and set(items) == {"weight", "bias", "seen"}
    state.load_state({"weight": items["weight"]})
    assert calls == [["weight"], "stale"] and not model.seen.any()
    state.load_state({"bias": items["bias"], "seen": torch.ones(2)})
    assert calls[2:] == [["bias"], "stale"] and model.seen.all()
