"""A plan lays equal blocks out once where placements promise that names do not matter, and finds what laying out each of them finds."""

from __future__ import annotations

from typing import Any

import pytest
from intarsia import plugins
from intarsia.config import resolve
from intarsia.mesh import check_mesh
from intarsia_flexshard import planning
from intarsia_placements.row import DimensionPlacement
from intarsia_planner.devices import find
from intarsia_planner.plan import make_plan

CASES = {
    "row": ("llama3/debug", 5, ("sharder.placement=row",), True),
    "flat, experts, a first block of its own": ("deepseek_v3/debug", 4, ("sharder.placement=flat", "mesh.ep=2"), True),
    "tensor parallel": ("llama3/debug", 4, ("mesh.tp=2", "sharder.placement=row"), True),
    "frozen in one block": ("llama3/debug", 2, ("parameter_groups.0.name=f", "parameter_groups.0.match=layers.1.*", "parameter_groups.0.frozen=true"), True),
    "owned, which balances over blocks": ("llama3/debug", 3, ("sharder.placement=owned", "optimizer=muon"), False),
}  # fmt: skip


def planned(name: str, ranks: int, overrides: tuple[str, ...]) -> tuple[Any, int]:
    """The plan, and how many buckets were laid out."""
    recipe, counted = resolve(name, list(overrides)).recipe, 0
    lay_out = planning.lay_out

    def counting(*arguments: Any) -> Any:
        nonlocal counted
        counted += 1
        return lay_out(*arguments)

    planning.lay_out = counting
    try:
        plan = make_plan(recipe, check_mesh(recipe.mesh, ranks), find("h200"), plugins.current())
    finally:
        planning.lay_out = lay_out
    return plan, counted


def told(plan: Any) -> Any:
    return [(stage.held, stage.wire, stage.spent, stage.flexshard.buckets, stage.flexshard.ranks) for stage in plan.stages]


@pytest.mark.parametrize("case", CASES)
def test_equal_blocks_are_laid_out_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, ranks, overrides, spares = CASES[case]
    plan, few = planned(name, ranks, overrides)
    monkeypatch.setattr(planning, "_likeness", lambda *_: None)
    every, all_of_them = planned(name, ranks, overrides)
    assert told(plan) == told(every)
    assert (few < all_of_them) == spares and all_of_them == len(plan.stages[0].flexshard.buckets)


def test_without_the_promise_each_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DimensionPlacement, "by_shape", False)
    plan, count = planned("llama3/debug", 2, ("sharder.placement=row",))
    assert count == len(plan.stages[0].flexshard.buckets)
