"""Processes over gloo: each pipeline schedule gives the losses and every gradient of one process."""

from __future__ import annotations

from typing import Any

import pytest
from _pipeline import SCHEDULES, batches_of, difference, one_process, pipelined, recipe_of
from _spawn import spawn

ROUNDS = {
    2: [
        ("gpipe", {"micro_batches": 3}, {}),
        ("1f1b", {"micro_batches": 5, "tied": True}, {"flexshard": True}),
        ("interleaved", {"micro_batches": 3, "recompute": True}, {"streams": True}),
        ("zb_h1", {"micro_batches": 4, "unshard": "action"}, {"flexshard": True, "steps": 2}),
        ("zbv", {"micro_batches": 2, "few_micro_batches": True}, {"streams": True}),
        ("dualpipev", {"micro_batches": 5, "tied": True, "reduce": "each"}, {"flexshard": True}),
    ],
    4: [
        (schedule, {"micro_batches": 8, "tied": schedule != "zb_h1"}, {"flexshard": schedule in ("zbv", "1f1b")}) for schedule in SCHEDULES
    ],
}


def run_rounds(world: Any, ranks: int) -> list[dict[str, float]]:
    """The largest differences of each round, over all ranks."""
    found = []
    for schedule, settings, build in ROUNDS[ranks]:
        recipe = recipe_of(schedule, **settings)
        batches = batches_of(settings["micro_batches"])
        expected = one_process(recipe, batches, streams=build.get("streams", False))
        mine = pipelined(world, recipe, batches, {"pp": ranks}, **build)
        gradients = max(difference(expected["gradients"][name], value) for name, value in mine["gradients"].items())
        every = world.gather_json(
            {"sums": mine["sums"], "evaluated": mine["evaluated"], "names": list(mine["gradients"]), "gradients": gradients}
        )
        sums = max(
            abs(sum(each["sums"].get(name, [0.0] * len(values))[number] for each in every) - value) / max(abs(value), 1e-30)
            for name, values in expected["sums"].items()
            for number, value in enumerate(values)
        )
        found.append(
            {
                "gradients": max(each["gradients"] for each in every),
                "sums": sums,
                "evaluated": abs(sum(each["evaluated"] for each in every) / expected["evaluated"] - 1),
                "missing": len(set(expected["gradients"]) - {name for each in every for name in each["names"]}),
            }
        )
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_schedules_equal_one_process(ranks: int) -> None:
    (found, *_) = spawn(run_rounds, ranks, ranks)
    for (schedule, settings, build), worst in zip(ROUNDS[ranks], found, strict=True):
        assert worst["missing"] == 0, (schedule, settings, build)
        assert max(worst.values()) <= 1e-6, (schedule, settings, build, worst)
