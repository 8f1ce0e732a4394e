"""A step's timeline on two GPUs: its times are the device's and add up, and a trace names the phases on the streams that they run on.

pytest -m gpu tests/gpu/test_flexshard_timeline_gpu.py -v
INTARSIA_TEST_DEVICE=cpu pytest -m gpu tests/gpu/test_flexshard_timeline_gpu.py       # the same over gloo, by the host's clock
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from _spawn import spawn

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("INTARSIA_TEST_DEVICE", "cuda")
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "INTARSIA_TEST_DEVICE": DEVICE}
PHASES = ("gather", "wait", "forward", "backward", "reduce", "wait for sum of")


def measured() -> dict[str, Any]:
    """Facts of the sixth step, what its trace names on the host and on the device, and whether numbers are those of a run that nobody measured."""
    from _sharded import make, placements
    from intarsia.comm import init_world
    from intarsia.plugins import current
    from intarsia.train.groups import optimizer_groups
    from intarsia_flexshard.config import FlexShardConfig
    from intarsia_flexshard.timeline import timeline
    from intarsia_optimizers.config import AdamWConfig

    world = init_world(DEVICE)
    results: list[torch.Tensor] = []
    found: dict[str, Any] = {}
    for measures in (False, True):
        config = FlexShardConfig(placement=placements()["flat"])
        model, table, sharded, mesh = make(world, {"compute": "bfloat16", "twice": False}, current().build(config))
        groups = optimizer_groups((), sharded.parameters(), list(table))
        optimizer = current().build(AdamWConfig(lr=0.01), groups, table, world)
        tokens = torch.arange(20, device=mesh.device).view(4, 5) % 5

        def step(model: Any = model, sharded: Any = sharded, optimizer: Any = optimizer, tokens: torch.Tensor = tokens) -> None:
            model(tokens, True).float().square().sum().backward()
            sharded.finish_gradients()
            sharded.update(optimizer, 1.0)
            sharded.zero_gradients()

        for _ in range(5):
            step()
        if measures:
            with torch.profiler.profile() as profiler, timeline(sharded) as line:
                step()
            found["facts"] = line.facts()
            found["names"] = names(profiler)
        else:
            step()
        results.append(torch.cat([value.detach().flatten() for value in sharded.masters().values()]))
    found["equal"] = bool(torch.equal(*results))
    world.close()
    return found


def names(profiler: Any) -> dict[str, list[str]]:
    """By category what a trace names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return {
        kind: sorted({event["name"] for event in events if event.get("cat") == kind}) for kind in ("user_annotation", "gpu_user_annotation")
    }


def test_a_step_is_measured_and_named() -> None:
    for found in spawn(measured, 2, world=False, environment=ENVIRONMENT):
        facts, named = found["facts"], found["names"]
        assert facts["clock"] == ("host" if DEVICE == "cpu" else "device") and found["equal"]
        parts = [facts[name] for name in ("compute_ms", "exposed_ms", "update_ms", "rest_ms")]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(facts["step_ms"], rel=1e-3) and facts["compute_ms"] > 0 < facts["update_ms"]
        for row in facts["buckets"]:
            assert row["gathers"] >= 1 and row["reductions"] == 1 and row["gather_ms"] > 0 < row["reduce_ms"]
            assert row["gathered_bytes"] > 0 < row["reduced_bytes"]
        wanted = {f"{phase} blocks.2" for phase in PHASES}
        assert wanted <= set(named["user_annotation"])
        if DEVICE == "cuda":
            assert wanted <= set(named["gpu_user_annotation"])
            assert any(name.startswith("update ") for name in named["gpu_user_annotation"])
