"""A pipeline of two GPUs over NCCL: every schedule equals one process, and recorded stages equal those that are not."""

from __future__ import annotations

import time
from typing import Any

import chz
import pytest
import torch
from _pipeline import SCHEDULES, batches_of, build_stage, facts, recipe_of
from _spawn import spawn
from intarsia.comm import init_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def run_schedules(schedules: list[str]) -> list[dict[str, Any]]:
    """This rank's losses and gradients' sums, schedule by schedule, with recorded stages where they can be."""
    world = init_world("cuda", 300.0)
    found = []
    for schedule in schedules:
        for capture in (False, True):
            recipe = recipe_of(schedule, 6, capture=capture, split_backward=not capture)
            recipe = chz.replace(recipe, data=chz.replace(recipe.data, packing="one_per_row"))
            engine, sharded, *_ = build_stage(world, recipe, {"pp": 2}, flexshard=True)
            batches = [on_device(batch, world.device) for batch in batches_of(6)]
            for _ in range(3):
                sharded.zero_gradients()
                begin = time.perf_counter()
                results = engine.run(batches, 0.01, sharded)
                sharded.finish_gradients()
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begin
            gradients = {
                name: float(each.grad.double().square().sum()) for name, each in sharded.parameters().items() if each.grad is not None
            }
            found.append(
                {
                    "schedule": schedule,
                    "capture": capture,
                    "sums": facts(results),
                    "gradients": gradients,
                    "seconds": seconds,
                    "evaluated": float(engine.evaluate(batches[0]).total),
                }
            )
    world.close()
    return found


def on_device(batch: Any, device: torch.device) -> Any:
    import dataclasses

    names = ("tokens_BS", "labels_BS", "positions_BS", "documents_BS")
    return dataclasses.replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def test_schedules_and_recordings_on_two_gpus() -> None:
    ranks = spawn(run_schedules, 2, list(SCHEDULES), world=False)
    first = {name: value for rank in ranks for name, value in rank[0]["gradients"].items()}
    for number, (one, other) in enumerate(zip(*ranks, strict=True)):
        what = (one["schedule"], one["capture"])
        gradients = one["gradients"] | other["gradients"]
        assert set(gradients) == set(first), what
        for name, value in gradients.items():
            assert value == pytest.approx(first[name], rel=2e-4), (what, name)
        total = [a + b for a, b in zip(one["sums"]["loss"], other["sums"]["loss"], strict=True)]
        reference = [a + b for a, b in zip(*(rank[0]["sums"]["loss"] for rank in ranks), strict=True)]
        assert total == pytest.approx(reference, rel=1e-5), (what, number)
        print(what, f"{one['seconds'] * 1e3:.1f} ms")
